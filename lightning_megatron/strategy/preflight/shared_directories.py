"""Whether all machines of a run see the directories that they write into together.

Every rank writes its part of a checkpoint into one directory, which rank 0 creates and publishes.
Where machines do not share that directory, every save fails, and training goes on without: in the
end there is no checkpoint. So before the first step rank 0 puts a file of a random name into each
such directory, and all ranks look for it. Network file systems remember for some seconds what a
directory held, but not of a name that nobody has asked for yet; all the same a rank looks several
times before it says no. Stores behind a URL are the same from everywhere.

Callbacks that save checkpoints without being a `Checkpoint` of Lightning's have a method
``directory_of_checkpoints(trainer)``; those whose ranks write other files, each its own, have
``directory_of_files(trainer)``. The latter work on machines that share nothing; but whoever reads
the files finds only those of his machine, which is said once.
"""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any
from lightning_megatron.launch.attempt import Peer
from lightning_megatron.launch.rendezvous import named_ranks

_PATIENCE_S = 5.0
"""Seconds that a rank looks for what rank 0 has written."""
_PAUSE_S = 0.2


@runtime_checkable
class SavesCheckpoints(Protocol):
    """A callback that saves checkpoints."""

    def directory_of_checkpoints(self, trainer: Trainer) -> AnyPath:
        """Directory that checkpoints are put into."""


@runtime_checkable
class WritesFiles(Protocol):
    """A callback whose ranks write files each for itself."""

    def directory_of_files(self, trainer: Trainer) -> str | os.PathLike[str]:
        """Directory that they write into."""


@dataclass(frozen=True)
class _Place:
    """A directory of this machine's file system."""

    owner: str
    """Writer of the directory, as messages name it."""
    path: Path
    is_required: bool
    """Whether the run is of no use where it is not shared."""


def check_shared(trainer: Trainer, peers: Peers) -> None:
    """Look whether all ranks see the directories that they write into together; collective.

    Args:
        trainer: whose callbacks know their directories by now.
        peers: all ranks.

    Raises:
        ConfigError: some do not see one of them, or rank 0 cannot write there; on all ranks.
    """
    mine = _places(trainer)
    here = Peer.here().host
    probes, refused = peers.run("writing", lambda: None, lambda _: _put(mine, here))
    raise_if_any(refused)
    found = [(probe, place) for probe, place in zip(probes, mine, strict=False) if probe]

    def look() -> tuple[str, list[bool]]:
        return here, _see([place.path / probe for probe, place in found])

    def judge(seen: list[tuple[str, list[bool]]]) -> tuple[list[str], list[str]]:
        for probe, place in found:
            with suppress(OSError):
                (place.path / probe).unlink()
        faults, warnings = [], []
        for index, (_, place) in enumerate(found):
            blind = [(rank, host) for rank, (host, of) in enumerate(seen) if not _at(of, index)]
            if blind and place.is_required:
                faults.append(_fault(place, blind, seen[0][0]))
            elif blind:
                warnings.append(_warning(place, blind))
        return faults, warnings

    faults, warnings = peers.run("looking for files", look, judge)
    for text in dict.fromkeys(warnings):
        rank_zero_warn(text)
    raise_if_any(faults)


def _places(trainer: Trainer) -> list[_Place]:
    """Local directories of the callbacks, each once; those that must be shared first."""
    given: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = [one for c in given for one in getattr(c, "members", (c,))]  # of a `CallbackGroup`
    required: dict[Path, str] = {}
    others: dict[Path, str] = {}
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, SavesCheckpoints):
            _add(required, storage_path(callback.directory_of_checkpoints(trainer)), name)
        elif callback in trainer.checkpoint_callbacks and getattr(callback, "dirpath", None):
            _add(required, storage_path(callback.dirpath), name)
        if isinstance(callback, WritesFiles):
            _add(others, storage_path(callback.directory_of_files(trainer)), name)
    places = [_Place(name, path, True) for path, name in required.items()]
    return places + [_Place(n, p, False) for p, n in others.items() if p not in required]


def _add(places: dict[Path, str], path: AnyPath, name: str) -> None:
    if isinstance(path, Path):
        places.setdefault(path.absolute(), name)


def _put(places: Sequence[_Place], host: str) -> tuple[list[str | None], list[str]]:
    """Names of the files that this rank has put into them, or None, and what is wrong with them."""
    names: list[str | None] = []
    problems = []
    for place in places:
        name = f".shared-{secrets.token_hex(8)}"
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            (place.path / name).touch()
        except OSError as error:
            names.append(None)
            if place.is_required:
                problems.append(
                    f"{place.owner} saves to {place.path}: rank 0 ({host}) cannot write there "
                    f"({error.strerror}); nearest valid: a directory that all machines may write to"
                )
        else:
            names.append(name)
    return names, problems


def _see(files: Sequence[Path]) -> list[bool]:
    """Subset of these that is there, by now or within some seconds."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        seen = [_is_there(file) for file in files]
        if all(seen) or time.monotonic() > until:
            return seen
        time.sleep(_PAUSE_S)


def _is_there(file: Path) -> bool:
    with suppress(OSError):
        return file.exists() or file.name in os.listdir(file.parent)
    return False


def _at(seen: Sequence[bool], index: int) -> bool:
    return index < len(seen) and seen[index]


def _fault(place: _Place, blind: Sequence[tuple[int, str]], host: str) -> str:
    return (
        f"{place.owner} saves to {place.path}: {named_ranks(blind)} do not see there what rank 0 "
        f"({host}) writes, and all ranks write their parts of a checkpoint into one directory; "
        "nearest valid: a directory that all machines share, or a URL like s3://bucket/run"
    )


def _warning(place: _Place, blind: Sequence[tuple[int, str]]) -> str:
    return (
        f"{place.owner} writes to {place.path}, which {named_ranks(blind)} do not share with rank "
        "0: their files stay on their machines, where `lightning-megatron report` of rank 0's "
        "directory does not find them"
    )
