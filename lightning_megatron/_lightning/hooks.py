"""Private names between a Trainer and the strategy, the module, and the precision plugin."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from typing_extensions import override

# Of the module


def call_module_hook(trainer: Trainer, name: str, *args: Any) -> Any:
    """Call a hook of the module as a Trainer does, so that it is profiled and may log.

    Private: `lightning.pytorch.trainer.call._call_lightning_module_hook`. Needed where a hook is
    called once more than Lightning calls it.
    """
    return _call_lightning_module_hook(trainer, name, *args)


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The Trainer of a module; None if it has none.

    Private: `LightningModule._trainer`; the property ``trainer`` raises where there is none.
    """
    trainer: Trainer | None = getattr(module, "_trainer", None)
    return trainer


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set what ``module.device_mesh`` returns, as Lightning's ModelParallelStrategy does.

    Changed: `LightningModule._device_mesh`; the property has no setter.
    """
    module._device_mesh = mesh


def is_of_hyper_parameters(name: str) -> bool:
    """Whether an attribute of a module holds what ``save_hyperparameters`` saved.

    Private: `_hparams`, `_hparams_initial` and `_hparams_name` of a LightningModule, which it has
    from the call of that method on.
    """
    return name.startswith("_hparams")


# Of the strategy


def keep_precision(strategy: Strategy, plugin: Precision | None) -> None:
    """Keep the precision plugin of a strategy, in a setter that overrides Lightning's.

    Private: `Strategy._precision_plugin`. Needed because ``super()`` has no setters.
    """
    strategy._precision_plugin = plugin


def synchronizes_batch_norm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer was given ``sync_batchnorm=True``.

    Private: `ParallelStrategy._layer_sync`, which the Trainer sets.
    """
    return strategy._layer_sync is not None


# Of the precision plugin


class PrecisionAroundClosure(Precision):
    """Precision plugin with a hook between the closure and the step of an optimizer.

    An optimizer runs the closure itself, so nothing public stands between them.
    """

    @override
    def _wrap_closure(
        self, model: LightningModule, optimizer: Any, closure: Callable[[], Any]
    ) -> Any:
        # Private: `Precision._wrap_closure`, which `Precision.optimizer_step` passes on.
        with self.around_closure():
            result = super()._wrap_closure(model, optimizer, closure)
        self.before_update()
        return self.loss_of_closure(result)

    def loss_of_closure(self, loss: Any) -> Any:
        """Return what the optimizer is to see of the result of a closure."""
        return loss

    def before_update(self) -> None:
        """Called after the closure, before the optimizer has changed anything."""

    def around_closure(self) -> AbstractContextManager[None]:
        """Context of a closure that an optimizer runs, and of the hooks behind it."""
        return nullcontext()

    def finish_closure(self, model: LightningModule, optimizer: Any) -> None:
        """Call the hooks that see gradients, and clip these, after a closure that was run here.

        Private: `Precision._after_closure`.
        """
        self._after_closure(model, optimizer)
