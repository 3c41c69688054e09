"""Every stage knows the length of each microbatch's sequences, in the forward and recomputing."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.pipeline.runner import Executor, NoPipeline, Pipeline
from lightning_megatron.pipeline.sequence_lengths import SequenceLengths
from lightning_megatron.schedules.schedule import make_schedule
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from tests.pipeline.test_runner import Silent

LENGTHS = [61, 64, 62, 33, 63, 64]
"""All but one are filled up to 64, so that a part does not tell which it is of."""


class Split(nn.Module):
    """Keeps this rank's part."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        layout = self.context.split(x.shape[1])
        padded = nn.functional.pad(x, (0, layout.padded - layout.length))
        mine = self.context.cp.rank
        return torch.cat([padded[:, c.start : c.stop] for c in layout.chunks(mine)], 1)


class Asking(nn.Module):
    """Multiplies by the length of the sequence, which it asks for in both of its runs."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.heard: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._scaled, x, use_reentrant=False)
        return y

    def _scaled(self, x: Tensor) -> Tensor:
        length = self.context.layout(x.shape[1]).length
        self.heard.append(length)
        return x * self.weight * length


def executor(
    topology: Topology, items: list[nn.Module], schedule: str
) -> tuple[PipelineSequential, Executor]:
    trunk, size = PipelineSequential(layers=items), topology.pp.size
    if size == 1:
        return trunk, NoPipeline(SequenceLengths(topology))
    ranks = make_schedule(schedule, size, 1).stage_ranks
    bounds = [i * len(items) // len(ranks) for i in range(len(ranks) + 1)]
    stages = [range(a, b) for a, b in pairwise(bounds)]
    trunk.keep(stages, [s for s, owner in enumerate(ranks) if owner == topology.pp.rank])
    return trunk, Pipeline(topology, trunk, partial(make_schedule, schedule, size), ranks)


def heard_job(pp: int, schedule: str) -> tuple[list[list[int]], list[list[int]]]:
    """Lengths that the blocks of this rank heard in two batches, and in an evaluation between."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    topology = Topology(Degrees(pp=pp, cp=2), torch.device("cpu"))
    blocks = [Asking(topology.context) for _ in range(7)]
    trunk, runs = executor(topology, [Split(topology.context), *blocks], schedule)

    def step(lengths: list[int], index: int, to_end: bool) -> Any:
        loss: Tensor = trunk(torch.ones(1, lengths[index], dtype=torch.float64)).mean()
        return loss

    def trained(lengths: list[int]) -> list[list[int]]:
        for block in blocks:
            block.heard.clear()
        runs.train(partial(step, lengths), lambda loss, _: loss, len(lengths), Silent())
        return [sorted(block.heard) for block in blocks if block.heard]

    first = trained(LENGTHS)
    with torch.no_grad():
        runs.evaluate(partial(step, LENGTHS[::-1]), len(LENGTHS))
    return first, trained(LENGTHS[2:])


@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        *((1, ""), (2, "1f1b"), (2, "zbv")),
        *(pytest.param(2, n, marks=pytest.mark.thorough) for n in ("interleaved", "gpipe")),
    ],
)
def test_lengths_of_each_microbatch_are_known_twice(
    pool: WorkerPool, pp: int, schedule: str
) -> None:
    count = 0
    for first, second in pool.run(2 * pp, heard_job, pp, schedule):
        count += len(first)
        for heard, lengths in ((first, LENGTHS), (second, LENGTHS[2:])):
            assert heard == [sorted(lengths * 2)] * len(heard)
    assert count == 2 * 7
