"""What to tell a user whose checkpoint could not be written.

A full disk arrives in many forms: torch's archive writer calls a Python stream, loses the stream's
`OSError` and complains of an "unexpected pos". A message that helps names the file, the system's
error, and how much room was needed and is left.
"""

import errno
import math
import os
import shutil
from pathlib import Path

from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import CheckpointError

_RESERVE = 1.2
"""Of the size of the tensors; archives, index and state add to it, and others write too."""


def write_error(error: Exception, directory: AnyPath, needed: int) -> CheckpointError:
    """Return an error that says why ``directory`` could not be written; it names other paths only.

    Args:
        error: what was raised.
        directory: where it was to be written; need not exist.
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
        if cause.errno == errno.ENOENT:  # rank 0 has made the directory
            what = f"{what}; it was deleted meanwhile, or not all machines share it"
    elif free is not None and free < needed:
        what = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    else:
        what = f"{type(error).__name__}: {error}"
    room = "unknown" if free is None else f"{free:,}"
    return CheckpointError(f"{what} ({needed:,} bytes needed here, {room} free)")


def check_room(directory: AnyPath, needed: int) -> None:
    """Fail now rather than after minutes of writing to a disk that is too full.

    Args:
        directory: where files are to be written; need not exist.
        needed: bytes that all ranks are to write together.

    Raises:
        CheckpointError: there is less room than these, the index and some reserve take.
    """
    free, reserved = _free_bytes(directory), math.ceil(_RESERVE * needed)
    if free is not None and free < reserved:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(directory))
        raise write_error(full, directory, reserved)


def _system_error(error: BaseException) -> OSError | None:
    """Find the error of the operating system behind ``error``."""
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
