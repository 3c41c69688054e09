"""Where checkpoints are: a search by names, which opens nothing but manifests."""

from collections.abc import Iterator
from dataclasses import dataclass

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
"""Lightning's own strategies put it beside their shards."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where checkpoints may be."""

    trees: tuple[AnyPath, ...] = ()
    """Directories that are searched, with those below them."""
    folders: tuple[AnyPath, ...] = ()
    """Directories that are searched by themselves."""


def candidates(places: Places) -> list[AnyPath]:
    """Return the checkpoints in some places, complete or torn, newest first."""
    paths = [path for place in places.trees for path in _below(place, deep=True)]
    paths += [path for place in places.folders for path in _below(place, deep=False)]
    found = {path.resolve() for path in paths if is_candidate(path)}
    return sorted(found, key=age, reverse=True)


def renamed(places: Places) -> list[AnyPath]:
    """Return the checkpoints that earlier searches found damaged and renamed."""
    deep = (path for place in places.trees for path in place.rglob(_ANY_CORRUPT))
    flat = (path for place in places.folders for path in place.glob(_ANY_CORRUPT))
    return sorted({*deep, *flat}, key=str)


def _below(place: AnyPath, *, deep: bool) -> Iterator[AnyPath]:
    """Directories that may be checkpoints; those in hiding after a crash by the name they miss."""
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
    """Whether there is a checkpoint of ours at ``path``, complete or torn."""
    place = locate(path)
    if not place.is_dir():
        return False
    if is_checkpoint(place):
        return True
    ours = (place / STATE_FILE).exists() or any(place.glob("*.distcp"))
    return ours and not (place / _FOREIGN).exists()


def age(path: AnyPath) -> tuple[float, str]:
    """When it was written: by its own word, which copying does not change, if it has one."""
    place = locate(path)
    try:
        written = read_manifest(place).written
    except CheckpointError:
        written = None
    if written is None:
        file = place / MANIFEST_FILE
        written = (file if file.exists() else place).stat().st_mtime
    return written, path.name
