"""Edges of gradients by hand; `tests.parity.gradients_by_hand` has what users write."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from lightning_megatron import ConfigError, Fp16Precision, MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.whole_parameters import WholeParameters
from tests.parity.gradients_by_hand import AddsLayer, Gradients, WeighsLosses
from tests.parity.prove import quiet_trainer
from tests.strategy.small import full


def fit(module: Gradients, layout: Any, path: str | None = None, **options: Any) -> dict[str, Any]:
    """Train by plain Lightning, or on a layout; the weights and notes."""
    strategy = layout if isinstance(layout, str) else MegatronStrategy(**layout)
    trainer = quiet_trainer(strategy, **options)
    doubles = "plugins" not in options and options.get("precision", "64-true") == "64-true"
    trainer.fit(module.double() if doubles else module, ckpt_path=path)
    if options.get("default_root_dir"):
        trainer.save_checkpoint(f"{options['default_root_dir']}/kept.ckpt")
    weights = {name: full(p) for name, p in module.named_parameters()}
    return {**weights, "notes": torch.tensor(module.notes)}


def seeded(kind: type[Gradients]) -> Gradients:
    L.seed_everything(5, verbose=False)
    return kind()


def assert_alike(
    found: list[dict[str, Tensor]], expected: dict[str, Tensor], atol: float = 1e-10
) -> None:
    for of_rank in found:
        assert of_rank.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(of_rank[name], value, rtol=0, atol=atol)


# Backwards ----------------------------------------------------------------------------------------


class ChangesInPlace(Gradients):
    """What is the mean already, and stays it."""

    def make_gradients(self, batch: Any) -> None:
        self.manual_backward(self.loss(batch))
        self.net.head.bias.grad = None
        self.factor.grad *= 0.5
        for parameter in self.net.up.parameters():
            parameter.grad.mul_(2)
        self.note(clip_grad_norm_(self.parameters(), 0.1))


def in_place_job(layout: Any) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(WholeParameters, "average_again")
        return fit(seeded(ChangesInPlace), layout)


def test_what_is_changed_in_place_is_not_averaged_again(pool: WorkerPool) -> None:
    [alone] = pool.run(1, in_place_job, "auto")
    for zero in (0, 1):
        assert_alike(pool.run(2, in_place_job, {"zero": zero}), alone)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("on purpose")


class TriesAgain(Gradients):
    """A backward that ends half-way, and what recomputes by a backward within another."""

    def make_gradients(self, batch: Any) -> None:
        x, y = batch
        net = self.net
        hidden = Fails.apply(net.act(net.up(x)))  # type: ignore[no-untyped-call]
        with pytest.raises(KeyError):
            net.head(net.norm(net.down(hidden))).sum().backward()
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        hidden = net.act(net.up(x))
        again = checkpoint(lambda h: net.norm(net.down(h)), hidden, use_reentrant=True)
        ((net.head(again) * self.factor - y) ** 2).mean().backward()
        self.note(net.down.weight.grad.norm())


def plain_job(kind: type[Gradients], layout: Any) -> dict[str, Tensor]:
    module = seeded(kind)
    found = fit(module, layout)
    if not isinstance(layout, str):  # nobody waits for others any more
        if torch.distributed.get_rank() == 0:
            module.loss(module.batch(0)).backward()
        assert module.net.up.weight.grad is not None or torch.distributed.get_rank()
    return found


def test_a_backward_within_another_and_one_that_failed(pool: WorkerPool) -> None:
    [alone] = pool.run(1, plain_job, TriesAgain, "auto")
    assert_alike(pool.run(2, plain_job, TriesAgain, {"zero": 1}), alone)


class Narrow(Gradients):
    """The same, and its data, in float32."""

    def batch(self, step: int) -> Any:
        return tuple(x.float() for x in super().batch(step))


class NarrowPlain(Narrow):
    def make_gradients(self, batch: Any) -> None:
        self.loss(batch).backward()


class NarrowManual(Narrow):
    def make_gradients(self, batch: Any) -> None:
        self.manual_backward(self.loss(batch))


class NarrowAssigns(Narrow):
    def make_gradients(self, batch: Any) -> None:
        parameters = list(self.parameters())
        found = torch.autograd.grad(self.loss(batch), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient


def narrow_job(precision: Any, layout: Any) -> list[dict[str, Tensor]]:
    kinds = (NarrowManual, NarrowPlain, NarrowAssigns)
    return [fit(seeded(kind), layout, precision=precision) for kind in kinds]


@pytest.mark.parametrize(
    ("precision", "ranks"), [("bf16-mixed", 1), ("bf16-mixed", 2), ("bf16-true", 2)]
)
def test_gradients_of_narrow_weights(pool: WorkerPool, precision: str, ranks: int) -> None:
    for manual, plain, assigned in pool.run(ranks, narrow_job, precision, {"zero": 1}):
        assert_alike([plain], manual)
        assert_alike([assigned], manual, atol=1e-2)


def refused_job(kind: type[Gradients], layout: Any, options: dict[str, Any]) -> str:
    module = kind()
    with pytest.raises(ConfigError) as raised:
        fit(module, layout, **options)
    return str(raised.value)


class AssignsOnly(Narrow):
    def make_gradients(self, batch: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize(("kind", "ranks"), [(NarrowPlain, 2), (NarrowPlain, 1), (AssignsOnly, 1)])
def test_unscaled_gradients_are_refused_where_the_step_unscales(
    pool: WorkerPool, kind: type[Gradients], ranks: int
) -> None:
    options = {"precision": None, "plugins": [Fp16Precision()]}
    for text in pool.run(ranks, refused_job, kind, {"zero": 1}, options):
        assert "precision='16-mixed'" in text
        assert "not scaled" in text
        assert "nearest valid: self.manual_backward(loss)" in text


# Hooks in the backward ----------------------------------------------------------------------------


class HooksOnce(Gradients):
    """A hook that its handle removes, and one that stays."""

    by_hand = False

    def on_fit_start(self) -> None:
        weight = self.net.head.weight
        self.first = weight.register_post_accumulate_grad_hook(_triple)
        weight.register_post_accumulate_grad_hook(self.note_gradient)

    def note_gradient(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.note(weight.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        self.first.remove()


def _triple(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(3)


def hooks_job(layout: Any) -> dict[str, Tensor]:
    module = seeded(HooksOnce)
    found = fit(module, layout)
    known = len(module.notes)
    if layout in ("auto", {"zero": 1}):  # a hook is called at once where no run is
        module.loss(module.batch(0)).backward()
        assert len(module.notes) == known + 1
    return found


def test_hooks_in_the_backward_are_removed_by_their_handles(pool: WorkerPool) -> None:
    [alone] = pool.run(1, hooks_job, "auto")
    for layout in ({"zero": 1}, {"zero": 3}):
        for found in pool.run(2, hooks_job, layout):
            torch.testing.assert_close(found["notes"], alone["notes"])


def test_hooks_in_a_backward_that_completes_nothing_are_refused(pool: WorkerPool) -> None:
    for text in pool.run(2, refused_job, HooksOnce, {"zero": 1}, {"accumulate_grad_batches": 2}):
        assert "register_post_accumulate_grad_hook" in text
        assert "nearest valid: accumulate_grad_batches=1" in text


# Parameters that only an optimizer knows ----------------------------------------------------------


class DrawsLayer(AddsLayer):
    """A layer of which ranks draw different values, or sizes."""

    sizes = (3, 3)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(self.global_rank)
            self.more = nn.Linear(6, self.sizes[self.global_rank]).double()
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.more.parameters())})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        more = self.more(x)[:, :1].square().mean() if hasattr(self, "more") else 0
        return self.loss(batch) + more


class DrawsSizes(DrawsLayer):
    sizes = (3, 2)


def draws_job(layout: Any) -> dict[str, Tensor]:
    return fit(seeded(DrawsLayer), layout, max_epochs=2)


def test_values_of_a_new_layer_are_those_of_rank_0(pool: WorkerPool) -> None:
    [alone] = pool.run(1, draws_job, "auto")
    assert_alike(pool.run(2, draws_job, {"zero": 1}), alone)
    for text in pool.run(2, refused_job, DrawsSizes, {"zero": 1}, {"max_epochs": 2}):
        assert "more.weight (2, 6)" in text
        assert "nearest valid: the same on all ranks" in text


def resumed_job(layouts: tuple[Any, Any], directory: Path) -> dict[str, Tensor]:
    """Optimizer state of parameters that the module does not have goes into the checkpoint."""
    first, second = layouts
    fit(seeded(WeighsLosses), first, default_root_dir=str(directory))
    module = seeded(WeighsLosses)
    return fit(module, second, f"{directory}/kept.ckpt", max_epochs=3)


def test_state_of_parameters_that_only_an_optimizer_knows_is_saved(
    pool: WorkerPool, tmp_path: Path
) -> None:
    [alone] = pool.run(1, resumed_job, ("auto", "auto"), tmp_path / "alone")
    found = pool.run(2, resumed_job, ({"zero": 1}, {"zero": 3}), tmp_path / "spread")
    assert_alike(found, alone)
