"""Rows of whole parameters, where they are a view and where they are a copy."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.owned_rows import OwnedRows
from tests.parity.jobs import quiet_trainer
from tests.parity.plain_modules import FromMemory


def made(**options: Any) -> OwnedRows:
    torch.manual_seed(0)
    return OwnedRows(nn.Parameter(torch.randn(5, 3)), **options)


def narrowed(rank: int = 0) -> OwnedRows:
    return made(ranks=2, rank=rank, wide=torch.float32, narrow=torch.bfloat16)


def test_rows_are_those_of_torch_chunk() -> None:
    parts = made().parameter.detach().chunk(3)
    for rank, part in enumerate(parts):
        assert torch.equal(made(ranks=3, rank=rank).values, part)


def test_a_view_follows_whatever_is_done_to_the_parameter() -> None:
    rows = made(ranks=2, rank=1)
    first = rows.refresh()
    with torch.no_grad():
        rows.parameter.mul_(2.0)
    assert rows.refresh() is first
    vector_to_parameters(torch.arange(15.0), [rows.parameter])  # gives it other memory
    assert torch.equal(rows.refresh(), torch.arange(9.0, 15.0).view(2, 3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_takes_over_what_was_written_and_nothing_else(rank: int) -> None:
    rows = narrowed(rank)
    kept, parameter = rows.refresh().clone(), rows.parameter
    assert kept.dtype == torch.float32
    assert parameter.dtype == torch.bfloat16
    assert not torch.equal(kept, kept.bfloat16().float()), "there is something to lose"
    assert torch.equal(rows.refresh(), kept)
    row = 4 if rank else 0
    parameter.data[row, 1] = 3.0  # moves no version counter
    expected = kept.clone()
    expected[row - rows.start, 1] = 3.0
    assert torch.equal(rows.refresh(), expected)
    parameter.data = torch.zeros_like(parameter)
    assert not rows.refresh().any()


def test_rows_that_were_stepped_on_are_newer_than_the_parameter() -> None:
    rows = narrowed()
    rows.parameter.grad = torch.ones(5, 3)
    rows.refresh()
    rows.lend_gradient()
    rows.values.add_(1.0)
    newer = rows.values.clone()
    assert torch.equal(rows.refresh(), newer)
    rows.write_back()
    assert torch.equal(rows.parameter[:3].detach(), newer.bfloat16())
    assert torch.equal(rows.refresh(), newer)


def test_a_parameter_is_wide_again_and_then_narrow() -> None:
    rows = narrowed()
    kept, parameter = rows.refresh().clone(), rows.parameter
    parameter.grad = torch.ones(5, 3)
    rows.become_whole()
    assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert torch.equal(parameter[:3].detach(), kept)
    assert rows.refresh().data_ptr() == parameter.data_ptr()
    rows.part_again()
    assert parameter.dtype == torch.bfloat16
    assert torch.equal(rows.refresh(), kept)


class Mixed(FromMemory):
    """A moving average that is updated in the step, and weights that are clamped after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.target = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.target.requires_grad_(False)
        self.formats: set[torch.dtype] = set()

    def batch(self, step: int) -> Any:
        return tuple(part.float() for part in super().batch(step))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            for mean, weight in zip(self.target.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(weight.to(mean.dtype), 0.001)
        out = self.net(x)
        return F.mse_loss(out.float(), y) + F.mse_loss(out, self.target(x))

    def on_train_batch_end(self, *_: Any) -> None:
        self.formats |= {p.dtype for p in self.net.parameters()}
        assert {p.dtype for p in self.target.parameters()} == {torch.float32}
        self.net[0].weight.data.clamp_(-0.25, 0.25)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=1e-3)


def mixed_job(
    options: dict[str, Any], precision: str
) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    L.seed_everything(3, verbose=False)
    module = Mixed()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = quiet_trainer(MegatronStrategy(**options), precision=precision, max_epochs=10)
    trainer.fit(module)
    return {n: p.detach() - before[n] for n, p in module.named_parameters()}, module.formats


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_is_written_under_mixed_precision_stays(pool: WorkerPool, zero: int) -> None:
    """Updates of a learning rate of 1e-3 and of an average would be lost in bfloat16."""
    [(full, _)] = pool.run(1, mixed_job, {}, "32-true")
    by_rank = pool.run(2, mixed_job, {"zero": zero}, "bf16-mixed")
    for moved, formats in by_rank:
        assert formats == {torch.bfloat16}
        for name, change in full.items():
            assert torch.equal(moved[name], by_rank[0][0][name]), name
            size = change.norm()
            assert (moved[name] - change).norm() < 0.05 * size, name


@pytest.mark.parametrize(("shape", "dim"), [((5, 3), 0), ((2, 6, 5), 1), ((2, 6, 5), 0)])
def test_parts_of_all_ranks_make_the_parameter_whole(shape: tuple[int, ...], dim: int) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    device = parameter.device if dim else None
    every = [OwnedRows(parameter, 3, rank, dim=dim, device=device) for rank in range(3)]
    whole, parts = parameter.detach().clone(), every[0].parts_of(parameter.detach())
    for rank, rows in enumerate(every):
        values = rows.refresh()
        assert values.is_contiguous()
        assert values.numel() == every[0].numel_of(rank)
        assert torch.equal(parts[rank, : values.numel()].view(values.shape), values)
        place = tuple(slice(o, o + n) for o, n in zip(rows.offsets, values.shape, strict=True))
        assert torch.equal(whole[place], values)
    nn.init.zeros_(parameter)
    every[0].write_parts(parts)
    assert torch.equal(parameter, whole)
