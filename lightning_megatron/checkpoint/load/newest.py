"""The newest valid checkpoint, for runs that go on by themselves.

The latest checkpoint may be torn, or damaged by a disk. So candidates are opened from the newest
on, which verifies them. A damaged one is renamed ``<name>.corrupt`` (never deleted), which takes it
out of every later search, and the one before it is tried. All ranks do this together and agree. A
checkpoint that cannot be *read*, for want of permission or by a failing disk, is not damaged: going
back would throw work away, so that is an error. So is a file in the place of a directory.

Local checkpoints (local/run.py) are in the same order, by the time at which their state was
captured. They are skipped if they are damaged, or if a file of them is on no node that is left.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.directory.commit import locate, set_aside
from lightning_megatron.checkpoint.directory.discovery import Places, age, candidates, renamed
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.load.file_reader import Opening
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.local.restore import LocalCandidate, LocalStock
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError, summary

logger = logging.getLogger(__name__)


def open_newest(
    places: Places,
    opening: Opening = Opening(),  # noqa: B008
    *,
    with_optimizers: bool = False,
    stock: LocalStock | None = None,
) -> CheckpointReader | None:
    """Open the newest valid checkpoint; collective.

    Args:
        places: directories to search; the first rank's are used.
        opening: opens them.
        with_optimizers: skip checkpoints without optimizer state.
        stock: local checkpoints of the nodes, if there may be some.

    Returns:
        The open checkpoint; None if there has never been one.

    Raises:
        CheckpointError: all checkpoints are damaged, which it lists; or one cannot be read.
    """
    peers = Peers(opening.group)
    found, corrupt = peers.run(
        "looking for checkpoints", lambda: None, lambda _: _search(places, with_optimizers)
    )
    local = [] if stock is None else stock.find()
    reasons: list[str] = []
    for one in _merged(found, local):
        if isinstance(one, LocalCandidate):
            assert stock is not None
            try:
                return stock.open(one)
            except CheckpointError as error:  # the shared one before it is used
                if peers.is_first:
                    logger.warning("Skipping a local checkpoint: %s", error)
            continue
        try:
            return opening(one.path)
        except DamagedCheckpointError as error:
            reasons.append(_put_aside(one.path, error, peers))
    reasons += [f"{path}: found damaged by an earlier search" for path in corrupt]
    if not reasons:
        return None
    listed = "\n".join(f"  {reason}" for reason in reasons)
    raise CheckpointError(
        f"every checkpoint is damaged; to start from the beginning, move these away:\n{listed}"
    )


def open_or_go_back(
    path: AnyPath,
    places: Places,
    opening: Opening = Opening(),  # noqa: B008
    *,
    with_optimizers: bool = False,
) -> CheckpointReader:
    """Open ``path``, or the newest valid checkpoint if ``path`` is damaged; collective.

    In the latter case ``path`` becomes a link to that checkpoint (except in stores, which have no
    links).

    Args:
        path: a checkpoint; the first rank's value is used.
        places: directories to search for others.
        opening: opens them.
        with_optimizers: skip checkpoints without optimizer state.

    Raises:
        CheckpointError: no valid checkpoint exists, or one cannot be read.
    """
    peers = Peers(opening.group)
    try:
        return opening(path)
    except DamagedCheckpointError as error:
        reason = _put_aside(path, error, peers)
    reader = open_newest(places, opening, with_optimizers=with_optimizers)
    if reader is None:
        raise CheckpointError(f"the only checkpoint is damaged: {reason}")

    found = reader.directory

    def link(_: object) -> None:
        if not isinstance(path, Path):  # stores have no links: the next save takes the name
            return
        if path.is_symlink():
            path.unlink()
        if not os.path.lexists(path):
            path.symlink_to(os.path.relpath(found, path.parent))

    peers.run(f"linking {path}", lambda: None, link)
    return reader


def _put_aside(path: AnyPath, error: DamagedCheckpointError, peers: Peers) -> str:
    def rename(_: object) -> AnyPath:
        try:
            return set_aside(path)
        except OSError as problem:  # a directory that may only be read
            logger.warning("%s cannot be renamed: %s", path, problem)
            return path

    now = peers.run(f"renaming {path}", lambda: None, rename)
    reason = " ".join(str(error).split())  # one line, whatever is in it
    if peers.is_first:
        logger.warning("Damaged checkpoint, renamed to %s: %s", now, reason)
    return f"{now}: {reason}"


@dataclass(frozen=True)
class _Shared:
    """A shared checkpoint, complete or torn."""

    path: AnyPath
    taken: float
    """Time at which the state was captured, or else of writing."""


def _merged(
    shared: Sequence[_Shared], local: Sequence[LocalCandidate]
) -> list[_Shared | LocalCandidate]:
    """Merge shared and local checkpoints, the newest first."""
    merged: list[_Shared | LocalCandidate] = []
    ours = list(local)
    for one in shared:
        while ours and ours[0].taken >= one.taken:
            merged.append(ours.pop(0))
        merged.append(one)
    return [*merged, *ours]


def _search(places: Places, with_optimizers: bool) -> tuple[list[_Shared], list[AnyPath]]:
    """Return the candidates, and the checkpoints that earlier searches have renamed."""
    for place in (*places.trees, *places.folders):
        if isinstance(place, Path) and place.exists() and not place.is_dir():
            raise CheckpointError(
                f"{place} is a file, where checkpoints are searched for in a directory; nearest "
                "valid: restore the directory, or move the file away to start from the beginning"
            )
    found = candidates(places)
    weights = [path for path in found if with_optimizers and _has_weights_alone(path)]
    if weights:
        logger.warning(
            "Skipping checkpoints without optimizer state: %s",
            summary([str(path) for path in weights]),
        )
    return [_Shared(p, _taken(p)) for p in found if p not in weights], renamed(places)


def _taken(path: AnyPath) -> float:
    with suppress(CheckpointError):  # opening it will tell
        if (taken := read_manifest(locate(path)).taken) is not None:
            return taken
    return age(path)[0]


def _has_weights_alone(path: AnyPath) -> bool:
    try:
        return read_manifest(locate(path)).optimizers == 0
    except CheckpointError:
        return False  # opening it will tell
