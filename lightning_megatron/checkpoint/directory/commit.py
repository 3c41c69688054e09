"""The commit of a checkpoint by a rename (for object stores: remote_commit.py).

A checkpoint is written into a hidden sibling of its final place, and renamed when it is complete
and on disk. A reader sees the old one, the new one or none, never a mixture. An existing target is
renamed aside first. Between these two renames the target does not exist; a crash there leaves the
complete new directory and the old one beside it, where `locate` finds them. A checkpoint that is a
file replaces another in one step.

::

    .name.tmp-<token>   being written; complete once it has a manifest
    .name.old-<token>   replaced by a newer one, about to be deleted
    name.corrupt        found damaged, kept for inspection

A process that works on a hidden directory holds a lock on it, which the system releases when the
process dies. So the next save can tell the leftovers of a killed run from a directory that another
process is writing, and removes them. A checkpoint is hidden before it is deleted, so that no half
of one is ever seen.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE
from lightning_megatron.checkpoint.directory.remote_commit import (
    RemoteStaging,
    move_remote,
    remove_remote,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath, RemotePath

PathT = TypeVar("PathT", Path, RemotePath, AnyPath)

logger = logging.getLogger(__name__)

CORRUPT = ".corrupt"
"""Suffix of the names of damaged checkpoints."""

_HIDDEN = re.compile(r"\.(.+)\.(?:tmp|old)-[0-9a-z]+")

_SWEPT = re.compile(r"\.(.+\.ckpt)\.(?:tmp|old)-[0-9a-f]{12}")
"""Names that may be deleted without a look into the directory: exactly those made here."""

_ABANDONED_S = 24 * 3600.0
"""Age after which a hidden directory counts as abandoned, on file systems without locks."""


class Staging:
    """A directory under construction.

    Args:
        target: the final path.
        token: name of this attempt, different from that of any other.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.directory = target.with_name(f".{target.name}.tmp-{token}")
        self.prefix = ""
        self._aside = target.with_name(f".{target.name}.old-{token}")
        self._locks = contextlib.ExitStack()

    @staticmethod
    def new_token() -> str:
        """Return a token that no other attempt has."""
        return uuid.uuid4().hex[:12]

    def create(self) -> None:
        """Make the empty directory, after removing the leftovers of interrupted attempts."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(self.target) and (survivor := locate(self.target)) != self.target:
            os.rename(survivor, self.target)
        for leftover in _siblings(self.target):
            _dismantle(leftover)
        _sweep(self.target.parent)
        self.directory.mkdir()
        _lock(self.directory, self._locks)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, durably."""
        write_durably(self.directory / name, data)

    def write_all(self, contents: Mapping[str, bytes]) -> None:
        """Write files, durably and in parallel, so that the waits for the disk overlap."""
        with ThreadPoolExecutor(len(contents)) as threads:
            writes = [threads.submit(self.write, *content) for content in contents.items()]
        for write in writes:
            write.result()

    def publish(self) -> None:
        """Rename the complete directory to the target, durably.

        The files must have been synced. After a failure the former target is back in its place.
        """
        sync_directory(self.directory)
        replaces = os.path.lexists(self.target)
        with self._locks:
            if replaces:
                _lock(self.target, self._locks)
                os.rename(self.target, self._aside)
            try:
                os.rename(self.directory, self.target)
            except BaseException:  # an interrupt, too, must not leave the name without a checkpoint
                if replaces:
                    os.rename(self._aside, self.target)
                raise
            sync_directory(self.target.parent)
            if replaces:
                try:
                    _dismantle(self._aside)
                except OSError as error:  # the new one is published; the old one only costs space
                    logger.warning("could not delete the replaced checkpoint: %s", error)

    def discard(self) -> None:
        """Delete the unfinished directory; never raises."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._locks.close()


class FileStaging:
    """A checkpoint of one file under construction, beside its final place.

    Args:
        target: the final path.
        token: name of this attempt, different from that of any other.

    Attributes:
        file: the file to write.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.file = target.with_name(f".{target.name}.tmp-{token}")
        self._aside = target.with_name(f".{target.name}.old-{token}")
        self._locks = contextlib.ExitStack()

    def create(self) -> None:
        """Make the empty file, after removing the leftovers of interrupted attempts."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in _siblings(self.target):
            _dismantle(leftover)
        _sweep(self.target.parent)
        self.file.touch(exist_ok=False)
        _lock(self.file, self._locks)

    def publish(self) -> None:
        """Rename the complete file, which is on disk, to the target, durably."""
        with self._locks:
            replaces = self.target.is_dir() and not self.target.is_symlink()
            if replaces:  # a checkpoint directory, which no file can replace in one step
                os.rename(self.target, self._aside)
            os.replace(self.file, self.target)
            sync_directory(self.target.parent)
            if replaces:
                _dismantle(self._aside)

    def discard(self) -> None:
        """Delete the unfinished file; never raises."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)
        self._locks.close()


def staging_for(target: AnyPath, token: str) -> Staging | RemoteStaging:
    """Return the place in which a checkpoint is built until it is published."""
    if isinstance(target, RemotePath):
        return RemoteStaging(target, token)
    return Staging(target, token)


def locate(target: PathT) -> PathT:
    """Return the path of a checkpoint: ``target``, or a sibling after a crash in `publish`."""
    if not isinstance(target, Path) or os.path.lexists(target):
        return target
    complete = [path for path in _siblings(target) if _is_complete(path)]
    # The new one (tmp) is preferred to the one it was about to replace (old).
    return max(complete, key=lambda path: ".tmp-" in path.name, default=target)


def hidden_target(path: PathT) -> PathT | None:
    """Return the final path of a hidden directory; None if ``path`` is not one."""
    match = _HIDDEN.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def set_aside(target: AnyPath) -> AnyPath:
    """Rename a damaged checkpoint to ``<name>.corrupt``; return its new path.

    For a link, the directory that it points to is renamed.
    """
    damaged = locate(target).resolve()
    plain = hidden_target(damaged) or damaged
    renamed, number = plain.with_name(f"{plain.name}{CORRUPT}"), 1
    while renamed.is_symlink() or renamed.exists():
        number += 1
        renamed = plain.with_name(f"{plain.name}{CORRUPT}{number}")
    if isinstance(damaged, Path) and isinstance(renamed, Path):
        os.rename(damaged, renamed)
        sync_directory(renamed.parent)
    elif isinstance(damaged, RemotePath) and isinstance(renamed, RemotePath):
        move_remote(damaged, renamed)
    return renamed


def _is_complete(hidden: Path) -> bool:
    """Return whether a hidden directory is complete; a file is not before it is renamed."""
    return os.path.isfile(hidden / MANIFEST_FILE)


def _siblings(target: Path) -> list[Path]:
    prefixes = (f".{target.name}.tmp-", f".{target.name}.old-")
    if not target.parent.is_dir():
        return []
    return [path for path in target.parent.iterdir() if path.name.startswith(prefixes)]


def remove(path: AnyPath) -> None:
    """Delete a checkpoint: a directory, a file, or a link without the directory behind it.

    A directory first loses its name and its manifest. A crash while it is being deleted leaves
    nothing that looks like a checkpoint, and the next save removes the rest.
    """
    if isinstance(path, RemotePath):
        remove_remote(path)
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if hidden_target(path) is not None:
        _dismantle(path)
        return
    hidden = path.with_name(f".{path.name}.old-{Staging.new_token()}")
    with contextlib.ExitStack() as locks:
        _lock(path, locks)
        os.rename(path, hidden)
        _dismantle(hidden)


def _dismantle(hidden: Path) -> None:
    """Delete a hidden checkpoint, its manifest first: the rest must not look complete."""
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink(missing_ok=True)
        return
    (hidden / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(hidden)


def _sweep(directory: Path) -> None:
    """Remove what killed processes left in a directory; complete ones get their names back."""
    for path in list(directory.iterdir()):
        if not _SWEPT.fullmatch(path.name):
            continue
        target = hidden_target(path)
        assert target is not None
        with contextlib.ExitStack() as locks, contextlib.suppress(OSError):
            if not _is_abandoned(path, locks):
                continue
            if _is_complete(path) and not os.path.lexists(target):
                os.rename(locate(target), target)
            else:
                _dismantle(path)


def _is_abandoned(path: Path, locks: contextlib.ExitStack) -> bool:
    """Return whether no process works on a hidden directory any more; if so, lock it."""
    held = _lock(path, locks)
    if held is not None:
        return held
    entries: list[Path] = list(path.iterdir()) if path.is_dir() else []
    dates = [entry.stat().st_mtime for entry in (path, *entries)]
    return time.time() - max(dates) > _ABANDONED_S


def _lock(path: Path, locks: contextlib.ExitStack) -> bool | None:
    """Lock a directory or a file until ``locks`` is closed.

    Returns:
        Whether this process has the lock; None where the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until its content is on disk.

    Under its name the file is complete or absent: a directory counts as complete once it has a
    manifest.
    """
    part = path.with_name(f"{path.name}.part")
    with part.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
