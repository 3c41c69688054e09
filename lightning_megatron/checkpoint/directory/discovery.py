"""The search for checkpoints by names; it opens nothing but manifests."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.directory.commit import CORRUPT, hidden_target, locate
from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    is_checkpoint,
    read_manifest,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import CheckpointError

_SUFFIX = ".ckpt"
_ANY_CORRUPT = f"*{_SUFFIX}{CORRUPT}*"
_FOREIGN = "meta.pt"
"""File of Lightning's own strategies, which is beside their shards."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Directories that may hold checkpoints."""

    trees: tuple[AnyPath, ...] = ()
    """Directories that are searched with all directories below them."""
    folders: tuple[AnyPath, ...] = ()
    """Directories that are searched without those below them."""


def candidates(places: Places) -> list[AnyPath]:
    """Return all checkpoints in some places, complete or torn, the newest first."""
    paths = [path for place in places.trees for path in _below(place, deep=True)]
    paths += [path for place in places.folders for path in _below(place, deep=False)]
    found = {path.resolve() for path in paths if is_candidate(path)}
    return sorted(found, key=age, reverse=True)


def renamed(places: Places) -> list[AnyPath]:
    """Return the checkpoints that were renamed because they were damaged."""
    deep = (path for place in places.trees for path in place.rglob(_ANY_CORRUPT))
    flat = (path for place in places.folders for path in place.glob(_ANY_CORRUPT))
    return sorted({*deep, *flat}, key=str)


def _below(place: AnyPath, *, deep: bool) -> Iterator[AnyPath]:
    """Yield what may be a checkpoint; hidden directories under their final paths."""
    if not place.is_dir():
        return
    entries: list[AnyPath] = [*place.iterdir()]
    for path in sorted(entries, key=str):
        target = hidden_target(path)
        if target is not None:
            yield target
        elif path.suffix == _SUFFIX:
            yield path
        elif deep and path.is_dir() and not path.is_symlink() and CORRUPT not in path.suffix:
            yield from _below(path, deep=True)


def is_candidate(path: AnyPath) -> bool:
    """Return whether ``path`` is a checkpoint of this package, complete or torn.

    Files of Lightning are, too; a file that begins as an archive and does not end as one is torn.
    """
    place = locate(path)
    if isinstance(place, Path) and place.is_file():
        return hidden_target(place) is None and (is_checkpoint(place) or _is_torn(place))
    if not place.is_dir():
        return False
    if is_checkpoint(place):
        return True
    ours = (place / STATE_FILE).exists() or any(place.glob("*.distcp"))
    return ours and not (place / _FOREIGN).exists()


def _is_torn(file: Path) -> bool:
    with file.open("rb") as opened:
        begins = opened.read(4) == b"PK\x03\x04"
    return begins and not zipfile.is_zipfile(file)


def age(path: AnyPath) -> tuple[float, str]:
    """Return date and name, for sorting; the date of the manifest does not change by copying."""
    place = locate(path)
    try:
        written = read_manifest(place).written
    except CheckpointError:
        written = None
    if written is None:
        file = place / MANIFEST_FILE if place.is_dir() else place
        written = (file if file.exists() else place).stat().st_mtime
    return written, path.name
