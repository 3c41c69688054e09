"""Sources that tell the first failure of a run from its echoes.

One process dies, and a moment later every other one reports a broken connection: with a thousand
ranks, a thousand tracebacks of which one shows the cause, or none, if that process was killed. Four
sources tell cause from echo:

* The *exception*. One that only says that a peer's connection broke is an echo; any other is a
  cause. A rank with a cause posts it in the store of the attempt before it ends.
* The *processes of this machine*. A process that has ended, or is a zombie, without a post was
  killed by a signal or by the system; ``/proc`` has a zombie's exit status.
* The *memory events* of the control group: whether the kernel killed a process of it meanwhile.
* The *silence* of a machine. A machine without an answer to the search is off, or cut off, or all
  of its ranks are gone (`failures.board`).

A rank with an echo posts that and checks these sources for a moment before it ends, so that the
launcher, too, sees the cause die first.
"""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

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
"""Messages of gloo, NCCL and the store about a lost peer, in lower case."""


def is_echo(exception: BaseException) -> bool:
    """Whether an exception only says that another rank is gone."""
    seen: BaseException | None = exception
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RuntimeError | OSError) and any(echo in text for echo in ECHOES):
            return True
        seen = seen.__cause__
    return False


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` after the name.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
        OSError: the file cannot be read now, as when no file descriptor is left.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()  # a program's name may hold anything


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended; without ``/proc``, zombies count as alive."""
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
    """Exit code, or negative signal, of a zombie; None if it is none."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def describe_exit(code: int | None) -> str:
    """Text of an exit code or negative signal."""
    if code is None:
        return "ended without an error: it was killed, or crashed (its launcher knows the signal)"
    if code >= 0:
        return f"ended with exit code {code}: its own output says why"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        hints = {
            signal.SIGKILL: "by a user, or by the kernel for lack of memory",
            signal.SIGSEGV: "a fault in native code",
            signal.SIGABRT: "an abort in native code",
            signal.SIGBUS: "a fault in native code, or a full /dev/shm",
        }
        hint = hints.get(signal.Signals(-code))
        return f"was killed by {name}" + (f" ({hint})" if hint else "")
    return f"was killed by signal {-code}"


def oom_kills(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> int:
    """Number of processes of this control group that the kernel has killed for lack of memory.

    Args:
        root: mount point of control groups.
        membership: text in the place of ``/proc/self/cgroup``.
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
        # In a container the path may be the host's, and the mount the group itself.
        for file in (place / path.strip("/") / name, place / name):
            with suppress(OSError):
                for entry in file.read_text().splitlines():
                    what, _, value = entry.partition(" ")
                    if what == "oom_kill":
                        return int(value)
    return 0


def write_error_file(file: str, message: str, trace: str, at: float) -> None:
    """Write the error file of this worker for torchrun, which reports the earliest one.

    Args:
        file: path that torchrun reads.
        message: one line.
        trace: traceback as text.
        at: seconds since the epoch.
    """
    extra = {"py_callstack": trace, "timestamp": str(int(at))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
