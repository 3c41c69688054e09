"""``gradient_clip_val`` sees the gradients of the whole model, each parameter once."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategies.small import (
    WIDTH,
    Small,
    assert_same,
    dp_of,
    full,
    loader,
    make_trainer,
    samples,
)


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
    """Weights, put together over tp, and norms."""
    module, norms = Everything(), Norms()
    trainer = make_trainer(
        layout,
        devices,
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
        callbacks=[norms],
    )
    trainer.fit(module, loader(dp=dp_of(devices, layout or {})))
    found = {name: full(p) for name, p in module.named_parameters()}
    if layout is None or trainer.strategy.topology.tp.size == 1:
        return found, norms.found
    roles = {r.name: r.shard for r in trainer.strategy.parallel.gradients.roles}
    for name, value_ in found.items():
        shard = roles.get(name)  # None for a parameter's second name
        if shard is not None and shard.dim is not None:
            group = trainer.strategy.topology.tp.group
            pieces = [torch.empty_like(value_) for _ in range(2)]
            torch.distributed.all_gather(pieces, value_.contiguous(), group=group)
            found[name] = torch.cat(pieces, shard.dim)
    return found, norms.found


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
    [(*case, "norm", 0.05) for case in CASES] + [(*case, "value", 0.01) for case in CASES[-4:]],
    ids=str,
)
def test_trap_11_clipping_is_global(
    pool: WorkerPool, devices: int, layout: dict[str, Any], algorithm: str, value: float
) -> None:
    [(plain, plain_norms)] = pool.run(1, clipped, None, 1, value, algorithm)
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
