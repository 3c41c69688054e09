"""``memory.recompute="adaptive"``: recompute as little as the memory allows, by measurement.

Training begins with all blocks recomputed. The first batch pays for whatever happens once; during
the second every block is measured, three times over: the time of its forward and what autograd
keeps of it, and the time and the notes of recomputing it selectively. From these numbers,
the largest and slowest of all ranks, and from how many microbatches the schedule has under way on a
stage, every rank works out how to recompute each block of every pipeline rank, or not at all
(`parallel.knapsack`), and goes on with its own. Rank 0 reports the plan.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.errors import raise_if_any
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.knapsack import BlockCosts, Way, choose, combined, needed
from lightning_megatron.parallel.memory import MemoryConfig, find_blocks
from lightning_megatron.parallel.recompute import measure, recompute_each
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
        ways: of every block of all ranks by name, how it is recomputed; None until the choice.
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
        self.ways: dict[str, Way] | None = None
        self.measured: dict[str, Measured] = {}

    def before_batch(self, count: int) -> None:
        """A training batch begins; the one before had ``count`` microbatches; collective."""
        if self._seen == _MEASURED:
            measure(self._blocks.values(), self._now, self._config.selection)
        elif self._seen == _MEASURED + 1:
            self._choose(count)
        self._seen += 1

    def _now(self) -> float:
        device = self._parallel.topology.device
        if device.type == "cpu":
            return time.process_time()  # whatever else the machine does meanwhile
        torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def _choose(self, count: int) -> None:
        topology, limit = self._parallel.topology, self._limit()
        blocks = self.measured = self._gather(self._measure(count))
        plan: dict[str, Way] = {}
        problems = []
        for rank in range(topology.pp.size):
            own = {name: b.costs for name, b in blocks.items() if b.rank == rank}
            ways = choose(list(own.values()), limit, in_order=self._in_order)
            if ways is None:
                least = self._needed(list(own.values()), ["full"] * len(own)) / 2**30
                problems.append(
                    f"memory.activation_gib={limit / 2**30:.4g}: the blocks of pipeline rank "
                    f"{rank} need {least:.4g} GiB even if all are recomputed; nearest valid: "
                    f"activation_gib={least * 1.001:.4g}, or smaller microbatches"
                )
                continue
            plan |= dict(zip(own, ways, strict=True))
        raise_if_any(problems)
        self.ways = plan
        kept: dict[Way, tuple[str, ...]] = {"selective": self._config.selection, "full": ()}
        chosen = {
            block: kept[plan[name]] for name, block in self._blocks.items() if plan[name] in kept
        }
        recompute_each(self._parallel.module, chosen)
        self._report(self._table(blocks, plan, limit))

    def _limit(self) -> int:
        """Bytes that the blocks of this rank may take; the least of all ranks."""
        config, topology = self._config, self._parallel.topology
        if config.activation_gib is not None:
            return int(config.activation_gib * 2**30)
        assert config.activation_fraction is not None
        memory = _memory(topology.device)
        everyone = [(socket.gethostname(), memory)]
        if topology.world_size > 1:
            everyone = everyone * topology.world_size
            dist.all_gather_object(everyone, everyone[0])
        if topology.device.type == "cpu":
            hosts = [host for host, _ in everyone]
            everyone = [(host, size // hosts.count(host)) for host, size in everyone]
        return int(config.activation_fraction * min(size for _, size in everyone))

    def _measure(self, count: int) -> dict[str, Measured]:
        """What this rank found; ends the measurement."""
        rank, found = self._parallel.topology.pp.rank, {}
        results = measure(self._blocks.values(), None)
        for (name, block), one in zip(self._blocks.items(), results, strict=True):
            found[name] = Measured(rank=rank, costs=replace(one, live=self._live(block, count)))
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
                if known is not None:
                    larger = combined(known.costs, block.costs, time=max)
                    block = Measured(rank=block.rank, costs=larger)
                merged[block.rank, name] = block
        order = sorted(merged, key=lambda key: (key[0], merged[key].costs.place))
        return {name: merged[rank, name] for rank, name in order}

    @property
    def _in_order(self) -> bool:
        """Whether one microbatch is under way at a time, whose backward frees what it has passed.

        A backward in two parts, which pipelines may have, leaves to its second what that needs.
        """
        return self._parallel.topology.pp.size == 1

    def _needed(self, blocks: Sequence[BlockCosts], ways: Sequence[Way]) -> int:
        return needed(blocks, ways, in_order=self._in_order)

    def _table(self, blocks: Mapping[str, Measured], ways: Mapping[str, Way], limit: int) -> str:
        again = sum(way != "none" for way in ways.values())
        lines = [
            f'memory.recompute="adaptive": {again} of {len(blocks)} blocks are recomputed',
            f"{'':36} {'MiB kept if recomputed':^32} {'ms lost':^17}",
            f"{'block':27} {'pp':>3} {'live':>4} {'none':>10} {'selective':>10} {'full':>10} "
            f"{'selective':>9} {'full':>7}  chosen",
        ]
        for name, block in blocks.items():
            costs = block.costs
            sizes = (costs.kept, costs.selective_kept, costs.input)
            lines.append(
                f"{name:27} {block.rank:3} {costs.live:4} "
                f"{' '.join(f'{size / 2**20:10.2f}' for size in sizes)} "
                f"{1e3 * costs.time('selective'):9.2f} {1e3 * costs.time('full'):7.2f}  "
                f"{ways[name]}"
            )
        for rank in sorted({block.rank for block in blocks.values()}):
            own = [name for name, block in blocks.items() if block.rank == rank]
            held = self._needed([blocks[name].costs for name in own], [ways[name] for name in own])
            lines.append(f"pipeline rank {rank}: {held / 2**20:.2f} MiB of {limit / 2**20:.2f}")
        return "\n".join(lines)


def _memory(device: torch.device) -> int:
    """Bytes that a device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
