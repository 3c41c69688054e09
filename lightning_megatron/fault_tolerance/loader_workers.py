"""DataLoader workers that die, hang or raise: named at once, and replaced without a batch lost.

torch notices a dead worker by a signal handler which raises ``RuntimeError: DataLoader worker (pid
4711) is killed by signal`` wherever the training step happens to be, or, when the pipe breaks
first, as ``ConnectionResetError`` without a name. Here a thread asks the system twice a second how
the workers are (``waitid``, which leaves the dead to their parent), says which of them died of what
with which samples in hand, and the error is raised where data is asked for.

Replacing one worker alone is not sound: it may have died while it held the lock of the queue that
all of them write to, or in the middle of a message, and tensors that it had sent may be gone with
it. So all workers of the iterator are replaced. The indices that were handed out, but whose batch
has not been delivered, are handed out again, in their order; then the sampler goes on where it was.
It is asked for every index once, so whatever it does besides (seeds of samples, positions) happens
as in an undisturbed run, and the batches are the same: random numbers too, where they are a
function of the sample, as under MegatronStrategy. The generator from which a loader draws its
workers' seed is put back to where it was.

Not guarded are loaders with iterators of their own, like torchdata's and litdata's: these hold the
position. Not replaceable are workers that have a position of their own (an iterable dataset) and
those whose batches come in any order (``in_order=False``).
"""

import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_megatron._torch.loader import (
    LoaderIterator,
    StandInIterator,
    copy_with_indices,
    end_queue,
    has_plain_iterators,
    replace_iterator,
)

_LOOK_S = 0.25
"""Seconds between two checks of the workers."""
_PATIENCE_S = 2.0
"""Seconds in which a worker must be seen dead after reading from it failed."""


class WorkerLostError(RuntimeError):
    """A DataLoader worker died or hung, and was not replaced."""


@dataclass(frozen=True, kw_only=True)
class WorkerFault:
    """Fault of a worker."""

    worker: int | None
    """Number of the worker in the loader; None if unknown."""
    pid: int | None
    what: str
    """Description of its end."""
    samples: tuple[Any, ...]
    """Indices of the batch that is waited for."""

    def __str__(self) -> str:
        who = "a worker" if self.worker is None else f"worker {self.worker} (pid {self.pid})"
        shown = ", ".join(map(str, self.samples[:8])) + (", ..." if len(self.samples) > 8 else "")
        return f"{who} {self.what}; next batch: samples [{shown}]"


@dataclass(frozen=True, kw_only=True)
class GuardRules:
    """Responses to faults of workers, shared by the loaders of a rank."""

    may_replace: Callable[[], bool]
    """Whether the workers may be replaced; called once for each fault."""
    report: Callable[[WorkerFault, str | None], None]
    """Called with each fault and the response; None while the response is not decided."""
    hang_s: float
    """Seconds without a requested batch after which its worker counts as hung."""


def guard(loader: DataLoader[Any], rules: GuardRules) -> None:
    """Guard a loader's workers from its next iterator on; changes the loader in place."""
    if loader.num_workers and has_plain_iterators(loader):
        itself = weakref.ref(loader)  # no circle, so that it goes with its last user
        replace_iterator(loader, lambda: GuardedIterator(itself(), rules))  # type: ignore[arg-type]


class _Indices:
    """Indices of a sampler, with a record of those whose batches have not come back."""

    def __init__(self, source: Any, generator: torch.Generator) -> None:
        self._source = source
        self._generator = generator
        self._rest: Iterator[Any] = iter(())
        self._state = generator.get_state()
        self.out: deque[Any] = deque()
        self.again = False
        """Whether the next iteration repeats the indices in `out` and continues, or begins anew."""

    def __iter__(self) -> Iterator[Any]:
        # Called right before the seed of the workers is drawn; and twice, as torch does.
        if self.again:
            self._generator.set_state(self._state)
            return self._hand_out(tuple(self.out))
        self._rest = iter(self._source)
        self._state = self._generator.get_state()
        self.out.clear()
        return self._hand_out(())

    def _hand_out(self, first: tuple[Any, ...]) -> Iterator[Any]:
        yield from first
        for indices in self._rest:
            self.out.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self._source)

    def next_samples(self) -> tuple[Any, ...]:
        """Indices of the batch that is due; also called from another thread."""
        try:
            first = self.out[0]
        except IndexError:
            return ()
        return tuple(first[:]) if isinstance(first, list | tuple) else (first,)


class GuardedIterator(StandInIterator):
    """An iterator of a DataLoader that survives its workers.

    Args:
        loader: with workers.
        rules: what to do about them.
    """

    def __init__(self, loader: DataLoader[Any], rules: GuardRules) -> None:
        self._rules = rules
        in_batches = loader.batch_sampler is not None
        generator = loader.generator or torch.default_generator
        source: Any = loader.batch_sampler if in_batches else loader.sampler
        self._indices = _Indices(source, generator)
        self._generator = generator
        iterable = isinstance(loader.dataset, IterableDataset)
        self._replaceable = loader.in_order and not iterable
        # It is this copy that reads by our indices: the user's loader keeps its sampler.
        self._view = copy_with_indices(loader, source if iterable else self._indices)
        self._inner = _Watched(self._view, self._indices, rules)

    def __iter__(self) -> "GuardedIterator":
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __next__(self) -> Any:
        while True:
            self._inner.asked = time.monotonic()
            try:
                batch = next(self._inner)
            except StopIteration:
                raise
            except Exception as error:
                self._handle_fault(error)
                continue
            if self._indices.out:
                self._indices.out.popleft()
            return batch

    @override
    def begin_epoch(self, *, first: bool) -> None:
        """Begin another epoch with workers that persist; torch calls this."""
        self._inner.asked = time.monotonic()
        try:
            self._inner.begin_epoch(self._view, first=first)
        except Exception as error:
            self._handle_fault(error)

    def _handle_fault(self, error: Exception) -> None:
        """Replace the workers if one of them is the cause of the error, or raise it."""
        fault = self._inner.fault(error)
        if fault is None:
            samples = self._indices.next_samples()
            raised = f"raised {type(error).__name__}"
            told = WorkerFault(worker=None, pid=None, what=raised, samples=samples)
            self._rules.report(told, "the error goes on to the training loop")
            raise error
        self._inner.abandon()
        if not self._replaceable:
            why = "workers of iterable datasets, or with in_order=False, cannot be replaced"
        elif not self._rules.may_replace():
            why = "no replacement is left (WorkerGuard(respawn=...))"
        else:
            self._replace()
            self._rules.report(fault, "all workers of the loader were replaced; no batch is lost")
            return
        self._rules.report(fault, f"training ends: {why}")
        raise WorkerLostError(f"DataLoader: {fault}. {why[0].upper()}{why[1:]}.") from error

    def _replace(self) -> None:
        now = self._generator.get_state()
        self._indices.again = True
        try:
            self._inner = _Watched(self._view, self._indices, self._rules)
        finally:
            self._indices.again = False
            self._generator.set_state(now)


class _Watched(LoaderIterator):
    """torch's iterator, with a thread that watches its workers."""

    asked: float

    def __init__(self, loader: DataLoader[Any], indices: _Indices, rules: GuardRules) -> None:
        self._indices = indices
        self._rules = rules
        self._faults: list[WorkerFault] = []
        self._over = threading.Event()
        self.asked = time.monotonic()
        super().__init__(loader)
        self._thread = threading.Thread(
            target=_watch,
            args=(
                dict(enumerate(worker.pid for worker in self.workers)),
                self.results,
                indices,
                self._faults,
                self._over,
                rules,
            ),
            daemon=True,
            name="loader-workers",
        )
        self._thread.start()

    @override
    def read(self, timeout: float) -> tuple[bool, Any]:
        """Wait for a batch, and look after who is to deliver it."""
        until = time.monotonic() + timeout
        while True:
            if self._faults:
                raise WorkerLostError("a worker is gone")
            now = time.monotonic()
            self._look_for_hang(now)
            within = min(0.5, max(until - now, 0.0))
            found = super().read(within)
            if found[0] or now >= until:
                return found

    def _look_for_hang(self, now: float) -> None:
        if now - self.asked <= self._rules.hang_s:
            return
        worker = self.expected_worker
        pid = None if worker is None else self.workers[worker].pid
        what = f"has not delivered a batch for {now - self.asked:.0f} s{_state(pid)}"
        samples = self._indices.next_samples()
        self._faults.append(WorkerFault(worker=worker, pid=pid, what=what, samples=samples))
        raise WorkerLostError("a worker hangs")

    def fault(self, error: Exception) -> WorkerFault | None:
        """The fault of a worker that explains an error; None if it has another cause."""
        # Only errors of reading are waited for: those of a dataset come whole, through the pipe.
        reading = isinstance(error, RuntimeError | OSError | EOFError | WorkerLostError)
        until = time.monotonic() + (_PATIENCE_S if reading and not _of_dataset(error) else 0.0)
        while not self._faults and time.monotonic() < until:
            time.sleep(0.02)
            self._reaped()
        return self._faults[0] if self._faults else None

    def _reaped(self) -> None:
        """Ask torch's own record: whoever it has found dead the thread cannot find any more."""
        for number, worker in enumerate(self.workers):
            code = worker.exitcode
            if code is not None and not self._faults:
                samples = self._indices.next_samples()
                fault = WorkerFault(
                    worker=number, pid=worker.pid, what=_ended(code), samples=samples
                )
                self._faults.append(fault)

    def abandon(self) -> None:
        """End what is left of the workers, and close the queues, whatever state they are in."""
        self._over.set()
        self.kill()
        self._thread.join()
        self.close_results()

    @override
    def before_shutdown(self) -> None:
        """Have the thread end."""
        self._over.set()


def _watch(
    pids: dict[int, int],
    queue: Any,
    indices: _Indices,
    faults: list[WorkerFault],
    over: threading.Event,
    rules: GuardRules,
) -> None:
    """Wait for the end of a worker, or of the iterator; the main function of a thread."""
    main = threading.main_thread()
    # When that has ended, so do its workers, by a signal.
    while not over.wait(_LOOK_S) and main.is_alive():
        for worker, pid in pids.items():
            what = _how_it_ended(pid)
            if what is None or over.is_set():
                continue
            samples = indices.next_samples()
            fault = WorkerFault(worker=worker, pid=pid, what=what, samples=samples)
            rules.report(fault, None)
            faults.append(fault)
            _unblock(pids, queue)
            return


def _unblock(pids: dict[int, int], queue: Any) -> None:
    """Have a reader of the queue see its end, even in the midst of a message."""
    for pid in pids.values():
        if _how_it_ended(pid) is None:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    if queue is not None:
        end_queue(queue)


def _how_it_ended(pid: int) -> str | None:
    """Words for the end of a child that nobody has waited for; None if there is none yet."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return _ended(status.si_status) if status.si_status else None
    return _ended(-status.si_status)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = ", as the system does when memory is short" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _of_dataset(error: Exception) -> bool:
    """Whether it was raised in a worker and sent here; torch writes so into its text."""
    return "in DataLoader worker process" in str(error)


def _state(pid: int | None) -> str:
    """State of a process by the system, in brackets."""
    with suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
        words = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped"}
        return f" ({words.get(letter, letter)})"
    return ""
