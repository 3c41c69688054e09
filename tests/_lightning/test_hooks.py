"""Hooks of module, strategy and precision are called as `_lightning.hooks` takes them to be."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_megatron._lightning.hooks import (
    PrecisionAroundClosure,
    call_module_hook,
    is_of_hyper_parameters,
    keep_precision,
    set_device_mesh,
    synchronizes_batch_norm,
    trainer_of,
)
from tests._lightning.running import Module, On, make_trainer


def test_call_module_hook() -> None:
    class Asked(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["hook"] = self._current_fx_name

    checkpoint: dict[str, Any] = {}

    def ask(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        call_module_hook(trainer, "on_save_checkpoint", checkpoint)

    make_trainer(On(on_train_start=ask)).fit(Asked())
    assert checkpoint == {"hook": "on_save_checkpoint"}


def test_trainer_of() -> None:
    found: list[Any] = []
    module = Module()
    assert trainer_of(None) is None
    assert trainer_of(module) is None
    with pytest.raises(RuntimeError):
        _ = module.trainer  # else trainer_of is not needed
    trainer = make_trainer(On(on_train_start=lambda _, module: found.append(trainer_of(module))))
    trainer.fit(module)
    assert found == [trainer]


def test_set_device_mesh() -> None:
    module, mesh = Module(), object()
    assert module.device_mesh is None
    set_device_mesh(module, mesh)
    assert module.device_mesh is mesh


def test_is_of_hyper_parameters() -> None:
    class Saved(pl.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    more = vars(Saved()).keys() - vars(pl.LightningModule()).keys()
    assert more
    assert all(map(is_of_hyper_parameters, more))
    assert not any(map(is_of_hyper_parameters, vars(pl.LightningModule())))


def test_keep_precision() -> None:
    class Ours(SingleDeviceStrategy):
        @property
        @override
        def precision_plugin(self) -> Precision:
            return super().precision_plugin

        @precision_plugin.setter
        def precision_plugin(self, plugin: Precision | None) -> None:
            keep_precision(self, plugin)

    plugin = Precision()
    strategy = make_trainer(strategy=Ours("cpu"), plugins=plugin).strategy
    assert strategy.precision_plugin is plugin


@pytest.mark.parametrize("given", [True, False])
def test_synchronizes_batch_norm(given: bool) -> None:
    strategy: Any = make_trainer(strategy="ddp", devices=2, sync_batchnorm=given).strategy
    assert synchronizes_batch_norm(strategy) is given


class Around(PrecisionAroundClosure):
    def __init__(self, module: Module, alone: bool = False) -> None:
        self.module, self.alone = module, alone

    @override
    def before_update(self) -> None:
        self.module.calls.append("before_update")

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if not self.alone:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self.finish_closure(model, optimizer)
        self.module.calls.append("update")
        return result


class Clipped(Module):
    norms: list[float]

    @override
    def configure_optimizers(self) -> Any:
        module = self

        class Noting(torch.optim.SGD):
            @override
            def step(self, closure: Any = None) -> Any:
                result = closure()
                module.calls.append("update")
                return result

        return Noting(self.parameters(), lr=0.1)

    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("clip")


@pytest.mark.parametrize("alone", [False, True])
def test_precision_around_closure(alone: bool) -> None:
    module = Clipped()
    plugin = Around(module, alone)
    trainer = make_trainer(plugins=plugin, limit_train_batches=1, limit_val_batches=0)
    trainer.fit(module)
    between = [] if alone else ["before_update"]
    steps = ["training_step", "on_before_optimizer_step", "clip", *between, "update"]
    assert module.calls == [*steps, "on_train_epoch_end"]
