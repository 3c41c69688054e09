"""``gradient_clip_val`` sees the gradients of the whole model, each parameter once."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_megatron import PipelineSequential, gather
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.precision.fp16 import Fp16Precision
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import (
    WIDTH,
    Small,
    assert_same,
    dp_of,
    full,
    loader,
    make_trainer,
    samples,
)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Any:
    """Result of a job in one process of plain Lightning, which runs once."""

    @cache
    def result(job: Any, *args: Any) -> Any:
        return pool.run(1, job, None, 1, *args)[0]

    return result


class Everything(Small):
    """Split, replicated, tied, frozen and outside parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        last.weight = first.weight
        frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.net = PipelineSequential(
            first,
            nn.Sequential(ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)),
            frozen,
            nn.Sequential(ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)),
            last,
        )
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0] * self.scale) * self.scale - batch[1]).square().mean()


class Norms(pl.Callback):
    """The global norm before clipping, as each of the two sides knows it."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not hasattr(trainer.strategy, "parallel"):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.found.append(float(torch.nn.utils.get_total_norm(grads)))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if hasattr(trainer.strategy, "parallel"):
            norm = trainer.strategy.parallel.gradients.last_norm
            if norm is not None:
                self.found.append(float(norm))


def clipped(
    layout: Mapping[str, Any] | None, devices: int, value: float, algorithm: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms."""
    module, norms = Everything(), Norms()
    trainer = make_trainer(
        layout,
        devices,
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
        callbacks=[norms],
    )
    trainer.fit(module, loader(samples(24), dp=dp_of(devices, layout or {})))
    return {name: full(p) for name, p in module.named_parameters()}, norms.found


CASES = [
    (1, {"num_microbatches": 4}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (2, {"zero": 0}),
    (2, {"zero": 3}),
    (4, {"tp": 2, "pp": 2}),
    (4, {"pp": 2, "zero": 2}),
    (4, {"tp": 2, "zero": 1}),
]


@pytest.mark.parametrize(
    ("devices", "layout", "algorithm", "value"),
    [
        *((*case, "norm", 0.05) for case in CASES[:6]),
        *((*case, "value", 0.01) for case in CASES[1:5:3]),
        *(pytest.param(*case, "norm", 0.05, marks=pytest.mark.thorough) for case in CASES[6:]),
        *(pytest.param(*case, "value", 0.01, marks=pytest.mark.thorough) for case in CASES[5:]),
    ],
    ids=str,
)
def test_trap_11_clipping_is_global(
    pool: WorkerPool,
    alone: Any,
    devices: int,
    layout: dict[str, Any],
    algorithm: str,
    value: float,
) -> None:
    plain, plain_norms = alone(clipped, value, algorithm)
    assert max(plain_norms) > value
    merged: dict[str, Tensor] = {}
    for found, norms in pool.run(devices, clipped, layout, devices, value, algorithm):
        for name, weight in found.items():
            if not name.endswith("placeholder"):
                other = merged.setdefault(name, weight)
                torch.testing.assert_close(weight, other, rtol=0, atol=0)
        if algorithm == "norm":
            assert norms == pytest.approx(plain_norms, rel=1e-10)
    # The tied weight has its first name in the plain module, and both under a pipeline.
    assert_same({name: merged[name] for name in plain}, plain)


def narrow_job() -> tuple[list[float], dict[str, Tensor]]:
    """A whole copy on each rank, of which the first one counts."""
    module, norms = Everything(), Norms()
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "callbacks": [norms]}
    trainer = make_trainer({"zero": 0}, 2, precision="32-true", **options)
    trainer.fit(
        module.float(), loader(TensorDataset(*(t.float() for t in samples().tensors)), dp=2)
    )
    return norms.found, {name: full(p) for name, p in module.named_parameters()}


def test_copies_are_clipped_alike_in_narrow_formats(pool: WorkerPool) -> None:
    (norms, found), (other_norms, other) = pool.run(2, narrow_job)
    assert norms == other_norms
    assert all(torch.equal(other[name], weight) for name, weight in found.items())


class HeadOnly(Small):
    """An optimizer for the last part; gradients of the others are never cleared, and grow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        block = nn.Sequential(ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, 4))
        head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.net = PipelineSequential(first=nn.Linear(WIDTH, WIDTH), block=block, head=head)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.5)


class Pair(HeadOnly):
    """Two optimizers by hand; each is clipped by what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, union-attr]
        self.manual_backward(self.loss(batch))
        self.clip_gradients(first, 0.05, "norm")
        self.clip_gradients(second, 0.01, "value" if batch_idx % 2 else "norm")
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = [self.net.block, self.net.head]
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in parts]


def clip_parts(
    layout: Mapping[str, Any] | None, devices: int, by_hand: bool, precision: str = "64-true"
) -> dict[str, Tensor]:
    """Weights of both modules under one layout."""
    found = {}
    options: dict[str, Any] = {"precision": precision}
    if precision == "fp16":
        options = {"precision": None, "plugins": [Fp16Precision(2.0**6)]}
    for kind in (HeadOnly, Pair) if by_hand else (HeadOnly,):
        module = kind()
        clip = {} if kind is Pair else {"gradient_clip_val": 0.05}
        trainer = make_trainer(layout, devices, **clip, **options)
        data = samples(24)
        if precision != "64-true":
            module, data = module.float(), TensorDataset(*(t.float() for t in data.tensors))
        trainer.fit(module, loader(data, dp=dp_of(devices, layout or {})))
        whole = gather(module)
        found.update({f"{kind.__name__}.{name}": whole[name].double() for name in whole})
    return found


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        *((1, {}), (2, {"tp": 2}), (2, {"pp": 2})),
        *((2, {"zero": zero}) for zero in (0, 2, 3)),
        pytest.param(2, {"zero": 1}, marks=pytest.mark.thorough),
        pytest.param(4, {"tp": 2, "zero": 3}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_each_optimizer_is_clipped_by_what_it_holds(
    pool: WorkerPool, alone: Any, devices: int, layout: dict[str, Any]
) -> None:
    by_hand = "pp" not in layout
    plain = alone(clip_parts, by_hand)
    for found in pool.run(devices, clip_parts, layout, devices, by_hand):
        assert_same(found, plain)


def test_gradients_are_clipped_without_their_scale(pool: WorkerPool, alone: Any) -> None:
    plain = alone(clip_parts, True)
    for precision in ("fp16", "bf16-mixed"):
        for found in pool.run(2, clip_parts, {"tp": 2}, 2, True, precision):
            for name, weight in plain.items():
                torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-3)


def go_on(layout: Mapping[str, Any], devices: int, path: str, epochs: int) -> dict[str, Tensor]:
    """Train from the checkpoint at ``path``, or write it."""
    module = HeadOnly()
    trainer = make_trainer(layout, devices, max_epochs=epochs)
    trainer.fit(module, loader(dp=1), ckpt_path=path if epochs > 1 else None)
    if epochs == 1:
        trainer.save_checkpoint(path)
    return gather(module)


def test_stages_without_parameters_of_an_optimizer_leave_no_trace(
    pool: WorkerPool, tmp_path: Path
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    pool.run(1, go_on, {}, 1, one, 1)
    pool.run(2, go_on, {"pp": 2}, 2, two, 1)
    [alone] = pool.run(1, go_on, {}, 1, two, 2)
    for found in pool.run(2, go_on, {"pp": 2}, 2, one, 2):
        assert_same(found, alone)


def norms_before_and_after() -> list[float]:
    """Of all and of the optimizer's, around a clipping that leaves out the others."""
    module, found = HeadOnly(), []

    class Asking(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = trainer.strategy.gradients
            others = float(gradients.norm()) ** 2 - float(gradients.norm(optimizer)) ** 2
            found.extend([float(gradients.clip_norm(0.05, optimizer)), others])
            clipped = float(gradients.norm(optimizer)), float(gradients.norm())
            gradients.scale(torch.ones(()))  # so that it is computed anew
            found.extend([*clipped, float(gradients.norm(optimizer)), float(gradients.norm())])

    make_trainer({"tp": 2}, 2, callbacks=[Asking()], max_steps=1).fit(module, loader())
    return found


def test_norms_after_clipping_are_those_of_clipped_gradients(pool: WorkerPool) -> None:
    for found in pool.run(2, norms_before_and_after):
        norm, others, clipped, total, clipped_again, total_again = found
        assert norm > 0.05
        assert clipped == pytest.approx(0.05, rel=1e-4)
        assert clipped_again == pytest.approx(clipped, rel=1e-10)
        assert total == pytest.approx((clipped**2 + others) ** 0.5, rel=1e-10)
        assert total_again == pytest.approx(total, rel=1e-10)


class Answering(torch.optim.SGD):
    """An optimizer whose step says something."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return 7.0


class Asked(HeadOnly):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.answer = optimizer.step()

    def configure_optimizers(self) -> Any:
        return Answering(self.parameters(), lr=0.1)


def ask(precision: str) -> Any:
    module = Asked()
    options: dict[str, Any] = {"precision": precision}
    if precision == "fp16":
        module = module.float()
        options = {"precision": None, "plugins": [Fp16Precision(2.0**6)]}
    make_trainer({}, 2, max_steps=1, **options).fit(module, loader(dp=2))
    return module.answer


def test_what_the_step_of_an_optimizer_returns_is_handed_on(pool: WorkerPool) -> None:
    assert pool.run(2, ask, "64-true") == [7.0, 7.0]
