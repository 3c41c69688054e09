"""Verification: the files of a checkpoint are those that were written.

One rank compares the sizes, which costs a system call per file. Hashes need every byte: the files
are spread over the ranks, the largest first to the rank with the fewest bytes, and over a few
threads in each rank, as the hash function runs without Python's lock. That is one read of the whole
checkpoint at the speed of the disks; loading then finds its part in the page cache.
"""

import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_megatron.checkpoint.directory.hashed_files import read_entry
from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    STATE_FILE,
    Manifest,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath, sizes
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import DamagedCheckpointError, summary

_THREADS = 4


def check_files(directory: AnyPath, manifest: Manifest) -> None:
    """Compare the names and sizes in the directory with its manifest.

    Raises:
        DamagedCheckpointError: a file is missing, is a link out of the directory, or has another
            size.
    """
    faults = []
    root, present = directory.resolve(), sizes(directory)
    for name, entry in manifest.files.items():
        if _is_link_out(directory / name, root):
            faults.append(f"{name} is a link out of the checkpoint")
        elif name not in present:
            faults.append(f"{name} is missing")
        elif (size := present[name]) != entry.size:
            faults.append(f"{name} has {size} bytes, not the {entry.size} that were written")
    if manifest.file(STATE_FILE) not in manifest.files:
        faults.append(f"{STATE_FILE} is not in the manifest")
    if faults:
        raise DamagedCheckpointError(f"damaged: {summary(faults)}")


def check_contents(what: str, directory: AnyPath, manifest: Manifest, peers: Peers) -> None:
    """Compare the content of every file with its hash in the manifest; collective.

    Args:
        what: beginning of error messages, like ``loading PATH``.
        directory: the checkpoint.
        manifest: its manifest.
        peers: the ranks that share the work.

    Raises:
        DamagedCheckpointError: on every rank; it names the files, with expected and found hashes.
        CheckpointError: a file could not be read.
    """

    def each() -> list[str]:
        share = _share(manifest, peers)
        if not share:
            return []
        with ThreadPoolExecutor(min(_THREADS, len(share))) as threads:
            checked = threads.map(lambda name: _content_fault(directory, manifest, name), share)
            return [fault for fault in checked if fault is not None]

    def first(found: Sequence[list[str]]) -> None:
        if faults := [fault for part in found for fault in part]:
            raise DamagedCheckpointError(f"damaged: {summary(faults)}")

    peers.run(what, each, first)


def foreign_files(directory: AnyPath, manifest: Manifest) -> list[str]:
    """Return the files in the directory that do not belong to the checkpoint; none is ever read."""
    known = {MANIFEST_FILE, METADATA_FILE, *manifest.files}  # an export may have been made later
    return sorted(path.name for path in directory.iterdir() if path.name not in known)


def _is_link_out(path: AnyPath, root: AnyPath) -> bool:
    return isinstance(path, Path) and path.is_symlink() and path.resolve().parent != root


def _share(manifest: Manifest, peers: Peers) -> list[str]:
    """Return names of the files that this rank hashes."""
    loads = [(0, rank) for rank in range(peers.size)]  # a heap
    share = []
    sizes_of = [(name, entry.size) for name, entry in manifest.files.items()]
    for name, size in sorted(sizes_of, key=lambda item: (-item[1], item[0])):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size + 1, rank))
        if rank == peers.rank:
            share.append(name)
    return share


def _content_fault(directory: AnyPath, manifest: Manifest, name: str) -> str | None:
    expected, path = manifest.files[name], directory / name
    found = read_entry(path)
    if found.sha256 == expected.sha256:
        return None
    shared = "; other checkpoints share the file" if is_shared(path) else ""
    return (
        f"{name}: the content has SHA-256 {found.sha256}, but {expected.sha256} was written{shared}"
    )


def is_shared(path: AnyPath) -> bool:
    """Return whether a file has further hard links, which its damage would reach too."""
    return isinstance(path, Path) and path.stat().st_nlink > 1
