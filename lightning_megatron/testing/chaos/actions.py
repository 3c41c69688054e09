"""Code of the faults: real signals, crashes, bit flips and full disks.

`ACTIONS` has the faults that a process does to itself, which need nothing but the `Fault`. The
other functions get the weights, workers or directories that they damage.
"""

import ctypes
import errno
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from lightning_megatron.testing.chaos.faults import Fault, InjectedFaultError

_LONGEST_S = 2**31 - 1
"""Longest time that sleep(3) takes on every machine: 68 years."""


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_LONGEST_S)  # until it arrives


def _segfault(fault: Fault) -> None:
    ctypes.string_at(0)


def _abort(fault: Fault) -> None:
    os.abort()


def _exit(fault: Fault) -> None:
    os._exit(int(fault.amount))


def _exception(fault: Fault) -> None:
    raise InjectedFaultError(f"injected by the fault '{fault}'")


def _hang(fault: Fault) -> None:
    time.sleep(min(fault.amount, _LONGEST_S))


def _hold_gil(fault: Fault) -> None:
    # A signal, as of somebody who asks for stacks, would end the sleep; other threads take it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # A PyDLL does not release the lock around its calls, unlike any other library of ctypes.
        ctypes.PyDLL(None).sleep(math.ceil(min(fault.amount, _LONGEST_S)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(fault: Fault) -> None:
    if math.isfinite(fault.amount):
        # By somebody else, as this process cannot wake itself; no child, which would want a wait().
        waking = f"(sleep {fault.amount:g}; kill -CONT {os.getpid()}) &"
        subprocess.run(["/bin/sh", "-c", waking], check=True, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _slow(fault: Fault) -> None:
    time.sleep(fault.amount / 1e3)


ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "segfault": _segfault,
    "abort": _abort,
    "exit": _exit,
    "exception": _exception,
    "hang": _hang,
    "gil": _hold_gil,
    "stop": _stop,
    "sigterm": _terminate,
    "slow": _slow,
}
"""Functions of the faults that a process does to itself, by kind."""


def flip_bit(parameters: Iterable[Tensor], draw: int) -> str:
    """Flip one bit of one of this rank's weights.

    Args:
        parameters: those to choose from; only the local shards are changed.
        draw: chooses parameter, element and bit.

    Returns:
        Description of the change.
    """
    held = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    held = [tensor.detach() for tensor in held if tensor.numel()]
    if not held:
        return "nothing: this rank holds no weights"
    draw, which = divmod(draw, len(held))
    tensor = held[which]
    # A mantissa's or the exponent's: not the lowest, which rounding hides.
    draw, element = divmod(draw, tensor.numel())
    bits = tensor.element_size() * 8
    bit = bits - 2 - draw % (bits // 2)
    # By way of a copy, as the tensor may not be contiguous.
    flat = tensor.flatten()[element : element + 1].clone()
    before = float(flat)
    octets = flat.view(torch.uint8)
    place = bit // 8 if sys.byteorder == "little" else tensor.element_size() - 1 - bit // 8
    octets[place] ^= 1 << (bit % 8)
    index = torch.unravel_index(torch.tensor(element), tensor.shape)
    tensor[index] = flat[0]
    return f"bit {bit} of element {element} of parameter {which}: {before:g} -> {float(flat):g}"


def kill_loader_worker(draw: int, sent: signal.Signals = signal.SIGKILL) -> str:
    """Send a signal to one of this process' DataLoader workers.

    Returns:
        Description of the change.
    """
    workers = [p for p in multiprocessing.active_children() if p.daemon]
    if not workers:
        return "nothing: this rank has no DataLoader workers"
    worker = workers[draw % len(workers)]
    assert worker.pid is not None
    os.kill(worker.pid, sent)
    return f"{sent.name} to worker process {worker.pid}"


def flip_bit_of_newest(folders: Iterable[str | os.PathLike[str]], draw: int) -> str:
    """Flip one bit of the largest file of the newest checkpoint, as a bad disk does.

    Args:
        folders: directories of checkpoints, whose names end in ``.ckpt``.
        draw: chooses the bit.

    Returns:
        Description of the change.
    """
    found = [path for folder in folders for path in Path(folder).glob("*.ckpt") if path.is_dir()]
    files = sorted(
        (file for file in max(found, key=_changed).rglob("*") if file.is_file()) if found else [],
        key=lambda file: (file.stat().st_size, file),
    )
    if not files:
        return "nothing: there is no checkpoint yet"
    with files[-1].open("r+b") as file:
        place = draw % files[-1].stat().st_size
        file.seek(place)
        octet = file.read(1)[0]
        file.seek(place)
        file.write(bytes([octet ^ 1 << draw % 8]))
    return f"bit {draw % 8} of byte {place} of {files[-1]}"


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def fill_disk() -> ExitStack:
    """Make this process fail to write checkpoints, with the error of a full disk.

    Limits of the system would affect logs as well. So torch's `FileSystemWriter`, by which all of
    Lightning's sharded strategies write shards, raises the error.

    Returns:
        Stack that restores writing when it is closed.
    """
    room = ExitStack()
    write = FileSystemWriter.write_data

    def refuse(self: FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    setattr(FileSystemWriter, "write_data", refuse)  # noqa: B010 (a method)
    room.callback(setattr, FileSystemWriter, "write_data", write)
    return room


def make_readonly(folders: Iterable[str | os.PathLike[str]], seconds: float) -> str:
    """Make directories read-only for some time, for all processes of this machine.

    The directories lose their write permission. For root, and others with ``CAP_DAC_OVERRIDE``,
    permissions do not count: there a file takes the place of the directory, whose content cannot be
    read meanwhile either, and a run that looks for its checkpoints there ends with an error. A
    process of its own restores the directories, even if this one is killed.

    Args:
        folders: directories of checkpoints; those that do not exist are left out.
        seconds: seconds until they are restored.

    Returns:
        Description of the change.
    """
    done = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            continue
        mode = folder.stat().st_mode & 0o7777
        folder.chmod(mode & ~0o222)
        if os.access(folder, os.W_OK):
            folder.chmod(mode)
            away = folder.with_name(f".{folder.name}.away")
            os.rename(folder, away)
            folder.touch()
            _later(seconds, 'rm -f "$1" && mv -T "$2" "$1"', folder, away)
            done.append(f"{folder} is replaced by a file for {seconds:g} s")
        else:
            _later(seconds, f'chmod {mode:o} "$1"', folder)
            done.append(f"{folder} cannot be written to for {seconds:g} s")
    return "; ".join(done) or "nothing: there is no directory of checkpoints yet"


def _later(seconds: float, command: str, *arguments: Path) -> None:
    """Run a shell command after some seconds, in a session of its own."""
    late = f"(sleep {min(seconds, _LONGEST_S):g}; {command}) &"
    shell = ["/bin/sh", "-c", late, "sh", *map(os.path.abspath, arguments)]
    subprocess.run(shell, check=True, stdin=subprocess.DEVNULL, start_new_session=True)
