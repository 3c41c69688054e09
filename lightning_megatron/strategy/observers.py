"""Whether anybody but the optimizers may look at gradients.

ZeRO 1 and 2 bring each gradient to the rank that owns it, and ``.grad`` is None everywhere. Users
may look at ``.grad`` all the same, to clip, log or change it, and must see then what they would see
under ``DistributedDataParallel``: the whole mean. Making it whole costs an all-reduce in place of a
reduce-scatter, so it is done only where somebody may look:

* under manual optimization, where the step itself may;
* where the module or a callback overrides a hook that runs between the backward and the moment
  when gradients are cleared (`HOOKS`);
* where code of the module or of a callback mentions gradients (`strategy.code_inspection`).

Weights and gradients of which ranks hold parts (tp, ZeRO 3, stages of a pipeline) know it
(`whole.weights`, `whole.stage_weights`), and nobody has to look for code that mentions them.

Callbacks of Lightning and of this package do not count: the former look at no gradient, the latter
know where gradients are.
"""

from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_megatron.strategy.code_inspection import names_in, own_functions

HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of modules and callbacks that exist to look at gradients, or can."""

_HARMLESS = frozenset(
    {
        "autograd",
        "enable_grad",
        "gradient_clip_algorithm",
        "gradient_clip_val",
        "is_grad_enabled",
        "no_grad",
        "requires_grad",
        "requires_grad_",
        "set_grad_enabled",
        "set_to_none",
        "zero_grad",
        "accumulate_grad_batches",
    }
)


def looks_at_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the module or a callback of the user's may look at ``.grad``."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return not module.automatic_optimization or any(
        name in HOOKS or _mentions(function)
        for observer in (module, *callbacks)
        for name, function in own_functions(observer)
    )


def _mentions(function: FunctionType) -> bool:
    """Whether a function has a word for gradients."""
    return any("grad" in name and name not in _HARMLESS for name in names_in(function))


def transforms_batches(module: LightningModule) -> bool:
    """Whether hooks of the module or of its data change a batch before it is trained on."""
    sources = (module, getattr(module.trainer, "datamodule", None))
    return any(
        source is not None and is_overridden(hook, source)
        for source in sources
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
    )
