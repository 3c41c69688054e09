"""The deletion of old checkpoints: ``CheckpointConfig(keep=N)``.

The N newest checkpoints of a ModelCheckpoint stay, whatever the callback counts itself. A deletion
cannot be undone, so it has three limits:

- Only checkpoints with a name that the callback's ``filename`` produces are deleted: never
  ``last.ckpt``, nor one that the user saved under another name, nor a damaged or torn one.
- Checkpoints that a ModelCheckpoint holds as one of its best or as its last stay, and so does the
  one from which the run started.
- The new checkpoint has to be published, read back and compared with its hashes first. The ranks
  share that read, which takes place only when there is something to delete.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.discovery import Places, candidates
from lightning_megatron.checkpoint.directory.manifest import Manifest, read_manifest
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.directory.verify import check_contents, check_files
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The checkpoints that one callback makes in turn."""

    directory: AnyPath
    """Directory in or below which they are."""
    names: str
    """Regular expression for their paths relative to the directory."""
    spared: frozenset[AnyPath]
    """Checkpoints that stay beside the newest."""


def rotate(
    target: AnyPath, manifest: Manifest, rotations: Sequence[Rotation], keep: int, peers: Peers
) -> None:
    """Delete the old checkpoints after a new one was published; collective.

    Args:
        target: the new checkpoint.
        manifest: its manifest.
        rotations: those of all callbacks; the first rank's are used.
        keep: number of checkpoints of each callback that stay.
        peers: the ranks that saved.

    Raises:
        CheckpointError: on every rank: the new checkpoint is not what was written, or an old one
            cannot be deleted.
    """
    what = f"keeping the newest {keep} checkpoints beside {target}"
    found = peers.run(what, lambda: None, lambda _: superfluous(target, rotations, keep))
    if not found:
        return
    check_contents(what, target, manifest, peers)

    def delete(_: object) -> None:
        for path in found:
            logger.debug("deleting %s: there are %d newer ones", path, keep)
            remove(path)

    peers.run(what, lambda: None, delete)


def superfluous(target: AnyPath, rotations: Sequence[Rotation], keep: int) -> list[AnyPath]:
    """Return the checkpoints that can be deleted once ``target`` is published, newest first."""
    spared = {target.resolve()}.union(*({p.resolve() for p in r.spared} for r in rotations))
    found: dict[AnyPath, None] = {}
    for rotation in rotations:
        in_turn = _members(rotation)
        if target.resolve() in in_turn:
            found |= dict.fromkeys(path for path in in_turn[keep:] if path not in spared)
    return list(found)


def _members(rotation: Rotation) -> list[AnyPath]:
    """Return the complete checkpoints of a rotation, newest first."""
    base, names = rotation.directory.resolve(), re.compile(rotation.names)
    return [
        path
        for path in candidates(Places(trees=(base,)))
        if path.is_relative_to(base)
        and names.fullmatch(path.relative_to(base).as_posix())
        and _is_whole(path)
    ]


def _is_whole(path: AnyPath) -> bool:
    """Return whether all files are there; their contents were compared when they were new."""
    try:
        check_files(path, read_manifest(path))
    except (CheckpointError, OSError):
        return False
    return True
