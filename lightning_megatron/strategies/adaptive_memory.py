"""``memory.recompute="adaptive"``: recompute as few blocks as the memory allows, by measurement.

Training begins with all blocks recomputed. The first batch pays for whatever happens once; during
the second every block runs once more and is measured: the time of its forward and what autograd
keeps of it. From these numbers, the largest and slowest of all ranks, and from how many
microbatches the schedule has under way on a stage, every rank works out which blocks of every
pipeline rank to recompute (`parallel.knapsack`), and goes on with its own. Rank 0 reports the plan.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.errors import raise_if_any
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.knapsack import BlockCosts, choose_recomputed, needed
from lightning_megatron.parallel.memory import MemoryConfig, find_blocks
from lightning_megatron.parallel.recompute import measure, recompute
from lightning_megatron.pipeline.schedule import Schedule
from lightning_megatron.pipeline.sequential import RemoteItem
from lightning_megatron.pipeline.simulate import peak_live_activations

_MEASURED = 1
"""Batch that is measured; the one before it is left alone."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A block of some pipeline rank."""

    rank: int
    costs: BlockCosts


class AdaptiveMemory:
    """Measures the blocks of a module and chooses which to recompute.

    Args:
        parallel: the module on its layout, all blocks recomputed.
        config: the limit.
        schedule: from a number of microbatches, that of the pipeline.
        report: called with the plan, on every rank.

    Attributes:
        recomputed: names of the blocks of all ranks that are; None until the choice.
        measured: what every block costs; empty until the choice.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        config: MemoryConfig,
        schedule: Callable[[int], Schedule],
        report: Callable[[str], None],
    ) -> None:
        self._parallel, self._config = parallel, config
        self._schedule, self._report = schedule, report
        names = {child: name for name, child in parallel.module.named_modules()}
        self._blocks = {
            names[block]: block
            for block in find_blocks(parallel.module, config.blocks)
            if not isinstance(block, RemoteItem)
        }
        self._seen = 0
        self.recomputed: tuple[str, ...] | None = None
        self.measured: dict[str, Measured] = {}

    def before_batch(self, count: int) -> None:
        """A training batch begins; the one before had ``count`` microbatches; collective."""
        if self._seen == _MEASURED:
            measure(self._blocks.values(), self._now)
        elif self._seen == _MEASURED + 1:
            self._choose(count)
        self._seen += 1

    def _now(self) -> float:
        device = self._parallel.topology.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def _choose(self, count: int) -> None:
        topology, limit = self._parallel.topology, int((self._config.activation_gib or 0.0) * 2**30)
        blocks = self.measured = self._gather(self._measure(count))
        plans, problems = {}, []
        for rank in range(topology.pp.size):
            own = {name: b.costs for name, b in blocks.items() if b.rank == rank}
            chosen = choose_recomputed(list(own.values()), limit)
            if chosen is None:
                least = needed(list(own.values()), range(len(own))) / 2**30
                problems.append(
                    f"memory.activation_gib={self._config.activation_gib}: the blocks of pipeline "
                    f"rank {rank} need {least:.4g} GiB even if all are recomputed; nearest valid: "
                    f"activation_gib={least * 1.001:.4g}, or smaller microbatches"
                )
                continue
            plans[rank] = [name for i, name in enumerate(own) if i in chosen]
        raise_if_any(problems)
        self.recomputed = tuple(name for plan in plans.values() for name in plan)
        mine = [self._blocks[name] for name in plans[topology.pp.rank]]
        recompute(self._parallel.module, mine)
        self._report(_table(blocks, self.recomputed, limit))

    def _measure(self, count: int) -> dict[str, Measured]:
        """What this rank found; ends the measurement."""
        rank, found = self._parallel.topology.pp.rank, {}
        results = measure(self._blocks.values(), None)
        for (name, block), (seconds, kept, size) in zip(self._blocks.items(), results, strict=True):
            costs = BlockCosts(
                seconds=seconds, kept=kept, input=size, live=self._live(block, count)
            )
            found[name] = Measured(rank=rank, costs=costs)
        return found

    def _live(self, block: nn.Module, count: int) -> int:
        parallel = self._parallel
        pp, trunk = parallel.topology.pp, parallel.trunk
        if pp.size == 1 or trunk is None:
            return 1
        schedule = self._schedule(count)
        owners = parallel.transforms.stage_ranks or range(pp.size)
        mine = [stage for stage, owner in enumerate(owners) if owner == pp.rank]
        for stage, items in zip(mine, trunk.stage_items, strict=True):
            if any(block is child for child in items.modules()):
                weights = {s: float(s == stage) for s in range(len(owners))}
                return int(peak_live_activations(schedule.row(pp.rank), weights))
        return count  # outside the trunk: every stage runs it, and none ends before the last

    def _gather(self, own: dict[str, Measured]) -> dict[str, Measured]:
        """The largest numbers of all ranks that hold a block, the same on all of them."""
        everyone: list[dict[str, Measured]] = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [own] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
        merged: dict[tuple[int, str], Measured] = {}
        for held in everyone:
            for name, block in held.items():
                known = merged.get((block.rank, name))
                merged[block.rank, name] = block if known is None else _larger(known, block)
        return {name: merged[rank, name] for rank, name in sorted(merged, key=lambda k: k[0])}


def _larger(one: Measured, other: Measured) -> Measured:
    first, second = one.costs, other.costs
    return Measured(
        rank=one.rank,
        costs=BlockCosts(
            seconds=max(first.seconds, second.seconds),
            kept=max(first.kept, second.kept),
            input=max(first.input, second.input),
            live=max(first.live, second.live),
        ),
    )


def _table(blocks: Mapping[str, Measured], recomputed: Sequence[str], limit: int) -> str:
    lines = [
        f'memory.recompute="adaptive": {len(recomputed)} of {len(blocks)} blocks are recomputed',
        f"{'block':30} {'pp':>3} {'live':>4} {'kept MiB':>9} {'input MiB':>9} {'ms':>8}",
    ]
    for name, block in blocks.items():
        costs = block.costs
        lines.append(
            f"{name:30} {block.rank:3} {costs.live:4} {costs.kept / 2**20:9.2f} "
            f"{costs.input / 2**20:9.2f} {1e3 * costs.seconds:8.2f}"
            f"{'  recomputed' if name in recomputed else ''}"
        )
    for rank in sorted({block.rank for block in blocks.values()}):
        own = [name for name, block in blocks.items() if block.rank == rank]
        chosen = [i for i, name in enumerate(own) if name in recomputed]
        held = needed([blocks[name].costs for name in own], chosen)
        lines.append(f"pipeline rank {rank}: {held / 2**20:.2f} MiB of {limit / 2**20:.2f}")
    return "\n".join(lines)
