"""``activations.recompute="adaptive"``: recompute as little as the memory allows, by measurement.

Training begins with all blocks recomputed. During the first two batches every block is measured:
what autograd keeps of it and the time of its forward, and the notes and the time of recomputing it
selectively; of all runs the largest sizes and the least times count, as the first batch pays for
whatever happens once, and the second may be what is left over at the end of the data. Batches that
do not come to run (``on_train_batch_start`` may say so) are waited for. Blocks that keep the same
are taken to be alike, and to need the median of their times. From these numbers, the largest and
slowest of all ranks, and from how many microbatches the schedule has under way on a stage
(`schedules.live_activations`), every rank works out how to recompute each block of every pipeline
rank, or not at all (`parallel.activations.knapsack`), and goes on with its own. Rank 0 reports the
plan.

Of a block that runs several times in a microbatch, what all its runs keep counts. One that did not
run stays recomputed, and does not count.

Blocks that are compiled, one by one, are measured as they run, compiled: what a graph passes to its
backward, autograd keeps. They are recomputed in full or not at all, as nobody sees the operations
in a graph.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from statistics import median

import torch
from torch import nn
from typing_extensions import override

from lightning_megatron._torch.devices import device_module, in_host_memory, is_cuda, on_host
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.parallel.activations.checkpointing import measure, recompute_each
from lightning_megatron.parallel.activations.config import ActivationConfig, find_blocks
from lightning_megatron.parallel.activations.knapsack import (
    BlockCosts,
    RecomputeMode,
    choose,
    combined,
    needed,
)
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.schedules.live_activations import ALONE, LiveCount, beside, moments
from lightning_megatron.schedules.schedule import Schedule
from lightning_megatron.tuning.tuner import Tuner

_MEASURED = 2
"""Batches that are measured."""
_PATIENCE = 10
"""Batches after which is chosen, even if some rank's blocks have not run in any of them."""
_EVERYWHERE = -1
"""Stands for a stage where all stages run a block: it lies outside of the trunk."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A block of some pipeline rank."""

    rank: int
    costs: BlockCosts
    runs: int
    """Most runs in a microbatch."""


class AdaptiveMemory(Tuner):
    """Measures the blocks of a module and chooses which to recompute.

    Args:
        parallel: the module on its layout, all blocks recomputed.
        config: the limit.
        schedule: from a number of microbatches, that of the pipeline.
        report: called with the plan, on every rank.
        compiled: whether the blocks run compiled.

    Attributes:
        ways: of every block of all ranks by name, how it is recomputed; None until the choice.
        measured: what every block costs; empty until the choice.
        moments: when each pipeline rank may hold the most; empty until the choice.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        config: ActivationConfig,
        schedule: Callable[[int], Schedule],
        report: Callable[[str], None],
        *,
        compiled: bool = False,
    ) -> None:
        self._parallel = parallel
        self._config = config
        self._schedule = schedule
        self._report = report
        names = {child: name for name, child in parallel.module.named_modules()}
        self._blocks = {
            names[block]: block
            for block in find_blocks(parallel.module, config.blocks)
            if not isinstance(block, RemoteItem)
        }
        self._compiled = compiled
        self._selection = () if self._compiled else config.selection
        self._seen = self._count = 0
        self._microbatches = 1
        self._found: dict[str, Measured] = {}
        self.ways: dict[str, RecomputeMode] | None = None
        self.measured: dict[str, Measured] = {}
        self.moments: dict[int, tuple[LiveCount, ...]] = {}

    @property
    @override
    def outlives_layout(self) -> bool:
        return False

    @override
    def before_batch(self, *, accumulated: bool) -> None:
        if self.ways is not None:
            return
        if self._seen:
            self._note(self._microbatches)
        if self._seen >= _MEASURED:
            self._choose()
        if self.ways is None:
            blocks = self._blocks.values()
            measure(blocks, self._now, self._selection, compiled=self._compiled)
        self._seen += 1

    @override
    def after_batch(self, count: int) -> None:
        self._microbatches = count

    def _now(self) -> float:
        device = self._parallel.topology.device
        if on_host(device):
            return time.process_time()  # whatever else the machine does meanwhile
        device_module(device).synchronize(device)
        return time.perf_counter()

    def _note(self, count: int) -> None:
        """Measured costs of a batch; ends the measurement."""
        rank = self._parallel.topology.pp.rank
        results = measure(self._blocks.values(), None)
        for (name, block), runs in zip(self._blocks.items(), results, strict=True):
            if not runs:
                continue
            self._count = max(self._count, count)
            costs = replace(reduce(partial(combined, time=min), runs), stage=self._stage(block))
            one = Measured(rank=rank, costs=costs, runs=-(-len(runs) // count))
            self._found[name] = _merged(self._found.get(name, one), one, time=min)

    def _choose(self) -> None:
        blocks, count, complete = self._gather()
        if not complete and self._seen < _PATIENCE:
            return
        limit, memory = self._limit()
        plan: dict[str, RecomputeMode] = {}
        least = 0
        for rank in sorted({block.rank for block in blocks.values()}):
            own = {name: b.costs for name, b in blocks.items() if b.rank == rank}
            when = self.moments[rank] = self._moments_of(rank, list(own.values()), count)
            ways = choose(list(own.values()), limit, when)
            if ways is None:
                least = max(least, needed(list(own.values()), ["full"] * len(own), when))
            else:
                plan |= dict(zip(own, ways, strict=True))
        if least:
            raise_if_any([self._too_little(limit, least, memory)])
        self.ways = plan
        self.measured = blocks
        kept: dict[RecomputeMode, tuple[str, ...]] = {"selective": self._selection, "full": ()}
        chosen = {block: plan.get(name, "full") for name, block in self._blocks.items()}
        again = {block: kept[way] for block, way in chosen.items() if way in kept}
        recompute_each(self._parallel.module, again)
        self._report(self._table(limit))

    def _limit(self) -> tuple[int, int]:
        """Bytes that the blocks of this rank may take, and that it has; the least of all ranks."""
        config, topology = self._config, self._parallel.topology
        memory = _memory(topology.device)
        if config.limit_gib is not None:
            return int(config.limit_gib * 2**30), memory
        assert config.limit_fraction is not None
        everyone = Peers().all_gather((socket.gethostname(), memory))
        if in_host_memory(topology.device):
            hosts = [host for host, _ in everyone]
            everyone = [(host, size // hosts.count(host)) for host, size in everyone]
        memory = min(size for _, size in everyone)
        return int(config.limit_fraction * memory), memory

    def _too_little(self, limit: int, least: int, memory: int) -> str:
        fraction, enough = self._config.limit_fraction, least * 1.001
        if fraction is None:
            given = f"limit_gib={limit / 2**30:.4g}"
            remedy = f"limit_gib={enough / 2**30:.4g}, or "
        else:
            given = f"limit_fraction={fraction:.4g} ({limit / 2**30:.4g} GiB)"
            remedy = f"limit_fraction={enough / memory:.4g}, or " if enough < memory else ""
        return (
            f"activations.{given}: the blocks of a rank need {least / 2**30:.4g} GiB even if all "
            f"are recomputed; nearest valid: {remedy}smaller microbatches"
        )

    def _stage(self, block: nn.Module) -> int:
        """Stage and place of a block of this rank."""
        parallel = self._parallel
        pp, trunk = parallel.topology.pp, parallel.trunk
        if pp.size == 1 or trunk is None:
            return 0
        owners = parallel.transforms.stage_ranks or range(pp.size)
        mine = [stage for stage, owner in enumerate(owners) if owner == pp.rank]
        for stage, items in zip(mine, trunk.stage_items, strict=True):
            if any(block is child for child in items.modules()):
                return stage
        return _EVERYWHERE

    def _moments_of(
        self, rank: int, blocks: Sequence[BlockCosts], count: int
    ) -> tuple[LiveCount, ...]:
        """Counts of what a pipeline rank holds at its fullest, of so many microbatches."""
        if self._parallel.topology.pp.size == 1:
            return ALONE
        found = moments(self._schedule(count).row(rank))
        if any(block.stage == _EVERYWHERE for block in blocks):
            # Every stage runs it, and none ends before the last backward.
            found = beside(found, _EVERYWHERE, count)
        return found

    def _gather(self) -> tuple[dict[str, Measured], int, bool]:
        """The largest numbers of all ranks that hold a block, the same on all of them.

        Returns:
            Those; the most microbatches of a batch; whether all ranks that have blocks have run
            some of them.
        """
        own = self._found, self._count, bool(self._found) or not self._blocks
        everyone = Peers().all_gather(own)
        merged: dict[tuple[int, str], Measured] = {}
        for held, _, _ in everyone:
            for name, block in held.items():
                key = block.rank, name
                merged[key] = _merged(merged.get(key, block), block, time=max)
        order = sorted(merged, key=lambda key: (key[0], merged[key].costs.place))
        blocks = _as_alike({name: _of_all_runs(merged[rank, name]) for rank, name in order})
        count = max(count for _, count, _ in everyone)
        return blocks, count, all(complete for _, _, complete in everyone)

    def _table(self, limit: int) -> str:
        assert self.ways is not None
        blocks, ways = self.measured, self.ways
        again = sum(way != "none" for way in ways.values())
        lines = [
            f'activations.recompute="adaptive": {again} of {len(blocks)} blocks are recomputed',
            f"{'':36} {'MiB kept if recomputed':^32} {'ms lost':^17}",
            f"{'block':27} {'pp':>3} {'live':>4} {'none':>10} {'selective':>10} {'full':>10} "
            f"{'selective':>9} {'full':>7}  chosen",
        ]
        for name, block in blocks.items():
            costs = block.costs
            live = max(moment.held(costs.stage) for moment in self.moments[block.rank])
            selective = f"{'-':>10}", f"{'-':>9}"
            if costs.selective_seconds is not None:
                kept, lost = costs.selective_kept / 2**20, 1e3 * costs.selective_seconds
                selective = f"{kept:10.2f}", f"{lost:9.2f}"
            lines.append(
                f"{name:27} {block.rank:3} {live:4} {costs.kept / 2**20:10.2f} {selective[0]} "
                f"{costs.input / 2**20:10.2f} {selective[1]} {1e3 * costs.seconds:7.2f}  "
                f"{ways[name]}"
            )
        for rank, when in self.moments.items():
            own = [name for name, block in blocks.items() if block.rank == rank]
            held = needed([blocks[name].costs for name in own], [ways[n] for n in own], when)
            lines.append(f"pipeline rank {rank}: {held / 2**20:.2f} MiB of {limit / 2**20:.2f}")
        return "\n".join(lines)


def _merged(one: Measured, other: Measured, time: Callable[..., float]) -> Measured:
    costs = combined(one.costs, other.costs, time=time)
    return Measured(rank=one.rank, costs=costs, runs=max(one.runs, other.runs))


def _of_all_runs(block: Measured) -> Measured:
    """Blocks with the costs of all their runs in a microbatch."""
    costs, runs = block.costs, block.runs
    again = costs.selective_seconds
    return replace(
        block,
        costs=replace(
            costs,
            seconds=runs * costs.seconds,
            kept=runs * costs.kept,
            input=runs * costs.input,
            selective_seconds=None if again is None else runs * again,
            selective_kept=runs * costs.selective_kept,
        ),
    )


def _as_alike(blocks: dict[str, Measured]) -> dict[str, Measured]:
    """Give those of a rank that keep the same the same times, by which they differ by chance."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, block in blocks.items():
        costs = block.costs
        key = (block.rank, costs.kept, costs.input, costs.selective_kept)
        alike.setdefault(key, []).append(name)
    found = dict(blocks)
    for names in alike.values():
        every = [blocks[name].costs for name in names]
        again = [costs.selective_seconds for costs in every if costs.selective_seconds is not None]
        for name in names:
            costs = replace(
                blocks[name].costs,
                seconds=median(costs.seconds for costs in every),
                selective_seconds=median(again) if again else None,
            )
            found[name] = replace(blocks[name], costs=costs)
    return found


def _memory(device: torch.device) -> int:
    """Bytes that a device has in all."""
    if is_cuda(device):
        return int(device_module(device).get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
