"""Unequal parts of the global batch: who reads how much, and how it counts.

The loader keeps its ``batch_size=b``. The global batch stays ``b * ranks`` samples, the same ones
in the same order as with equal parts, and is divided as the shares say (`data.reading.shares`). So
the position in the data means what it always means, and a run goes on under other shares or on
another number of ranks.

Every batch brings its `Portion` along: the batch sampler notes it when it draws the batch, which
may be long before the step, and the step takes it. The runner of steps weighs losses with it
(`step.loss.LossShare`), and `WeighedLog` what is logged.

With ``batch_shares="measured"`` the parts follow the speed of the ranks. The own work of every rank
in data, forward and backward is timed as by `SlowRankDetector`, without the time in which the rank
waits for others. After every window all ranks exchange their medians, and each computes the same
new parts from them, in proportion to samples per second. A constant cost per step makes the first
plan fall short of the best one; each further plan comes closer, as parts with equal times no longer
change. The new parts hold from the first batch that no rank has drawn yet.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_megatron._lightning.loaders import Stateful, training_loader
from lightning_megatron._torch.collectives import watch_waits
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.data.reading.sampler import Division
from lightning_megatron.data.reading.sharding import (
    Share,
    order_of,
    reads_by_itself,
    with_batches,
    with_order,
)
from lightning_megatron.data.reading.shares import Parts, Portion, UnevenBatches, sizes_of
from lightning_megatron.data.reading.weighted_log import WeighedLog
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.slow_rank_comparison import WATCHED, OwnWork
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.run_log.sections import OPTIMIZER, SectionClock
from lightning_megatron.strategy.run import Run
from lightning_megatron.topology.mesh import Topology

_GAIN = 0.03
"""Share of a step that new parts must save, so that parts do not follow noise."""
_WORK = tuple(i for i, name in enumerate(WATCHED) if name != OPTIMIZER)
"""Sections whose time grows with the number of samples."""


@dataclass(frozen=True, kw_only=True)
class MeasuredShares:
    """Parts of the global batch that follow the measured speed of the ranks."""

    every: int = 50
    """Number of batches over which ranks are timed, before parts are planned again."""


Shares = Sequence[float] | Literal["measured"] | MeasuredShares
"""Option ``batch_shares``."""


class SpeedPlanner:
    """Plans the parts of the ranks anew after every window of batches.

    Args:
        every: number of batches in a window.
        clock: sections of this rank.
        votes: exchange numbers between all processes.
        topology: who reads what.
    """

    def __init__(
        self, every: int, clock: SectionClock, votes: PerBatchVotes, topology: Topology
    ) -> None:
        self._every = every
        self._votes = votes
        self._reader = topology.batch.rank
        self._work = OwnWork(clock)
        self._last: Portion | None = None
        self.stop = watch_waits(clock.began_to_wait, clock.waited)

    def next_plan(self, portion: Portion, batch: int, drawn: int) -> tuple[int, list[int]] | None:
        """Plan, if a window is full; a batch has ended and the next one begins. Collective.

        Args:
            portion: of the next batch.
            batch: number of samples of a full global batch.
            drawn: number of batches of this pass that this rank has drawn.

        Returns:
            The first batch of the pass for which the plan holds, and the sizes of all parts; None
            where nothing changes.
        """
        last, self._last = self._last, portion
        if last is None:  # the batch that is next includes work that happens once
            return None
        if len(self._work) or last.sizes == portion.sizes:
            self._work.end()
        if last.sizes != portion.sizes:
            self._work.take()
            self._work.begin()
        if len(self._work) < self._every:
            return None
        found = self._work.take()
        mine = sum(found[i] for i in _WORK)
        seconds, readers, numbers = self._votes.exchange([mine, float(self._reader), float(drawn)])
        self._work.begin()
        by_reader = [0.0] * len(portion.sizes)  # the slowest of those that read the same samples
        for reader, own in zip(readers, seconds, strict=True):
            by_reader[int(reader)] = max(by_reader[int(reader)], own)
        sizes = plan(portion.sizes, by_reader, batch)
        return None if sizes is None else (int(max(numbers)), sizes)


def plan(sizes: Sequence[int], seconds: Sequence[float], batch: int) -> list[int] | None:
    """Parts in proportion to the speed of the ranks; None where they save next to nothing.

    Args:
        sizes: number of samples of each rank.
        seconds: time that each rank took for them.
        batch: number of samples of all ranks.

    Example:
        >>> plan([4, 4], [0.4, 0.8], 8), plan([5, 3], [0.50, 0.61], 8)
        ([5, 3], None)
    """
    if min(seconds) <= 0:
        return None
    speeds = [n / s for n, s in zip(sizes, seconds, strict=True)]
    new = sizes_of(speeds, batch)
    longest = max(n / v for n, v in zip(new, speeds, strict=True))
    return list(new) if longest < (1 - _GAIN) * max(seconds) else None


class BatchShares:
    """Parts of the ranks in a run.

    Args:
        option: ``batch_shares`` of the strategy; None for equal parts.
    """

    def __init__(self, option: Shares | None = None) -> None:
        self._option: Shares | None = MeasuredShares() if option == "measured" else option
        self._restored: list[int] | None = None
        self._batches: UnevenBatches | None = None
        self._plans: list[tuple[int, Parts]] = []
        """Parts, and the first batch of the present pass for which they hold."""
        self._planner: SpeedPlanner | None = None
        self._unlog: Callable[[], None] | None = None
        self._log: WeighedLog | None = None
        self._portion: Portion | None = None

    # What is wrong --------------------------------------------------------------------------------

    def problems(
        self, ranks: int | None, module: nn.Module, *, divides: bool, on_host: bool
    ) -> list[str]:
        """Faults of the option.

        Args:
            ranks: number of ranks that read different samples; None where it is not known.
            module: the user's.
            divides: whether the strategy divides samples (``use_distributed_sampler``).
            on_host: whether the run is on CPUs.
        """
        option = self._option
        if option is None:
            return []
        problems = self._value_problems(ranks, on_host=on_host)
        if not divides:
            problems.append(
                f"batch_shares={self.text}, use_distributed_sampler=False: it is the strategy "
                "that divides the samples; nearest valid: use_distributed_sampler=True"
            )
        if any(isinstance(m, Router) and m.config.balance == "batch" for m in module.modules()):
            problems.append(
                f"batch_shares={self.text}, RouterConfig(balance='batch'): experts are balanced "
                "over ranks that count alike; nearest valid: balance='sequence'"
            )
        return problems

    def _value_problems(self, ranks: int | None, *, on_host: bool) -> list[str]:
        option = self._option
        nearest = [1] * (ranks or 2)
        if isinstance(option, MeasuredShares):
            if not isinstance(option.every, int) or option.every < 2:
                return [
                    f"MeasuredShares(every={option.every!r}): must be a whole number of at least "
                    "2; nearest valid: every=2"
                ]
            if not on_host:
                return [
                    "batch_shares='measured' on GPUs: ranks are timed on the host, which sees how "
                    "long kernels take to launch and not how long they run; nearest valid: "
                    f"batch_shares={nearest}, in proportion to the speed of each"
                ]
            return []
        if not isinstance(option, Sequence) or isinstance(option, str):
            return [
                f"batch_shares={option!r}: must be a list with the share of every data-parallel "
                "rank, 'measured' or MeasuredShares(every=...); nearest valid: "
                f"batch_shares={nearest}"
            ]
        if not all(isinstance(x, int | float) and 0 < x < float("inf") for x in option):
            return [
                f"batch_shares={self.text}: each is a positive number; nearest valid: "
                f"batch_shares={nearest}"
            ]
        if ranks is not None and len(option) != ranks:
            more = [*option, *[min(option, default=1)] * ranks][:ranks]
            return [
                f"batch_shares={self.text}: there are {len(option)} shares and {ranks} "
                f"data-parallel ranks; nearest valid: batch_shares={more}"
            ]
        return []

    @property
    def text(self) -> str:
        """The option as the user may have written it."""
        if isinstance(self._option, MeasuredShares):
            measured = self._option == MeasuredShares()
            return repr("measured") if measured else repr(self._option)
        return repr(list(self._option) if isinstance(self._option, tuple) else self._option)

    # Reading --------------------------------------------------------------------------------------

    def share_of(self, dataloader: DataLoader[Any], topology: Topology, seed: int) -> Share | None:
        """This rank's part of a training loader; None where all ranks have equal parts.

        Raises:
            ConfigError: batches of this loader cannot be divided.
        """
        if self._option is None:
            return None
        batches: Any = dataloader.batch_sampler
        sampler: Any = getattr(batches, "sampler", dataloader.sampler)
        problem = _loader_problem(dataloader, batches, sampler)
        if problem is not None:
            raise ConfigError(f"batch_shares={self.text}: the training loader {problem}")
        ranks = topology.batch.size
        batch = batches.batch_size * ranks
        self._plan_first(ranks, batch)
        order = order_of(sampler, dataloader, seed, Division(), divide=True)
        ours = UnevenBatches(
            order, batch, batches.drop_last, rank=topology.batch.rank, parts_of=self._parts_of
        )
        self._batches = ours
        loader = with_batches(with_order(dataloader, order), ours)
        return Share(loader=loader, order=order, items=len(sampler), per_batch=batch)

    def _plan_first(self, ranks: int, batch: int) -> None:
        shares: Sequence[float] = [1] * ranks
        if not isinstance(self._option, MeasuredShares):
            assert self._option is not None
            shares = [float(share) for share in self._option]
        elif self._restored is not None and len(self._restored) == ranks:
            shares = self._restored
        elif self._plans and len(self._plans[-1][1].sizes) == ranks:
            shares = self._plans[-1][1].sizes  # of the loader before
        parts = Parts(sizes_of(shares, batch))
        if not self._plans or self._plans[-1][1].sizes != parts.sizes:
            rank_zero_info(f"batch_shares: of {batch} samples the ranks read {parts.sizes}")
        self._plans = [(0, parts)]

    def _parts_of(self, number: int) -> Parts:
        if number == 0:  # a new pass
            self._plans = [(0, self._plans[-1][1])]
        return next(parts for first, parts in reversed(self._plans) if first <= number)

    # Steps ----------------------------------------------------------------------------------------

    @property
    def portion(self) -> Portion | None:
        """Part of this rank in the present batch, or the one before; None with equal parts."""
        return (None if self._log is None else self._log.batch()) or self._portion

    def start(self, run: Run) -> None:
        """Begin training.

        Raises:
            ConfigError: there is no loader, or more than one, whose batches are divided.
        """
        self.stop()
        if self._option is None:
            return
        combined = training_loader(run.trainer)
        loaders = [] if combined is None else combined.flattened
        if len(loaders) != 1 or self._batches is None:
            kinds = ", ".join(type(loader).__name__ for loader in loaders)
            raise ConfigError(
                f"batch_shares={self.text}: there are {len(loaders)} training loaders ({kinds}), "
                "and the samples of exactly one can be divided; nearest valid: one DataLoader with "
                "a map-style dataset, or no batch_shares"
            )
        self._log = WeighedLog(run.module, run.trainer, run.topology, self._coming)
        self._unlog = self._log.install()
        self._restored = None
        run.topology.auxiliary_seeds.uneven = True
        if isinstance(self._option, MeasuredShares) and run.topology.batch.size > 1:
            self._planner = SpeedPlanner(self._option.every, run.clock, run.votes, run.topology)

    def _coming(self) -> deque[Portion]:
        """Parts of batches that have not begun, of the present loader."""
        assert self._batches is not None
        return self._batches.portions

    def stop(self) -> None:
        """End training."""
        self._portion = None
        if self._planner is not None:
            self._planner.stop()
            self._planner = None
        if self._unlog is not None:
            self._unlog()
            self._unlog = self._log = None

    def before_batch(self, run: Run) -> None:
        """Take the part of the batch that begins; collective where parts are measured."""
        if self._log is None:
            return
        assert self._batches is not None
        batches = self._batches
        self._portion = portion = batches.portions.popleft()
        self._log.begin_batch(portion)
        if self._planner is None:
            return
        new = self._planner.next_plan(portion, batches.batch_size, batches.drawn)
        if new is not None:
            first, sizes = new
            self._plans.append((first, Parts(sizes)))
            rank_zero_info(
                f"batch_shares: of {sum(sizes)} samples the ranks read {tuple(sizes)} from now on"
            )

    # Checkpoints ----------------------------------------------------------------------------------

    @property
    def planned(self) -> list[int] | None:
        """Newest measured parts, for a checkpoint."""
        if not isinstance(self._option, MeasuredShares) or not self._plans:
            return None
        return list(self._plans[-1][1].sizes)

    def restore(self, planned: list[int] | None) -> None:
        """Begin with the parts of a checkpoint; on another number of ranks they say nothing."""
        self._restored = planned
        if self._batches is not None and self._plans:
            sizes = self._plans[-1][1].sizes
            self._plan_first(len(sizes), sum(sizes))


def _loader_problem(dataloader: DataLoader[Any], batches: Any, sampler: Any) -> str | None:
    """Reason why the batches of a loader cannot be divided, and what can."""
    if isinstance(dataloader, Stateful):
        return (
            f"is a {type(dataloader).__name__}, which keeps a position of its own; nearest valid: "
            "torch.utils.data.DataLoader, whose position the strategy keeps"
        )
    if has_iterable_dataset(dataloader):
        return (
            "has an iterable dataset, which divides itself; nearest valid: a map-style dataset, or "
            "{'loss': sum, 'num_tokens': n} from a dataset that gives ranks unequal batches, "
            "without batch_shares"
        )
    if reads_by_itself(dataloader):
        return (
            f"is a {type(dataloader).__name__} with an __iter__ of its own, which may ask for no "
            "batches; nearest valid: torch.utils.data.DataLoader"
        )
    if type(batches) is not BatchSampler:
        kind = "no batches" if batches is None else f"batches from {type(batches).__name__}"
        return f"has {kind}; nearest valid: DataLoader(batch_size=..., sampler=...)"
    if isinstance(sampler, DistributedSampler) or not hasattr(sampler, "__len__"):
        return (
            f"has a {type(sampler).__name__}, which divides the samples or has no length; nearest "
            "valid: shuffle=True, or a sampler of all samples"
        )
    if not getattr(dataloader, "in_order", True):
        return "has in_order=False: who reads what is settled in order; nearest valid: True"
    return None
