"""Every hook fires as often, as early and with the same gradients as in plain Lightning."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategy.refusals import refusal
from tests.strategy.small import (
    LAYOUTS,
    Small,
    assert_same,
    dp_of,
    full,
    loader,
    make_trainer,
    merged,
    run,
    samples,
    weights,
)

MODULE_HOOKS = (
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
    *("lr_scheduler_step", "on_after_backward", "on_before_backward", "on_before_optimizer_step"),
    *("on_before_zero_grad", "on_before_batch_transfer", "on_after_batch_transfer"),
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_start", "on_train_end", "on_fit_start", "on_fit_end", "setup", "teardown"),
    *("on_validation_start", "on_validation_end", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("train_dataloader", "val_dataloader", "configure_callbacks", "configure_optimizers"),
)
CALLBACK_HOOKS = tuple(
    name
    for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction)
    if name.startswith("on_") or name in ("setup", "teardown")
)


class Scheduled(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def _noting(name: str, events: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return original(*args, **kwargs)

    return hook


def hook_order(layout: Mapping[str, Any] | None, devices: int) -> list[str]:
    """Names of all hooks of a fit with validation, accumulation, clipping and a scheduler."""
    events: list[str] = []
    module, callback = Scheduled(), pl.Callback()
    noted = {name: _noting(name, events, getattr(module, name)) for name in MODULE_HOOKS}
    # On a class of its own: Lightning looks there for what is overridden.
    methods = {name: _as_method(hook) for name, hook in noted.items()}
    module.__class__ = type("Noting", (Scheduled,), methods)
    for name in CALLBACK_HOOKS:
        hook = _noting(f"callback.{name}", events, getattr(callback, name))
        setattr(callback, name, hook)
    trainer = make_trainer(
        layout,
        devices,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[callback],
    )
    dp = dp_of(devices, layout or {})
    trainer.fit(module, loader(samples(40), dp=dp), loader(samples(16), dp=dp))
    return events


def _as_method(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: hook(*args, **kwargs)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Any:
    """Result of a job in one process of plain Lightning, which runs once."""

    @cache
    def result(job: Any, *args: Any) -> Any:
        return run(pool, None, job, *args)[0]

    return result


@pytest.mark.parametrize("layout", ["one process, 4 microbatches", "pp=2", "dp=2"])
def test_trap_01_hooks_fire_in_ordinary_order(pool: WorkerPool, alone: Any, layout: str) -> None:
    plain = alone(hook_order)
    assert plain.count("optimizer_step") == 6
    assert plain.count("callback.on_before_backward") == 10
    for events in run(pool, layout, hook_order):
        assert events == plain


class Witness(pl.Callback):
    """What the gradients are at every hook around backward."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Tensor]]] = []
        self.losses: list[float] = []

    def _note(self, hook: str, module: pl.LightningModule) -> None:
        held = {n: full(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        # Values, of all stages: what stands for another stage's gradient does not outlast the run.
        found = {n: torch.tensor(x.tolist(), dtype=x.dtype) for n, x in held.items()}
        self.seen.append((hook, found))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._note("on_train_batch_start", pl_module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._note("on_before_zero_grad", pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(float(loss))
        self._note("on_before_backward", pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._note("on_before_optimizer_step", pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self._note("on_train_batch_end", pl_module)


def gradients_at_hooks(
    layout: Mapping[str, Any] | None, devices: int, accumulate: int
) -> tuple[list[tuple[str, dict[str, Tensor]]], list[float], dict[str, Tensor]]:
    module, witness = Small(), Witness()
    trainer = make_trainer(layout, devices, accumulate_grad_batches=accumulate, callbacks=[witness])
    trainer.fit(module, loader(samples(48), dp=dp_of(devices, layout or {})))
    if layout is not None:
        losses = trainer.strategy.reduce(torch.tensor(witness.losses, dtype=torch.float64))
        witness.losses = losses.tolist()
    return witness.seen, witness.losses, weights(module)


OTHERS = ("pp=2, 1 microbatch", "dp=2", "pp=2 x dp=2")
"""Layouts that differ from one that is there in the number of microbatches alone, or join two."""


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [
        *((layout, 1 if i % 2 else 4) for i, layout in enumerate(LAYOUTS) if layout not in OTHERS),
        *(
            pytest.param(layout, accumulate, marks=pytest.mark.thorough)
            for i, layout in enumerate(LAYOUTS)
            for accumulate in (1, 4)
            if layout in OTHERS or accumulate != (1 if i % 2 else 4)
        ),
    ],
)
def test_trap_01_gradients_survive_zero_grad(
    pool: WorkerPool, alone: Any, layout: str, accumulate: int
) -> None:
    """Six batches: with ``accumulate=4`` the epoch also ends within a window."""
    plain_seen, plain_losses, plain_weights = alone(gradients_at_hooks, accumulate)
    ranks = run(pool, layout, gradients_at_hooks, accumulate)
    assert_same(merged([rank[2] for rank in ranks]), plain_weights)
    for _, losses, _ in ranks:
        assert losses == pytest.approx(plain_losses, rel=1e-10)
    for index, (hook, gradients) in enumerate(plain_seen):
        if hook == "on_before_optimizer_step":
            assert_same(merged([rank[0][index][1] for rank in ranks]), gradients)
    # Two things differ, and neither reaches the optimizer: the step gives up the previous update's
    # gradients early, for memory; and until the last batch of an update FSDP2 may show its gathered
    # parameters, whose gradients are not reduced yet.
    for seen, _, _ in ranks:
        assert [hook for hook, _ in seen] == [hook for hook, _ in plain_seen]
        if "dp" in layout:
            continue
        for (hook, ours), (_, gradients) in zip(seen, plain_seen, strict=True):
            assert bool(ours) == bool(gradients) or hook == "on_before_zero_grad", hook


class Silent(Small):
    """Returns no loss for one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx == 1 else loss


def fit_silent(layout: Mapping[str, Any] | None, devices: int) -> dict[str, Tensor]:
    module = Silent()
    make_trainer(layout, devices).fit(module, loader(dp=dp_of(devices, layout or {})))
    return weights(module)


def test_trap_02_none_skips_the_step_in_one_process(pool: WorkerPool) -> None:
    [plain] = run(pool, None, fit_silent)
    [ours] = pool.run(1, fit_silent, {}, 1)
    assert_same(ours, plain)


@pytest.mark.parametrize("layout", ["one process, 4 microbatches", "pp=2", "pp=2 zbv", "dp=2"])
def test_trap_02_none_is_an_error_that_names_the_remedy(pool: WorkerPool, layout: str) -> None:
    with pytest.raises(WorkerError, match=r"training_step.*None") as failure:
        run(pool, layout, fit_silent)
    assert failure.value.rank == 0 or layout == "dp=2"  # where the last stage is


class Modes(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[bool]]] = []
        self.net.layers[1].eval()  # frozen in eval mode by the user: Lightning keeps that
        self.net.layers[2].eval()

    def _note(self, where: str) -> None:
        self.seen.append((where, sorted({m.training for m in self.net.layers.modules()})))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._note("train")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._note("val")
        self.loss(batch)


def modes_of(layout: Mapping[str, Any] | None, devices: int) -> Any:
    module = Modes()
    data = loader(samples(16))
    make_trainer(layout, devices, val_check_interval=1).fit(module, data, data)
    ends = {
        name: child.training
        for name, child in module.named_modules()
        if name.startswith("net.layers.") and not isinstance(child, RemoteItem)
    }
    return sorted(set(map(str, module.seen))), ends


def test_trap_12_evaluation_restores_the_mode_of_every_module(pool: WorkerPool) -> None:
    [(plain, plain_ends)] = run(pool, None, modes_of)
    assert plain_ends["net.layers.1"] is False
    assert plain_ends["net.layers.3"] is True
    [(_, first), (_, last)] = run(pool, "pp=2", modes_of)
    assert first | last == plain_ends
    assert run(pool, "one process, 4 microbatches", modes_of) == [(plain, plain_ends)]


class Manual(Small):
    """Drives its optimizer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


class OwnBackward(Small):
    """Doubles every gradient on the way."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


def fit_class(
    layout: Mapping[str, Any] | None, devices: int, cls: type[pl.LightningModule]
) -> dict[str, Tensor]:
    module = cls()
    make_trainer(layout, devices).fit(module, loader(dp=dp_of(devices, layout or {})))
    return weights(module)


@pytest.mark.parametrize("cls", [Manual, OwnBackward])
@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.thorough), 3])
def test_the_module_drives_backward_itself_without_pipeline(
    pool: WorkerPool, alone: Any, cls: type[pl.LightningModule], zero: int
) -> None:
    plain = alone(fit_class, cls)
    assert_same(merged(pool.run(2, fit_class, {"zero": zero}, 2, cls)), plain)


@pytest.mark.parametrize("cls", [Manual, OwnBackward])
@pytest.mark.parametrize("layout", ["pp=2", "one process, 4 microbatches"])
def test_the_module_cannot_drive_backward_under_a_pipeline(
    layout: str, cls: type[pl.LightningModule]
) -> None:
    devices, options = LAYOUTS[layout]
    assert "pp=1" in str(refusal(lambda: fit_class(options, devices, cls), devices))


class Losses(pl.Callback):
    """What callbacks are told of each batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def told_losses(layout: dict[str, Any] | None) -> list[float]:
    losses = Losses()
    trainer = make_trainer(layout, 1, callbacks=[losses], accumulate_grad_batches=2)
    trainer.fit(Small(), loader())
    return losses.found


def test_the_loss_of_an_accumulated_batch_is_told_as_in_one_process(pool: WorkerPool) -> None:
    [plain] = pool.run(1, told_losses, None)
    for layout in ({}, {"num_microbatches": 2}):
        assert pool.run(1, told_losses, layout) == [pytest.approx(plain, rel=1e-10)]
