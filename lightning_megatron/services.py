"""The strategy as callbacks see it: what it does for them, by name and type.

Callbacks and the strategy do not import each other. Both know `MegatronServices`: the strategy has
these attributes and methods, and a callback gets at them by `services_of`. mypy checks both sides.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.replica_comparison import Difference
from lightning_megatron.fault_tolerance.signals import Stop, StopFlag
from lightning_megatron.launch.attempt import Attempt
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.run_log.events import EventLog
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.zero.gradients import GradientSet


class StateCopies(Protocol):
    """Copies of the training state in host memory, and the way back to them.

    Attributes:
        updates: optimizer steps that led to the weights as they are now.
    """

    updates: int

    def note(self, batches: int) -> None:
        """Copy the state, if the newest copy is old enough; ``batches`` were read so far."""

    def go_back(self) -> tuple[int, int] | None:
        """Return to a copy; its updates and batches, or None where there is no copy."""
        ...


class Recovery(Protocol):
    """Optimizer steps that are left out, repeated or undone.

    Attributes:
        accept_step: decides on every rank alike whether the update is made whose gradients are
            there; None makes every update.
        can_undo: whether the strategy notes what a batch changes, so that it can be undone.
        batches_to_skip: the next so many batches are read, and nothing is computed on them.
    """

    accept_step: Callable[[], bool] | None
    can_undo: bool
    batches_to_skip: int

    @property
    def skips_batch(self) -> bool:
        """Whether the present batch is one of those."""
        ...

    @property
    def rollback(self) -> StateCopies | None:
        """Copies of the state; None unless `keep_states` asked for them."""
        ...

    def keep_states(self, every: int | None) -> None:
        """Keep copies of the state, one of them at least ``every`` updates old; None keeps none."""

    def undo_batch(self) -> None:
        """Undo what the present batch has changed, but for its gradients."""

    def run_again(self) -> None:
        """Run the batch once more of which `accept_step` is being asked; collective."""


class Replicas(Protocol):
    """The strategy's own comparison of the copies of weights.

    Attributes:
        answer: what is done about differences that it finds; None ends the run.
    """

    answer: Callable[[list[Difference]], None] | None

    def report(self, step: int, found: list[Difference], *, healing: str | None = None) -> str:
        """Tell the log and the user of differences, and return the text; collective."""
        ...


class Stopping(Protocol):
    """The end of a run that a signal asks for, on all ranks after the same batch.

    Attributes:
        signals: numbers that end the run, beside SIGTERM.
        replaces_requeue: whether a callback does what Slurm's requeue signal asks for.
        before_leaving: called on all ranks, where they may save a checkpoint.
    """

    signals: tuple[int, ...]
    replaces_requeue: bool
    before_leaving: Callable[[Stop], None] | None

    @property
    def flag(self) -> StopFlag:
        """The handler of the signals, which notes that one came."""
        ...

    @property
    def requested(self) -> Stop | None:
        """The stop on which all ranks have agreed; None until then."""
        ...


class Reading(Protocol):
    """Progress in the training data, in samples of all ranks together."""

    @property
    def batch_size(self) -> int:
        """Samples of the present optimizer step, as a `BatchSchedule` gives them."""
        ...

    @property
    def consumed_samples(self) -> int:
        """Samples that the run has read up to the end of the present step."""
        ...


class MegatronServices(Protocol):
    """Attributes and methods of `MegatronStrategy` that callbacks may use.

    Attributes:
        events: log of what happens in the run.
        held: whether a hang was found for which all ranks are about to be ended, so that no rank
            is to say of others why they died. The one who looks for hangs sets it.
    """

    events: EventLog
    held: Callable[[], bool] | None

    @property
    def attempt(self) -> Attempt:
        """Which start of the processes this is; exists once they are connected."""
        ...

    # What runs ----------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Process groups and coordinates."""
        ...

    @property
    def global_batch_factor(self) -> float:
        """Number of batches of the size of this rank's latest one in the global batch."""
        ...

    @property
    def parallel(self) -> ParallelModule:
        """The module on its layout."""
        ...

    @property
    def gradients(self) -> GradientSet:
        """This rank's part of the gradients, with their global norm."""
        ...

    @property
    def pipeline(self) -> Pipeline | None:
        """Runner of the pipeline; None without one."""
        ...

    @property
    def precision(self) -> ShardedPrecision:
        """The precision plugin, which knows the shards."""
        ...

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the run are on this node."""
        ...

    # What steps and runs are steered by ----------------------------------------------------------

    @property
    def clock(self) -> SectionClock:
        """Clock of the sections that this rank is in."""
        ...

    @property
    def votes(self) -> PerBatchVotes:
        """Numbers that ranks tell each other in every batch."""
        ...

    @property
    def data(self) -> Reading:
        """Progress in the training data."""
        ...

    @property
    def recovery(self) -> Recovery:
        """Steps that are left out, repeated or undone."""
        ...

    @property
    def replicas(self) -> Replicas:
        """Comparison of copies."""
        ...

    @property
    def stop(self) -> Stopping:
        """The end of a run that a signal asks for."""
        ...

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All processes, for tensors on the host; None for the default group."""
        ...

    # What every strategy of Lightning has ---------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """Rank of this process in the run."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        ...

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        ...

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run."""
        ...

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Who this process is, and where rank 0 is."""
        ...

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src``, on all processes."""

    def remove_checkpoint(self, filepath: str) -> None:
        """Remove a checkpoint, on rank 0."""


def services_of(trainer: pl.Trainer, callback: pl.Callback, why: str) -> MegatronServices:
    """The strategy, for a callback that works under `MegatronStrategy` only.

    Args:
        trainer: with the strategy.
        callback: who asks.
        why: what it needs, as in "it needs the gradients".

    Raises:
        ConfigError: the strategy is another.
    """
    services = services_if_any(trainer)
    if services is None:
        raise ConfigError(
            f"{type(callback).__name__} under {type(trainer.strategy).__name__}: {why} of a "
            "MegatronStrategy; nearest valid: strategy=MegatronStrategy()"
        )
    return services


def services_if_any(trainer: pl.Trainer) -> MegatronServices | None:
    """The strategy, for a callback that works under any; None unless it is a `MegatronStrategy`."""
    strategy = trainer.strategy
    return strategy if _serves(strategy) else None


_LOGS: WeakKeyDictionary[Strategy, EventLog] = WeakKeyDictionary()
"""Events under strategies that keep none themselves."""


def events_of(trainer: pl.Trainer) -> EventLog:
    """The event log of the run, under any strategy."""
    services = services_if_any(trainer)
    if services is not None:
        return services.events
    return _LOGS.setdefault(trainer.strategy, EventLog(trainer.global_rank))


def _serves(strategy: object) -> TypeGuard[MegatronServices]:
    # By the class, as its properties may not be asked for before the run is set up.
    return hasattr(type(strategy), "topology") and hasattr(type(strategy), "gradients")
