"""``pp.partition="measured"``: stages of equal time, by the times of this very model.

Training begins with stages of about equal numbers of parameters. The first step pays for whatever
happens once; the next ones are measured, item by item (`pipeline.timing`). Then, before a batch
at whose beginning no gradients are pending, other stages are planned (`schedules.repartition`); if
they promise to save enough, weights and optimizer state move (`tuning.relayout`), and training
goes on: the same loss, in less time. Rank 0 reports what was measured, what was expected, and a few
steps later what came of it.

It happens once in the life of a module. Checkpoints know nothing of it; a run that resumes from one
in a new process measures again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.pipeline.timing import ItemTimes
from lightning_megatron.schedules.repartition import Repartition, repartition
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.tuning import relayout
from lightning_megatron.tuning.tuner import Tuner

LEAST_GAIN = 0.02
"""Share of the step time below which nothing moves: times differ as much from run to run."""
SKIPPED, MEASURED = 1, 3
"""Optimizer steps that are left alone, and that are measured then."""


@dataclass(frozen=True, kw_only=True)
class PartitionReport:
    """Result of the measurement."""

    before: tuple[int, ...]
    """Items on every stage at first."""
    after: tuple[int, ...]
    """Items on every stage now; the same if nothing moved."""
    item_seconds: tuple[float, ...]
    """Forward and backward of a microbatch in each item."""
    step_before: float
    """Seconds of forward and backward of a batch with the first stages, measured."""
    step_expected: float
    """Step time with the new stages, as planned."""
    step_after: float | None = None
    """Step time with the new stages, as measured; None until then, and if nothing moved."""


class Host(relayout.Host, Protocol):
    """Protocol of the strategy for this tuner."""

    @property
    def pipeline(self) -> Pipeline | None:
        """Runner of its pipeline."""
        ...


class MeasuredPartition(Tuner):
    """Measures the first steps of a pipeline and moves items to other stages once.

    Args:
        host: the strategy, with optimizers.

    Attributes:
        report: None until there is one.

    Raises:
        ConfigError: the optimizers' groups are not the same on all stages.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.report: PartitionReport | None = None
        self._seen = 0
        self._done = False
        raise_if_any(
            relayout.group_problems(host.optimizers, Peers.over(host.parallel.topology.pp))
        )

    @property
    @override
    def outlives_layout(self) -> bool:
        return True  # the new layout is its work, of which it measures what came

    @override
    def before_batch(self, *, accumulated: bool) -> None:
        if accumulated or self._done:
            return
        pipeline = self._host.pipeline
        assert pipeline is not None
        if self._seen == SKIPPED:
            pipeline.profile(True)
        elif self._seen == SKIPPED + MEASURED:
            self._seen = 0
            times = pipeline.profile(False)
            assert times is not None
            if self.report is None:
                self._decide(times)
            else:
                self._conclude(times, self.report)
        self._seen += 1

    @override
    def after_batch(self, count: int) -> None:
        """No-op: the pipeline collects the times of the items."""

    def _decide(self, times: ItemTimes) -> None:
        parallel = self._host.parallel
        hindrances = Peers(self._host.host_group).all_gather(relayout.obstacle(self._host))
        forward, backward, weight, step = _over_all_ranks(
            times, sum(len(part) for part in parallel.stages), parallel.topology
        )
        assert times.schedule is not None
        split = sum(weight) / sum(backward) if any(weight) else 0.5
        plan = repartition(
            times.schedule, parallel.stages, forward, backward, weight_share=min(split, 1.0)
        )
        self.report = PartitionReport(
            before=_sizes(parallel.stages),
            after=_sizes(plan.stages),
            item_seconds=tuple(f + b for f, b in zip(forward, backward, strict=True)),
            step_before=step,
            step_expected=step * (1.0 - plan.gain),
        )
        why = next((f"rank {rank}: {w}" for rank, w in enumerate(hindrances) if w), None)
        if why is not None or plan.gain < LEAST_GAIN:
            self._stay(self.report, why or f"saves only {plan.gain:.1%}")
            return
        rank_zero_info(_moving(self.report, plan))
        transforms = parallel.transforms
        del parallel  # so that its memory is free for the next one
        config = replace(transforms.pipeline, partition=[len(stage) for stage in plan.stages])
        relayout.relayout(self._host, replace(transforms, pipeline=config))

    def _stay(self, report: PartitionReport, why: str) -> None:
        self._done = True
        rank_zero_info(
            f'pp.partition="measured": the best partition is {list(report.after)}, which is not '
            f"taken ({why}); stages stay {list(report.before)}, {1e3 * report.step_before:.4g} ms "
            "a step"
        )
        self.report = replace(report, after=report.before, step_expected=report.step_before)

    def _conclude(self, times: ItemTimes, report: PartitionReport) -> None:
        self._done = True
        step = _largest(median(times.steps), self._host.parallel.topology)
        self.report = replace(report, step_after=step)
        rank_zero_info(
            f'pp.partition="measured": {1e3 * report.step_before:.4g} ms a step before, '
            f"{1e3 * report.step_expected:.4g} expected, {1e3 * step:.4g} measured now"
        )


def _moving(report: PartitionReport, plan: Repartition) -> str:
    costs = ", ".join(f"{1e3 * seconds:.3g}" for seconds in report.item_seconds)
    return (
        f'pp.partition="measured": stages of {list(report.before)} items become '
        f"{list(report.after)}; {1e3 * report.step_before:.4g} ms a step, "
        f"{1e3 * report.step_expected:.4g} expected ({plan.gain:.1%} less). Milliseconds of "
        f"the items: {costs}"
    )


def _sizes(stages: Sequence[range]) -> tuple[int, ...]:
    return tuple(len(stage) for stage in stages)


def _over_all_ranks(
    times: ItemTimes, num_items: int, topology: Topology
) -> tuple[list[float], list[float], list[float], float]:
    """Mean times of all items over the ranks that hold them, and the longest step; the same on all.

    Returns:
        Forward, backward and its weight part by item, and the step.
    """
    table = torch.zeros(3, num_items, dtype=torch.float64)
    for item, seconds in times.by_item().items():
        table[:, item] = torch.tensor(seconds, dtype=torch.float64)
    table = table.to(topology.device)
    dist.all_reduce(table)
    # Rank 0 decides: sums of floats may differ between ranks.
    dist.broadcast(table, src=0)
    table *= topology.pp.size / topology.world_size
    forward, backward, weight = table.tolist()
    step = _largest(median(times.steps), topology)
    return forward, backward, weight, step


def _largest(value: float, topology: Topology) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=topology.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
