"""Publishing a directory all at once.

A checkpoint is written into a hidden sibling of its final place and renamed when it is complete and
on disk: a reader sees the old one, the new one or none, never a mixture. An existing target is
first renamed aside. Between these two renames the target does not exist; a crash right there leaves
the complete new directory and the old one beside it, where `locate` finds them.

::

    .name.tmp-<token>   being written; complete once it has a manifest
    .name.old-<token>   replaced by a newer one, about to be deleted
    name.corrupt        found damaged, kept for whoever wants to know why
"""

import logging
import os
import re
import shutil
import uuid
from pathlib import Path

from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, is_checkpoint

logger = logging.getLogger(__name__)

CORRUPT = ".corrupt"
"""Ending of the name of a damaged checkpoint."""

_HIDDEN = re.compile(r"\.(.+)\.(?:tmp|old)-[0-9a-z]+")


class Staging:
    """A directory under construction.

    Args:
        target: where it will stand.
        token: distinguishes this attempt from others.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.directory = target.with_name(f".{target.name}.tmp-{token}")
        self._aside = target.with_name(f".{target.name}.old-{token}")

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
            remove(leftover)
        self.directory.mkdir()

    def publish(self) -> None:
        """Put the complete directory in the place of the target, durably.

        The files must have been synced. On failure the former target is back in its place.
        """
        sync_directory(self.directory)
        replaces = os.path.lexists(self.target)
        if replaces:
            os.rename(self.target, self._aside)
        try:
            os.rename(self.directory, self.target)
        except BaseException:
            if replaces:
                os.rename(self._aside, self.target)
            raise
        sync_directory(self.target.parent)
        if replaces:
            try:
                remove(self._aside)
            except OSError as error:  # the new one stands: what is left costs space only
                logger.warning("could not delete the replaced checkpoint: %s", error)

    def discard(self) -> None:
        """Remove what was written so far; never raises."""
        shutil.rmtree(self.directory, ignore_errors=True)


def locate(target: Path) -> Path:
    """Return where the checkpoint ``target`` is: there, or beside it after a crash mid-publish."""
    if os.path.lexists(target):
        return target
    complete = [path for path in _siblings(target) if is_checkpoint(path)]
    # The new one (tmp) is preferred to the one it was about to replace (old).
    return max(complete, key=lambda path: ".tmp-" in path.name, default=target)


def hidden_target(path: Path) -> Path | None:
    """Return the checkpoint that ``path`` is a temporary form of; None if it is none."""
    match = _HIDDEN.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def set_aside(target: Path) -> Path:
    """Rename a damaged checkpoint, so that nobody takes it for a good one; return its new name.

    Of a link, what it points to is renamed.
    """
    damaged = locate(target).resolve()
    plain = hidden_target(damaged) or damaged
    renamed, number = plain.with_name(f"{plain.name}{CORRUPT}"), 1
    while os.path.lexists(renamed):
        number += 1
        renamed = plain.with_name(f"{plain.name}{CORRUPT}{number}")
    os.rename(damaged, renamed)
    sync_directory(renamed.parent)
    return renamed


def _siblings(target: Path) -> list[Path]:
    prefixes = (f".{target.name}.tmp-", f".{target.name}.old-")
    if not target.parent.is_dir():
        return []
    return [path for path in target.parent.iterdir() if path.name.startswith(prefixes)]


def remove(path: Path) -> None:
    """Delete a checkpoint: directory, file or link (never what the link points to).

    A directory first loses its name and its manifest: a crash in the midst of deleting leaves
    nothing that looks like a checkpoint, were it a damaged one.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if hidden_target(path) is None:
        hidden = path.with_name(f".{path.name}.old-{Staging.new_token()}")
        os.rename(path, hidden)
        path = hidden
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(path)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until its content is on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
