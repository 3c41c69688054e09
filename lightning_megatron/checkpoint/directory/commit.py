"""Publishing a directory all at once (in a store, which has none: remote_commit.py).

A checkpoint is written into a hidden sibling of its final place and renamed when it is complete and
on disk: a reader sees the old one, the new one or none, never a mixture. An existing target is
first renamed aside. Between these two renames the target does not exist; a crash right there leaves
the complete new directory and the old one beside it, where `locate` finds them.

::

    .name.tmp-<token>   being written; complete once it has a manifest
    .name.old-<token>   replaced by a newer one, about to be deleted
    name.corrupt        found damaged, kept for whoever wants to know why

Whoever works on a hidden directory holds a lock on it, which the system takes back when the process
dies, however it dies. So the next save, of whatever name, can tell what a killed run left behind
from what another is still writing, and removes it. Deleting hides a checkpoint before it takes it
apart, for the same reason: no half of one is ever seen.
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

from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE, is_checkpoint
from lightning_megatron.checkpoint.directory.remote_commit import (
    RemoteStaging,
    move_remote,
    remove_remote,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath, RemotePath

PathT = TypeVar("PathT", Path, RemotePath, AnyPath)

logger = logging.getLogger(__name__)

CORRUPT = ".corrupt"
"""Ending of the name of a damaged checkpoint."""

_HIDDEN = re.compile(r"\.(.+)\.(?:tmp|old)-[0-9a-z]+")

_SWEPT = re.compile(r"\.(.+\.ckpt)\.(?:tmp|old)-[0-9a-f]{12}")
"""What is deleted by its name alone has to look exactly like ours."""

_ABANDONED_S = 24 * 3600.0
"""After so long without a change a hidden directory is nobody's, where locks are not supported."""


class Staging:
    """A directory under construction.

    Args:
        target: where it will stand.
        token: distinguishes this attempt from others.
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
        """Make the empty directory; leftovers of an interrupted attempt are dealt with first."""
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
        """Write files, durably; the disk need not be waited for once for each."""
        with ThreadPoolExecutor(len(contents)) as threads:
            writes = [threads.submit(self.write, *content) for content in contents.items()]
        for write in writes:
            write.result()

    def publish(self) -> None:
        """Put the complete directory in the place of the target, durably.

        The files must have been synced. On failure the former target is back in its place.
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
                except OSError as error:  # the new one stands: what is left costs space only
                    logger.warning("could not delete the replaced checkpoint: %s", error)

    def discard(self) -> None:
        """Remove what was written so far; never raises."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._locks.close()


def staging_for(target: AnyPath, token: str) -> Staging | RemoteStaging:
    """Return what a checkpoint is built in until it is published."""
    if isinstance(target, RemotePath):
        return RemoteStaging(target, token)
    return Staging(target, token)


def locate(target: PathT) -> PathT:
    """Return where the checkpoint ``target`` is: there, or beside it after a crash mid-publish."""
    if not isinstance(target, Path) or os.path.lexists(target):
        return target
    complete = [path for path in _siblings(target) if is_checkpoint(path)]
    # The new one (tmp) is preferred to the one it was about to replace (old).
    return max(complete, key=lambda path: ".tmp-" in path.name, default=target)


def hidden_target(path: PathT) -> PathT | None:
    """Return the checkpoint that ``path`` is a temporary form of; None if it is none."""
    match = _HIDDEN.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def set_aside(target: AnyPath) -> AnyPath:
    """Rename a damaged checkpoint, so that nobody takes it for a good one; return its new name.

    Of a link, what it points to is renamed.
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


def _siblings(target: Path) -> list[Path]:
    prefixes = (f".{target.name}.tmp-", f".{target.name}.old-")
    if not target.parent.is_dir():
        return []
    return [path for path in target.parent.iterdir() if path.name.startswith(prefixes)]


def remove(path: AnyPath) -> None:
    """Delete a checkpoint: directory, file or link (never what the link points to).

    A directory first loses its name and its manifest: a crash in the midst of deleting leaves
    nothing that looks like a checkpoint, were it a damaged one, and the next save removes the rest.
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
    """Delete a hidden checkpoint, its manifest first: the rest must not be taken for complete."""
    if hidden.is_symlink() or not hidden.is_dir():
        hidden.unlink(missing_ok=True)
        return
    (hidden / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(hidden)


def _sweep(directory: Path) -> None:
    """Deal with what killed processes left in a directory: complete ones get their names back."""
    for path in list(directory.iterdir()):
        if not _SWEPT.fullmatch(path.name):
            continue
        target = hidden_target(path)
        assert target is not None
        with contextlib.ExitStack() as locks, contextlib.suppress(OSError):
            if not _is_abandoned(path, locks):
                continue
            if is_checkpoint(path) and not os.path.lexists(target):
                os.rename(locate(target), target)
            else:
                _dismantle(path)


def _is_abandoned(path: Path, locks: contextlib.ExitStack) -> bool:
    """Whether nobody works on a hidden directory any more; if so, we lock it."""
    held = _lock(path, locks)
    if held is not None:
        return held
    dates = [entry.stat().st_mtime for entry in (path, *path.iterdir())]
    return time.time() - max(dates) > _ABANDONED_S


def _lock(directory: Path, locks: contextlib.ExitStack) -> bool | None:
    """Lock a directory until ``locks`` is closed.

    Returns:
        Whether we have the lock; None where the file system has none.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
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
    """Write a file and wait until its content is on disk; under its name it is complete or absent.

    A directory counts as complete once it has a manifest, so that must never be there in part.
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
