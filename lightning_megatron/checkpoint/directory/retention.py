"""How many checkpoints a run keeps.

``CheckpointConfig(keep=N)`` leaves the N newest of the checkpoints that a ModelCheckpoint makes as
training goes on, whatever it counts itself. Deleting is what cannot be undone, so it is narrow and
late:

- Only what bears a name that the callback's ``filename`` produces is touched: never ``last.ckpt``,
  nor what somebody saved beside them under a name of their own, nor a damaged or torn one.
- Never what a ModelCheckpoint holds as one of its best or as its last, nor where the run started.
- Not before the new one stands and was read back and compared with its hashes. The ranks share
  that read, and it takes place only when there is something to delete.
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
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The checkpoints that one callback makes in turn."""

    directory: AnyPath
    """Where they are, or below."""
    names: str
    """Regular expression of their paths from there."""
    spared: frozenset[AnyPath]
    """What is kept beside the newest."""


def rotate(
    target: AnyPath, manifest: Manifest, rotations: Sequence[Rotation], keep: int, peers: Peers
) -> None:
    """Delete what a checkpoint that was just published makes superfluous; collective.

    Args:
        target: the new checkpoint.
        manifest: its manifest.
        rotations: of all callbacks; the first rank's count.
        keep: how many stay.
        peers: the ranks that saved.

    Raises:
        CheckpointError: on every rank: the new one is not what was written, or something cannot be
            deleted. What was deleted before that was superfluous.
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
    """Return what can be deleted once ``target`` stands, newest first."""
    spared = {target.resolve()}.union(*({p.resolve() for p in r.spared} for r in rotations))
    found: dict[AnyPath, None] = {}
    for rotation in rotations:
        in_turn = _members(rotation)
        if target.resolve() in in_turn:
            found |= dict.fromkeys(path for path in in_turn[keep:] if path not in spared)
    return list(found)


def _members(rotation: Rotation) -> list[AnyPath]:
    """Return the complete checkpoints that take turns, newest first."""
    base, names = rotation.directory.resolve(), re.compile(rotation.names)
    return [
        path
        for path in candidates(Places(trees=(base,)))
        if path.is_relative_to(base)
        and names.fullmatch(path.relative_to(base).as_posix())
        and _is_whole(path)
    ]


def _is_whole(path: AnyPath) -> bool:
    """Whether all files are there; their contents were compared when they were new."""
    try:
        check_files(path, read_manifest(path))
    except (CheckpointError, OSError):
        return False
    return True
