"""Which rank failed first, when all of them have failed.

One process dies, and a moment later every other one reports a broken connection: with a thousand
ranks, a thousand tracebacks of which one says what happened, or none, if that process was killed.
Three sources tell cause from echo:

* The *exception*. One that only says that a peer's connection broke is an echo; any other is a
  cause. A rank with a cause posts it in the store of the attempt before it ends.
* The *processes of this machine*. One that has ended, or is a zombie, without having posted
  anything was killed, by a signal or by the system; a zombie's exit status is in ``/proc``.
* The *memory events* of the control group: whether the kernel killed a process of it meanwhile.

A rank with an echo looks at these for a moment before it ends, so that the launcher, too, sees the
cause die first, and posts that it is an echo.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.resilience.attempt import Peer

ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "socket closed",
    "remote process exited",
    "nccl communicator was aborted",
    "connection refused",
    "transport endpoint is not connected",
)
"""What gloo, NCCL and the store say when the other end has gone, in lower case."""

_KEY = "lightning_megatron/end"
_STORE_PATIENCE_S = 1.0


def is_echo(exception: BaseException) -> bool:
    """Whether an exception says no more than that another rank has gone."""
    seen: BaseException | None = exception
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RuntimeError | OSError) and any(echo in text for echo in ECHOES):
            return True
        seen = seen.__cause__
    return False


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank has ended."""

    rank: int
    how: str
    """``"failed"`` (a cause), ``"echo"``, ``"left"`` (in order) or ``"died"`` (seen by others)."""
    what: str = ""
    """For a person."""
    at: float = 0.0
    """Seconds since the epoch."""
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid}) {self.what}"


class EndingBoard:
    """Where the ranks of an attempt post how they end; none waits for another.

    Args:
        store: of the attempt.
        rank: of this process.
        peers: all processes of the attempt, by rank.
        held_by_rank_0: whether the store ends with rank 0.
    """

    def __init__(
        self, store: Any, rank: int, peers: tuple[Peer, ...], *, held_by_rank_0: bool = False
    ) -> None:
        self._store, self.rank, self.peers = store, rank, peers
        # Of a Trainer's run: all ranks begin as many.
        self._run = store.add(f"{_KEY}/runs of {rank}", 1)
        here = peers[rank] if peers else Peer.here()
        self.local = {
            other: peer.pid
            for other, peer in enumerate(peers)
            if peer.machine == here.machine and other != rank
        }
        """Processes of the other ranks on this machine."""
        self.posted: Ending | None = None
        self._gone, self._held_by_rank_0 = False, held_by_rank_0
        self._ooms = oom_kills()

    def post(self, how: str, what: str = "") -> None:
        """Say how this rank ends; the first word counts."""
        if self.posted is None:
            ending = Ending(
                rank=self.rank,
                how=how,
                what=what,
                at=time.time(),
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self.posted = ending
            self._ask(lambda: self._post(ending))

    def _post(self, ending: Ending) -> None:
        self._store.compare_set(self._name(ending.rank), "", json.dumps(asdict(ending)))

    def _name(self, what: object) -> str:
        return f"{_KEY}/{self._run}/{what}"

    def read(self) -> dict[int, Ending]:
        """What has been posted so far; nothing if the store is gone."""
        return self._ask(self._read) or {}

    def _read(self) -> dict[int, Ending]:
        keys = {rank: self._name(rank) for rank in range(len(self.peers))}
        found = {}
        for rank, key in keys.items():
            if self._store.check([key]):
                found[rank] = Ending(**json.loads(self._store.get(key)))
        return found

    def is_first_to_tell(self) -> bool:
        """Whether no other rank has told the user yet; true where that cannot be known."""
        return self._ask(lambda: self._store.add(self._name("told"), 1)) in (1, None)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gets of the store; None if that takes too long, or if the store is gone."""
        if self._held_by_rank_0 and 0 in self.local and not is_alive(self.local[0]):
            self._gone = True
        if self._gone:  # each try would print a stack of torch's
            return None
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(call())
            except RuntimeError:
                self._gone = True

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_STORE_PATIENCE_S)
        return result[0] if result else None

    def dead(self, codes: Mapping[int, int] | None = None) -> dict[int, Ending]:
        """Processes of this machine that are no more.

        Args:
            codes: how those ended that this process started: exit code or minus a signal, by rank.
        """
        found = {}
        for rank, pid in self.local.items():
            code = (codes or {}).get(rank)
            if code is None and is_alive(pid):
                continue
            code = exit_code_of_zombie(pid) if code is None else code
            found[rank] = Ending(
                rank=rank,
                how="died",
                what=describe_exit(code) + self._memory_note(code),
                at=time.time(),
                host=self.peers[rank].host,
                pid=pid,
            )
        return found

    def _memory_note(self, code: int | None) -> str:
        killed = oom_kills() - self._ooms
        if killed <= 0 or code not in (None, -signal.SIGKILL):
            return ""
        return (
            f"; the kernel killed {killed} process{'' if killed == 1 else 'es'} of this control "
            "group because its memory was used up"
        )

    def causes(self, codes: Mapping[int, int] | None = None) -> list[Ending]:
        """Who failed by himself, the first one first; posts deaths that others cannot see."""
        posted = self.read()
        causes = [ending for ending in posted.values() if ending.how in ("failed", "died")]
        for rank, ending in self.dead(codes).items():
            if rank not in posted:
                causes.append(ending)
                self._ask(lambda ending=ending: self._post(ending))  # type: ignore[misc]
        return sorted(causes, key=lambda ending: ending.at)

    def deaths(self, codes: Mapping[int, int] | None = None) -> list[Ending]:
        """Processes of this machine that have ended without order; quick while there are none."""
        return (
            [ending for ending in self.causes(codes) if ending.how == "died"]
            if self.dead(codes)
            else []
        )


# Processes of this machine ------------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    """What ``/proc`` says of a process.

    Raises:
        FileNotFoundError, ProcessLookupError: there is none.
        OSError: nothing can be read now, as when this process has no file descriptor left.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()  # a program's name may hold anything


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended; true where there is no ``/proc`` to see it."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    try:
        return _stat(pid)[0] not in ("Z", "X", "x")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def exit_code_of_zombie(pid: int) -> int | None:
    """Exit code, or minus the signal, of a process that its parent has not asked about yet."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def describe_exit(code: int | None) -> str:
    """Exit code, or minus a signal, in words."""
    if code is None:
        return "ended without a word: it was killed, or crashed (its launcher knows the signal)"
    if code >= 0:
        return f"ended with exit code {code}: its own output says why"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        hints = {
            signal.SIGKILL: "somebody, or the kernel for want of memory",
            signal.SIGSEGV: "a fault in native code",
            signal.SIGABRT: "native code that gave up",
            signal.SIGBUS: "a fault in native code, or a full /dev/shm",
        }
        hint = hints.get(signal.Signals(-code))
        return f"was killed by {name}" + (f" ({hint})" if hint else "")
    return f"was killed by signal {-code}"


def oom_kills(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> int:
    """Processes of this control group that the kernel has killed for want of memory.

    Args:
        root: where control groups are mounted.
        membership: what ``/proc/self/cgroup`` says, if not that.
    """
    if membership is None:
        try:
            membership = Path("/proc/self/cgroup").read_text()
        except OSError:
            return 0
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            place, name = root, "memory.events"
        elif "memory" in controllers.split(","):
            place, name = root / "memory", "memory.oom_control"
        else:
            continue
        # In a container the path may be the host's, and what is mounted the group itself.
        for file in (place / path.strip("/") / name, place / name):
            with suppress(OSError):
                for entry in file.read_text().splitlines():
                    what, _, value = entry.partition(" ")
                    if what == "oom_kill":
                        return int(value)
    return 0


def write_error_file(file: str, message: str, trace: str, at: float) -> None:
    """Tell torchrun how this worker failed; it takes the earliest for the cause.

    Args:
        file: where torchrun looks.
        message: one line.
        trace: traceback, as text.
        at: seconds since the epoch.
    """
    extra = {"py_callstack": trace, "timestamp": str(int(at))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
