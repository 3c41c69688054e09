"""The error message for a checkpoint that could not be written.

A full disk shows in many forms: torch's archive writer calls a Python stream, loses its `OSError`
and raises "unexpected pos". A message that helps names the file, the system's error, and the bytes
that were needed and are free.
"""

import errno
import math
import os
import shutil
from pathlib import Path

from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import CheckpointError

_RESERVE = 1.2
"""Factor on the size of the tensors: archives, index and state add to it, and others write too."""


def write_error(error: Exception, directory: AnyPath, needed: int) -> CheckpointError:
    """Return an error with the reason why ``directory`` could not be written.

    Args:
        error: the error that was raised.
        directory: the directory; it need not exist, and the message does not repeat it.
        needed: bytes that this process was to write.
    """
    if isinstance(error, CheckpointError):
        return error
    free = _free_bytes(directory)
    cause = _system_error(error)
    if cause is not None:
        what = f"[Errno {cause.errno}] {cause.strerror}"
        file = Path(os.fsdecode(cause.filename)) if cause.filename else None
        if file is not None and not file.is_relative_to(os.fspath(directory)):
            what = f"{file}: {what}"
        if cause.errno == errno.ENOENT:  # rank 0 had made the directory
            what = f"{what}; it was deleted during the save, or not all machines share it"
    elif free is not None and free < needed:
        what = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    else:
        what = f"{type(error).__name__}: {error}"
    room = "unknown" if free is None else f"{free:,}"
    return CheckpointError(f"{what} ({needed:,} bytes needed here, {room} free)")


def check_room(directory: AnyPath, needed: int) -> None:
    """Raise an error if the disk has too little room, before minutes of writing.

    Args:
        directory: directory to write to; it need not exist.
        needed: bytes that all ranks write together.

    Raises:
        CheckpointError: fewer bytes are free than these, with a reserve.
    """
    free, reserved = _free_bytes(directory), math.ceil(_RESERVE * needed)
    if free is not None and free < reserved:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(directory))
        raise write_error(full, directory, reserved)


def _system_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system behind ``error``; None if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _free_bytes(directory: AnyPath) -> int | None:
    if not isinstance(directory, Path):
        return None
    for path in (directory, *directory.parents):
        try:
            return shutil.disk_usage(path).free
        except OSError:
            continue
    return None
