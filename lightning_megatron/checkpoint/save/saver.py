"""`Saver`: checkpoints are written at once, or in the background.

A save stops training only while the state without tensors becomes JSON and this rank's tensors are
copied to host memory (save_plan.py, host_copy.py). A thread then writes and publishes. It talks to
the other ranks' threads over a process group of its own, as collectives of two threads on one group
would pair up wrongly. One save is in flight at a time, so memory holds one copy. Only a save of the
same unchanged tensors (``save_last`` beside the best ones) queues behind it, as it needs no copy.

The threads of all ranks see the same error or none. But they see it at different times, and
training has to stop in the same step everywhere, or peers would wait for a rank that has raised. So
after a failure the threads agree on the first step that no rank has begun, and keep their ranks
from beginning a step meanwhile. `Saver.check` raises in that step.

Old checkpoints are deleted only when the save in flight is published, as a crash in between would
leave none; after a failed save they are kept until the next one that succeeds.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.manifest import Manifest
from lightning_megatron.checkpoint.directory.retention import Rotation, rotate
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot
from lightning_megatron.checkpoint.save.dcp_writer import WritePlan, Written, write_shards
from lightning_megatron.checkpoint.save.file_save import FileSave
from lightning_megatron.checkpoint.save.host_copy import HostCopy
from lightning_megatron.checkpoint.save.incremental import Increments
from lightning_megatron.checkpoint.save.save_plan import (
    PlannedSave,
    SavePlanning,
    ShardWriting,
    all_chunks,
    writing,
)
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class Save(Protocol):
    """A checkpoint without its tensors: a `PlannedSave`, or a `LocalSave`."""

    @property
    def target(self) -> AnyPath:
        """The directory to make."""

    @property
    def plan(self) -> WritePlan:
        """Assignment of rectangles to ranks."""

    @property
    def unchanged(self) -> bool:
        """Whether the tensors of all ranks are those of the save before."""

    def write(
        self, shards: ShardWriting, peers: Peers, stop: Callable[[], bool]
    ) -> Manifest | None:
        """Write and publish; collective."""


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """Result of a save on this rank."""

    path: str
    """Path of the checkpoint."""
    step: int | None
    """Optimizer steps of the saved state."""
    seconds: float
    """Seconds from the call until the checkpoint was published, or the save ended otherwise."""
    stall: float
    """Seconds for which training waited."""
    bytes: int
    """Size of the checkpoint over all ranks; 0 if there is none."""
    ok: bool
    """Whether the checkpoint was published."""
    error: str | None
    """Reason of a failure; None also for a save that was given up for a newer one."""


@dataclass(eq=False)
class Job:
    """A save in flight."""

    target: AnyPath
    """Path of the checkpoint."""
    write: Callable[[Peers, Callable[[], bool]], Manifest | None]
    """Function that writes and publishes, given the ranks and whether to stop."""
    begun: float
    """Time of the call, by `time.perf_counter`."""
    step: int | None
    obsolete: list[AnyPath] = field(default_factory=list)
    """Checkpoints to delete once this one is published."""
    rotations: Sequence[Rotation] = ()
    """Rotations that apply once this one is published."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to give the save up."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when the fields below are final."""
    error: Exception | None = None
    given_up: bool = False
    raise_at: int = 0
    """Training step before which all ranks raise the error."""
    bytes: int = 0
    stall_s: float | None = None
    """Seconds for which training waited; set when it goes on, maybe after ``done``."""

    @property
    def succeeded(self) -> bool:
        """Whether the checkpoint was published."""
        return self.error is None and not self.given_up

    def outcome(self, now: float) -> SaveOutcome:
        """Return the result of the save after its end."""
        seconds = now - self.begun
        return SaveOutcome(
            path=str(self.target),
            step=self.step,
            seconds=seconds,
            stall=seconds if self.stall_s is None else self.stall_s,
            bytes=self.bytes,
            ok=self.succeeded,
            error=None if self.error is None else str(self.error),
        )


class Saver:
    """Saves the checkpoints of one run, at once or in the background.

    Args:
        config: the options.
        peers: the ranks that save.
        background: the same ranks over a gloo group of its own; None to save while training waits.
        report: function that is called with the result of every save, in the thread that wrote.
        noun: name of what is saved, for messages.
        placed: function that has a planned save written to another place (local/run.py).
    """

    def __init__(
        self,
        config: CheckpointConfig,
        peers: Peers,
        background: Peers | None = None,
        report: Callable[[SaveOutcome], None] | None = None,
        *,
        noun: str = "checkpoint",
        placed: Callable[[PlannedSave], Save] = lambda planned: planned,
    ) -> None:
        self._report = report
        self._noun = noun
        self._placed = placed
        self._config = config
        self._peers = peers
        self._background = background
        self._planning = SavePlanning(peers)
        self._copy = HostCopy()
        self._copied_at = -1
        self._increments = Increments() if config.incremental else None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unsettled: deque[Job] = deque()
        self._failures = 0
        self._complete = 0
        self._pending: tuple[int, Exception] | None = None
        self._gave_up = False
        # What both threads touch.
        self._lock = threading.Condition()
        self._step = 0
        self._held_back = False
        self._open: list[Job] = []
        self._obsolete: list[AnyPath] = []
        self._newest_failed = False

    def save(
        self,
        path: str | os.PathLike[str],
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        optimizers: Sequence[OptimizerSnapshot] = (),
        layout: Mapping[str, int] | None = None,
        rotations: Sequence[Rotation] = (),
        wait: bool = False,
    ) -> None:
        """Save, or begin to; collective. Arguments are those of `save_directory`.

        Args:
            path: the directory to make.
            model: the result of `model_chunks`.
            state: Lightning's checkpoint dictionary without model and optimizers; it and the
                tensors may change as soon as this returns.
            optimizers: the results of `capture_optimizer`.
            layout: degrees of parallelism.
            rotations: rotations to which the option ``keep`` applies.
            wait: whether to return only when the checkpoint is published.

        Raises:
            ConfigError: a value of ``state`` cannot be stored.
            CheckpointError: this or an earlier save failed, and the options say to raise.
        """
        begun = time.perf_counter()
        if self._background is None:
            self.drain()
        chunks, step = all_chunks(model, optimizers), state.get("global_step")
        if self._increments is not None:
            self._increments.expect(list(chunks))
        planned = self._placed(
            self._planning.plan(
                path, model, state, optimizers, layout, unchanged=self._is_copied(chunks)
            )
        )
        if self._background is None:
            write = partial(planned.write, self._shortened(chunks, writing(chunks)))
            self._submit(Job(planned.target, write, begun, step, rotations=rotations))
            return
        if not planned.unchanged:
            self._make_room()
        write = partial(planned.write, self._copied(chunks, planned))
        job = Job(planned.target, write, begun, step, rotations=rotations)
        self._submit(job)
        if wait:
            self.drain()
        job.stall_s = time.perf_counter() - begun

    def save_file(self, save: FileSave) -> None:
        """Save to one file; collective. Errors are those of `save`."""
        begun = time.perf_counter()
        self.drain()
        self._submit(Job(save.target, save.write, begun, save.step))

    def note_loaded(self, target: AnyPath, manifest: Manifest) -> None:
        """Note the checkpoint that training goes on from; the next one may share its files."""
        if self._increments is not None:
            self._increments.note_loaded(target, manifest)

    def check(self) -> None:
        """Report saves that have ended; all ranks call it before every training step.

        Raises:
            CheckpointError: a save failed, and training has to end.
        """
        with self._lock:
            while self._held_back:
                self._lock.wait()
            self._step += 1
        while self._unsettled and self._unsettled[0].done.is_set():
            self._settle(self._unsettled.popleft())
        if self._pending is not None and self._step >= self._pending[0]:
            self._raise_pending()

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return any(not job.done.is_set() for job in self._unsettled)

    def before_update(self) -> None:
        """Have the update wait for copies from a device; called between backward and update."""
        self._copy.before_update()

    def drain(self, *, timeout_s: float | None = None, quietly: bool = False) -> None:
        """Wait until no save is in flight.

        Args:
            timeout_s: seconds after which to stop waiting.
            quietly: whether to log errors instead of raising them; not collective then.

        Raises:
            CheckpointError: a save failed, and training has to end.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._unsettled:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            job = self._unsettled.popleft()
            if job.done.wait(left):
                self._settle(job)
            else:
                logger.warning("%s: abandoned, as the save has not ended in time", job.target)
        if self._pending is None:
            return
        if quietly:
            if self._peers.is_first:
                logger.error("%s", self._pending[1])
            self._pending = None
        else:
            self._raise_pending()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, on the first rank: at once, or when a newer one is published."""
        target = storage_path(path)
        with self._lock:
            if self._open:
                self._open[-1].obsolete.append(target)
                return
            if self._newest_failed:
                self._obsolete.append(target)
                return
        try:
            remove(target)
        except OSError as error:  # costs space, not the run; the next save tries again
            logger.warning("could not delete an old checkpoint: %s", error)
            with self._lock:
                self._obsolete.append(target)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the save in flight and end the thread; not collective, never raises."""
        self.drain(timeout_s=timeout_s, quietly=True)
        if self._failures and not self._complete and self._peers.is_first:
            what = "nothing" if self._noun == "checkpoint" else f"no {self._noun}"
            logger.error("%s was saved in this run: every save has failed", what)
        if self._thread is not None:
            self._jobs.put(None)
            if not self._open:
                self._thread.join()
            self._thread = None

    # The training thread --------------------------------------------------------------------------

    def _is_copied(self, chunks: Mapping[str, Chunk]) -> bool:
        # torch does not count writes through `.data`; such a write belongs to a training step.
        return self._copied_at == self._step and self._copy.is_current(chunks)

    def _make_room(self) -> None:
        """Wait until no save uses the copy."""
        if self._config.when_busy == "supersede" and not self._gave_up:
            for job in self._unsettled:
                job.stop.set()
        self.drain()

    def _copied(self, chunks: Mapping[str, Chunk], planned: Save) -> ShardWriting:
        if not planned.unchanged:
            try:
                self._copy.take(chunks, planned.plan.names)
                self._copied_at = self._step
            except Exception as error:  # out of memory: fails on all ranks, as other errors do
                reason = f"copying to the host: {type(error).__name__}: {error}"

                def fail(*_: Any) -> Written | None:
                    raise CheckpointError(reason)

                return fail
        copies = self._copy.chunks

        def write(directory: AnyPath, plan: WritePlan, stop: Callable[[], bool]) -> Written | None:
            return write_shards(directory, plan, copies, stop)

        shortened = self._shortened(copies, write)

        def when_copied(*request: Any) -> Written | None:
            self._copy.complete()
            return shortened(*request)

        return when_copied

    def _shortened(self, chunks: Mapping[str, Chunk], write: ShardWriting) -> ShardWriting:
        return write if self._increments is None else self._increments.writing(chunks, write)

    def _submit(self, job: Job) -> None:
        with self._lock:
            self._open.append(job)
        self._unsettled.append(job)
        if self._background is None:
            self._write(job, self._peers)
            self.drain()
            return
        if self._thread is None:
            # A daemon thread, so that a process may end without waiting for it.
            self._thread = threading.Thread(
                target=self._work, args=(self._background,), name="checkpoint", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def _settle(self, job: Job) -> None:
        """Count and report a save that has ended; the same on all ranks."""
        self._gave_up = job.given_up
        if job.given_up:
            logger.info("%s: given up for a newer checkpoint", job.target)
            return
        if job.error is None:
            self._failures, self._complete = 0, self._complete + 1
            return
        self._failures += 1
        limit = self._config.max_failed_saves
        ends = limit is not None and self._failures >= limit
        if self._config.on_error == "raise" or ends or isinstance(job.error, ConfigError):
            self._pending = self._pending or (job.raise_at, job.error)
        elif self._peers.is_first:
            logger.warning(
                "%s; training goes on (%s failed in a row%s; this run has %s)",
                job.error,
                _count(self._failures, "save"),
                "" if limit is None else f", training ends at {limit}",
                _count(self._complete, self._noun),
            )

    def _raise_pending(self) -> None:
        assert self._pending is not None
        error, self._pending = self._pending[1], None
        raise error

    # The thread in the background -----------------------------------------------------------------

    def _work(self, peers: Peers) -> None:
        while (job := self._jobs.get()) is not None:
            self._write(job, peers)
        self._copy.close()

    def _write(self, job: Job, peers: Peers) -> None:
        agreed = True
        try:
            manifest = job.write(peers, job.stop.is_set)
            job.given_up = manifest is None
            if manifest is not None:
                job.bytes = manifest.size
                self._note(job.target, manifest, peers)
                self._rotate(job, manifest, peers)
        except (CheckpointError, ConfigError) as error:
            job.error = error
        except BaseException as error:  # a peer is gone, which ends training too; an interrupt
            agreed = False
            job.error = CheckpointError(f"saving {job.target} was interrupted: {error!r}")
            if peers is not self._background:
                raise
        finally:
            self._conclude(job, agreed)

    def _note(self, target: AnyPath, manifest: Manifest, peers: Peers) -> None:
        if self._increments is None:
            return
        self._increments.note(target, manifest)
        if peers.is_first:
            own, linked = manifest.own_size, manifest.size - manifest.own_size
            message = "%s: %s bytes written, %s shared with earlier ones"
            logger.info(message, target, f"{own:,}", f"{linked:,}")

    def _rotate(self, job: Job, manifest: Manifest, peers: Peers) -> None:
        """Delete the oldest checkpoints if there are too many; failures are only logged."""
        keep = self._config.keep
        if keep is None or not job.rotations:
            return
        try:
            rotate(job.target, manifest, job.rotations, keep, peers)
        except CheckpointError as error:
            if peers.is_first:
                logger.warning("old checkpoints are not deleted: %s", error)

    def _conclude(self, job: Job, agreed: bool) -> None:
        self._delete_obsolete(job)
        if self._report is not None:
            self._report(job.outcome(time.perf_counter()))
        try:
            if job.error is not None and agreed and self._background is not None:
                job.raise_at = 1 + self._background.run(
                    "ending training", self._hold_back, lambda steps: max(steps)
                )
        except Exception as error:
            logger.debug("no common step to end training in: %s", error)
        finally:
            with self._lock:
                job.done.set()
                self._held_back = False
                self._lock.notify_all()

    def _hold_back(self) -> int:
        """Keep this rank from beginning a step; return the step that it has begun last."""
        with self._lock:
            self._held_back = True
            return self._step

    def _delete_obsolete(self, job: Job) -> None:
        """Delete the checkpoints that this save has replaced, if it was published."""
        with self._lock:
            # From earlier requests; one that came after the save may concern its target.
            obsolete = [path for path in self._obsolete if path != job.target]
            obsolete += job.obsolete
            self._open.remove(job)
            self._newest_failed = not job.succeeded
            self._obsolete = [] if job.succeeded else obsolete
        for path in obsolete if job.succeeded else ():
            try:
                remove(path)
            except OSError as error:
                logger.warning("could not delete an old checkpoint: %s", error)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
