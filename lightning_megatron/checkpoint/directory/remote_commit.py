"""The commit of a checkpoint in an object store, which cannot rename a directory.

A store promises only that an object appears whole. So the manifest is the commit: shards and state
are put first, under names that no manifest mentions, and the manifest last. A prefix without a
manifest is torn, and is not taken for a checkpoint.

A checkpoint that replaces another (``last.ckpt``) is written beside it in the same prefix, as
``<token>=__0_0.distcp`` and so on. The change happens when its manifest is put over the old one;
then the objects of the old one are deleted. A crash at any time leaves the old or the new one, and
objects that the next save deletes. A prefix that is copied to a disk is a valid directory.
"""

import logging
import re
from collections.abc import Mapping

from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    STATE_FILE,
    STATE_TENSORS_FILE,
    is_checkpoint,
    read_manifest,
)
from lightning_megatron.checkpoint.directory.storage import RemotePath
from lightning_megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

_STATES = "|".join(map(re.escape, (METADATA_FILE, STATE_FILE, STATE_TENSORS_FILE)))
_OURS = re.compile(rf"(?:[0-9a-z]+=)?(?:{_STATES}|__\d+_\w+\.distcp|manifest\.\d+\.json)")


class RemoteStaging:
    """A checkpoint under construction in a store.

    Args:
        target: the prefix of the checkpoint.
        token: name of this attempt, different from that of any other.

    Attributes:
        directory: the prefix under which files are put.
        prefix: beginning of the names of the files; known after `create`.
    """

    def __init__(self, target: RemotePath, token: str) -> None:
        self.target = self.directory = target
        self.prefix = ""
        self._token = token
        self._created = False
        self._committed = False

    def create(self) -> None:
        """Choose names that are not taken.

        Raises:
            CheckpointError: the prefix holds something else than a checkpoint, which stays.
        """
        if is_checkpoint(self.target):
            self.prefix = f"{self._token}="
            self._created = True
            return
        present = [entry.name for entry in self.target.iterdir()]
        foreign = [name for name in present if not _OURS.fullmatch(name)]
        if foreign or self.target.is_file():
            raise CheckpointError(
                f"{self.target} exists and is no checkpoint ({', '.join(foreign[:3]) or 'a file'}):"
                " it is not replaced"
            )
        for name in present:
            (self.target / name).unlink(missing_ok=True)
        self._created = True
        self.target.fs.makedirs(self.target.path, exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Put one object; the manifest publishes the checkpoint."""
        (self.target / name).write_bytes(data)
        self._committed = self._committed or name == MANIFEST_FILE

    def write_all(self, contents: Mapping[str, bytes]) -> None:
        """Put several objects."""
        for name, data in contents.items():
            self.write(name, data)

    def publish(self) -> None:
        """Delete our objects that the manifest does not name; never raises."""
        try:
            needed = {MANIFEST_FILE, *read_manifest(self.target).files}
            for entry in self.target.iterdir():
                if entry.name not in needed and _OURS.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        except Exception as error:  # every store has its own kinds
            logger.warning("could not delete what %s has replaced: %s", self.target, error)

    def discard(self) -> None:
        """Delete the objects of an unfinished save; never raises."""
        if self._committed or not self._created:
            return
        try:
            for entry in self.target.iterdir():
                if entry.name.startswith(self.prefix) and _OURS.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        except Exception as error:
            logger.warning("%s: could not delete an unfinished save: %s", self.target, error)


def remove_remote(path: RemotePath) -> None:
    """Delete a checkpoint, its manifest first."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    if path.exists():
        path.fs.rm(path.path, recursive=True)


def move_remote(path: RemotePath, to: RemotePath) -> None:
    """Rename a checkpoint; the store copies object by object."""
    path.fs.mv(path.path, to.path, recursive=True)
