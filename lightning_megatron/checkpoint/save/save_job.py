"""One save, from the call that asks for it to what came of it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning_megatron.checkpoint.directory.dcp_files import WritePlan
from lightning_megatron.checkpoint.directory.manifest import Manifest
from lightning_megatron.checkpoint.directory.retention import Rotation
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.checkpoint.save.save_plan import ShardWriting


class Save(Protocol):
    """A checkpoint of which only the tensors are missing: a `PreparedSave`, or a `LocalSave`."""

    @property
    def target(self) -> AnyPath:
        """The directory to make."""

    @property
    def plan(self) -> WritePlan:
        """Who writes which rectangle."""

    @property
    def unchanged(self) -> bool:
        """Whether all ranks said that their tensors are those of the save before."""

    def write(
        self, shards: ShardWriting, peers: Peers, stop: Callable[[], bool]
    ) -> Manifest | None:
        """Write and publish; collective."""


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """What came of a save, as this rank saw it."""

    path: str
    """The checkpoint."""
    step: int | None
    """Optimizer steps that it holds."""
    seconds: float
    """From the call until it was published, or given up."""
    stall: float
    """Seconds of them in which training waited."""
    bytes: int
    """Size of the checkpoint, of all ranks together; 0 if there is none."""
    ok: bool
    """Whether it stands."""
    error: str | None
    """Why it does not; None also where it was given up for a newer one."""


@dataclass(eq=False)
class Job:
    """A save under way."""

    prepared: Save
    shards: ShardWriting
    begun: float
    """When it was asked for, by `time.perf_counter`."""
    step: int | None
    obsolete: list[AnyPath] = field(default_factory=list)
    """What to delete once it stands."""
    rotations: Sequence[Rotation] = ()
    """What may be deleted for it."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to give it up."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when the fields below are final."""
    error: Exception | None = None
    given_up: bool = False
    raise_at: int = 0
    """The training step before which an error is raised, on all ranks alike."""
    bytes: int = 0
    stall_s: float | None = None
    """Set when training goes on, which may be after all else."""

    @property
    def succeeded(self) -> bool:
        """Whether the checkpoint stands."""
        return self.error is None and not self.given_up

    def outcome(self, now: float) -> SaveOutcome:
        """What came of it, when it has ended."""
        seconds = now - self.begun
        return SaveOutcome(
            path=str(self.prepared.target),
            step=self.step,
            seconds=seconds,
            stall=seconds if self.stall_s is None else self.stall_s,
            bytes=self.bytes,
            ok=self.succeeded,
            error=None if self.error is None else str(self.error),
        )
