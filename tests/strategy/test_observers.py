"""Who is there to see gradients, which are then whole from the start."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LambdaCallback

from lightning_megatron import FaultTolerance, GradientMonitor, Monitor
from lightning_megatron.strategy.code_inspection import looks_at_gradients
from tests.strategy.small import Small


def report(module: Any) -> float:
    return max(float(p.grad.abs().max()) for p in module.parameters())


class Stepping(Small):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class Decorated(Small):
    @torch.no_grad()
    def on_after_backward(self, *_: Any) -> None:
        self.largest = report(self)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Mentioning(Small):
    """Looks where nobody needs gradients to be whole who does not look."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.largest = [p.grad for p in self.parameters()]


class Logging(L.Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("kind", [Stepping, Decorated, Manual])
def test_modules_that_may_look(kind: type[Small]) -> None:
    trainer: Any = SimpleNamespace(callbacks=[])
    assert looks_at_gradients(trainer, kind())


def test_hooks_that_are_set_on_the_object() -> None:
    trainer: Any = SimpleNamespace(callbacks=[])
    module = Small()
    module.on_after_backward = lambda: None  # type: ignore[method-assign]
    assert looks_at_gradients(trainer, module)


def test_callbacks_that_may_look() -> None:
    for callback in (Logging(), LambdaCallback(on_after_backward=lambda *a: report(a[1]))):
        trainer: Any = SimpleNamespace(callbacks=[callback])
        assert looks_at_gradients(trainer, Small()), callback


@pytest.mark.parametrize("kind", [Small, Mentioning])
def test_nobody_pays_for_what_does_not_look(kind: type[Small]) -> None:
    callbacks: list[Any] = [
        *(Monitor(), FaultTolerance(), GradientMonitor(), EMAWeightAveraging()),
        *(EarlyStopping("val"), LambdaCallback(on_train_batch_end=lambda *a: report(a[1]))),
    ]
    trainer: Any = SimpleNamespace(callbacks=callbacks)
    assert not looks_at_gradients(trainer, kind())
