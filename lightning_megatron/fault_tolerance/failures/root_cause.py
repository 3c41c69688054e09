"""Which rank failed first, when all of them have failed.

One process dies, and a moment later every other one reports a broken connection: with a thousand
ranks, a thousand tracebacks of which one says what happened, or none, if that process was killed.
Four sources tell cause from echo:

* The *exception*. One that only says that a peer's connection broke is an echo; any other is a
  cause. A rank with a cause posts it in the store of the attempt before it ends.
* The *processes of this machine*. One that has ended, or is a zombie, without having posted
  anything was killed, by a signal or by the system; a zombie's exit status is in ``/proc``.
* The *memory events* of the control group: whether the kernel killed a process of it meanwhile.
* The *silence* of a machine. One from which nobody answers the search is off, or cut off, or all of
  its ranks are gone (`ending_board`).

A rank with an echo looks at these for a moment before it ends, so that the launcher, too, sees the
cause die first, and posts that it is an echo.
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
"""What gloo, NCCL and the store say when the other end has gone, in lower case."""


def is_echo(exception: BaseException) -> bool:
    """Whether an exception says no more than that another rank has gone."""
    seen: BaseException | None = exception
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RuntimeError | OSError) and any(echo in text for echo in ECHOES):
            return True
        seen = seen.__cause__
    return False


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
