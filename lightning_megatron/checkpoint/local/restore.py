"""Local checkpoints after a restart: the search for them, and the reader.

A restart may place processes on other nodes, and files may be lost, so everything is searched anew.
One rank of each node lists the files there, by names and sizes. The first rank merges the lists,
newest first. No node has all files, but each has the manifest, which lists them all. Directories
whose manifests are equal to the byte belong to one checkpoint, and only their files are put
together; a step that was saved twice is not mistaken for another. Where the manifest of a node is
damaged, that of another says what the files beside it are.

All ranks open a checkpoint together: every file is compared with its hash on one of the nodes that
have it, if possible on that of the rank with the number of its writer, which needs it under the
same layout. A damaged file is renamed, and another node's copy is
compared. If a good copy of every file is left, the checkpoint is whole. Nodes that lack the small
files get them then.

Before tensors are read, each rank names the files that hold its chunks. Files that its node lacks
are fetched, and files that were not compared yet are compared. Then reading works as from a
directory with all files.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.commit import CORRUPT
from lightning_megatron.checkpoint.directory.hashed_files import read_entry, read_text
from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE, Manifest, read_manifest
from lightning_megatron.checkpoint.directory.storage import AnyPath, sizes
from lightning_megatron.checkpoint.load.dcp_reader import files_of
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.local.directory import check_room, checkpoints_in
from lightning_megatron.checkpoint.local.nodes import Nodes
from lightning_megatron.checkpoint.local.transfer import Transfer, exchange
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError, summary

_THREADS = 4
_SHARDS = ".distcp"
"""Suffix of the files that no node needs all of."""
_WRITER = re.compile(r"(?:__|manifest\.)(\d+)[_.]")


@dataclass(frozen=True, kw_only=True)
class LocalCandidate:
    """A local checkpoint of which some node has files."""

    step: int
    """Optimizer steps taken."""
    taken: float
    """Time at which the state was captured, in seconds since 1970."""
    digest: str
    """Hash of its manifest."""
    name: str
    """Name of its directories, with that of the run."""
    leader: int
    """Rank that has its manifest."""


class LocalStock:
    """The local checkpoints on the nodes.

    Args:
        peers: all ranks, over a group that no other thread uses.
        nodes: the nodes of the ranks.
        runs: function that returns the directories of this run and those before it on this node.
        new_run: function that returns the directory for a run of some name, with room for some
            bytes; it makes the directory if need be.
    """

    def __init__(
        self,
        peers: Peers,
        nodes: Nodes,
        runs: Callable[[], Sequence[Path]],
        new_run: Callable[[str, int], Path],
    ) -> None:
        self.peers = peers
        self.nodes = nodes
        self._runs = runs
        self._new_run = new_run
        self._found: dict[str, Path] = {}
        self._headless: dict[str, Path] = {}
        """Directories whose manifests are damaged, by name; another node may have the manifest."""

    def find(self) -> list[LocalCandidate]:
        """Return the candidates, the newest first; collective."""

        def each() -> list[LocalCandidate]:
            self._found, self._headless = {}, {}
            if not self.nodes.is_leader(self.peers.rank):
                return []
            return self._listed()

        def first(parts: list[list[LocalCandidate]]) -> list[LocalCandidate]:
            found: dict[str, LocalCandidate] = {}
            for part in parts:
                for candidate in part:
                    found.setdefault(candidate.digest, candidate)
            return sorted(found.values(), key=lambda c: (c.taken, c.step), reverse=True)

        return self.peers.run("looking for local checkpoints", each, first)

    def _listed(self) -> list[LocalCandidate]:
        found = []
        for run in self._runs():
            for path in checkpoints_in(run):
                name = f"{run.name}/{path.name}"
                try:
                    manifest = read_manifest(path)
                except (OSError, CheckpointError):  # or another process is deleting it
                    self._headless[name] = path
                    continue
                digest, step, taken = manifest.sha256, manifest.step, manifest.taken
                if digest is None or step is None or taken is None:
                    continue
                self._found[digest] = path
                found.append(
                    LocalCandidate(
                        step=step, taken=taken, digest=digest, name=name, leader=self.peers.rank
                    )
                )
        return found

    def open(self, candidate: LocalCandidate) -> "LocalReader":
        """Open a candidate; collective.

        Raises:
            DamagedCheckpointError: no node has a good copy of some file.
            CheckpointError: anything else failed.
        """
        began = time.perf_counter()
        what = f"opening the local checkpoint {candidate.name}"
        peers = self.peers
        text = peers.run(what, lambda: self._text(candidate), lambda parts: parts[candidate.leader])
        share = _NodeShare(self, candidate, text, what)
        share.verify()
        share.bring_to_all(text)
        return LocalReader(share, began)

    def known(self, candidate: LocalCandidate) -> Path | None:
        """Return the directory in which this node has files of a checkpoint; on its leader."""
        return self._found.get(candidate.digest) or self._headless.get(candidate.name)

    def made(self, candidate: LocalCandidate, needed: int) -> Path:
        """Make a directory for the files of a checkpoint, with room for some bytes."""
        run, _, name = candidate.name.partition("/")
        made = self._new_run(run, needed) / name
        made.mkdir(mode=0o700, exist_ok=True)
        self._found[candidate.digest] = made
        return made

    def _text(self, candidate: LocalCandidate) -> str:
        if self.peers.rank != candidate.leader:
            return ""
        return read_text(self._found[candidate.digest] / MANIFEST_FILE)


class _NodeShare:
    """The files of one checkpoint on each node; the same on all ranks."""

    def __init__(self, stock: LocalStock, candidate: LocalCandidate, text: str, what: str) -> None:
        self.manifest = Manifest.from_json(text)
        self.what = what
        self.peers = stock.peers
        self.nodes = stock.nodes
        leads = self.nodes.is_leader(self.peers.rank)

        def each() -> tuple[set[str], str]:
            if not leads:
                return set(), ""
            path = stock.known(candidate)
            if path is None:
                return set(), str(stock.made(candidate, self.manifest.size))
            present, files = sizes(path), self.manifest.files.items()
            return {name for name, entry in files if present.get(name) == entry.size}, str(path)

        parts = self.peers.run(what, each, lambda parts: parts)
        leaders = [self.nodes.ranks(node)[0] for node in range(self.nodes.count)]
        self._held = [parts[leader][0] for leader in leaders]
        self.directory = Path(parts[leaders[self.node]][1])
        self._sound: list[set[str]] = [set() for _ in leaders]
        """Files of each node that equal their hashes."""
        self.fetched = 0
        """Bytes that nodes have fetched from each other."""

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.nodes.of_rank[self.peers.rank]

    def verify(self) -> None:
        """Compare one copy of every file with its hash, and another copy if that is damaged."""
        damaged: list[str] = []
        while True:
            share: dict[int, list[str]] = {}
            lost = []
            sound = set().union(*self._sound)
            for name in self.manifest.files:
                if name in sound:
                    continue
                holders = [node for node, held in enumerate(self._held) if name in held]
                if not holders:
                    lost.append(name)
                    continue
                reader = self._reader(name)
                chosen = reader if reader in holders else holders[0]
                share.setdefault(chosen, []).append(name)
            if lost:
                reason = f"; {summary(damaged)}" if damaged else ""
                raise DamagedCheckpointError(
                    f"{self.what}: {summary(lost)}: on none of the {self.nodes.count} nodes of "
                    f"this run{reason}"
                )
            if not share:
                return
            damaged += self._compare(share)

    def _reader(self, name: str) -> int | None:
        """Return the node of the rank with the number of a file's writer; None if there is none."""
        found = _WRITER.match(name)
        rank = self.peers.size if found is None else int(found[1])
        return self.nodes.of_rank[rank] if rank < self.peers.size else None

    def _compare(self, share: Mapping[int, Sequence[str]]) -> list[str]:
        """Compare files of each node with their hashes; return the faults."""

        def each() -> list[tuple[str, str]]:
            mine = self._portion(share.get(self.node, ()))
            with ThreadPoolExecutor(_THREADS) as threads:
                return [found for found in threads.map(self._fault, mine) if found is not None]

        parts = self.peers.run(self.what, each, lambda parts: parts)
        damaged: list[str] = []
        for node, names in share.items():
            self._sound[node] |= set(names)
        for rank, part in enumerate(parts):
            node = self.nodes.of_rank[rank]
            for name, fault in part:
                self._sound[node].discard(name)
                self._held[node].discard(name)
                damaged.append(fault)
        return damaged

    def _portion(self, names: Sequence[str]) -> list[str]:
        """Return this rank's share of the files of its node, balanced by bytes."""
        ranks = self.nodes.ranks(self.node)
        load, mine = dict.fromkeys(ranks, 0), []
        for name in sorted(names, key=lambda n: (-self.manifest.files[n].size, n)):
            rank = min(ranks, key=load.__getitem__)
            load[rank] += self.manifest.files[name].size + 1
            if rank == self.peers.rank:
                mine.append(name)
        return mine

    def _fault(self, name: str) -> tuple[str, str] | None:
        path, expected = self.directory / name, self.manifest.files[name]
        try:
            if (found := read_entry(path)) == expected:
                return None
            os.rename(path, path.with_name(f"{name}{CORRUPT}"))
            reason = f"the content has SHA-256 {found.sha256}, {expected.sha256} was written"
        except OSError as error:
            reason = str(error)
        return name, f"{path}: {reason}"

    def bring_to_all(self, text: str) -> None:
        """Bring the small files to every node.

        Args:
            text: content of the manifest.
        """
        names = {name for name in self.manifest.files if not name.endswith(_SHARDS)}
        self.fetch_files([names] * self.nodes.count)
        file = self.directory / MANIFEST_FILE

        def each() -> None:
            if not self.nodes.is_leader(self.peers.rank):
                return
            if not file.is_file() or file.read_bytes() != text.encode():
                file.write_bytes(text.encode())

        self.peers.run(self.what, each, lambda _: None)

    def fetch_files(self, wanted: Sequence[set[str]]) -> None:
        """Fetch the files that each node wants, and compare those that it has.

        Args:
            wanted: names of files, by node; the same on all ranks.
        """
        unknown = {
            node: sorted(names & self._held[node] - self._sound[node])
            for node, names in enumerate(wanted)
        }
        if any(unknown.values()):
            self._compare(unknown)
        transfers = self._transfers(wanted)
        if not transfers:
            return
        files = self.manifest.files

        def each() -> None:
            arriving = [t.name for t in transfers if self.nodes.of_rank[t.target] == self.node]
            if self.nodes.is_leader(self.peers.rank):
                for name in arriving:  # of another size
                    (self.directory / name).unlink(missing_ok=True)
                check_room(self.directory, sum(files[name].size for name in arriving))

        self.peers.run(self.what, each, lambda _: None)

        def send() -> None:
            if faults := exchange(transfers, files, self.directory, self.peers):
                raise CheckpointError(summary(faults))

        self.peers.run(self.what, send, lambda _: None)
        for transfer in transfers:
            node = self.nodes.of_rank[transfer.target]
            self._held[node].add(transfer.name)
            self._sound[node].add(transfer.name)
            self.fetched += files[transfer.name].size

    def _transfers(self, wanted: Sequence[set[str]]) -> list[Transfer]:
        """Return the transfers, balanced over the ranks."""
        load = [0] * self.peers.size
        found = []
        for node, names in enumerate(wanted):
            for name in sorted(names - self._held[node]):
                sources = [
                    rank
                    for other, sound in enumerate(self._sound)
                    if name in sound
                    for rank in self.nodes.ranks(other)
                ]
                size = self.manifest.files[name].size
                source = min(sources, key=load.__getitem__)
                load[source] += size
                target = min(self.nodes.ranks(node), key=load.__getitem__)
                load[target] += size
                found.append(Transfer(name=name, source=source, target=target))
        return found


class LocalReader(CheckpointReader):
    """An open local checkpoint; each node sees its own files.

    Args:
        share: the files of each node.
        began: time at which opening began, by `time.perf_counter`.
    """

    def __init__(self, share: _NodeShare, began: float) -> None:
        self._share = share
        super().__init__(share.directory, group=share.peers.group)
        self.verify_s = time.perf_counter() - began

    @property
    def fetched(self) -> int:
        """Bytes that all nodes have fetched from each other so far."""
        return self._share.fetched

    @override
    def _locate(self, path: str | os.PathLike[str]) -> AnyPath:
        return self._share.directory

    @override
    def _verify(self) -> None:
        self.manifest = self._share.manifest  # compared when it was opened

    @override
    def fetch_files(
        self, chunks: Mapping[str, Chunk] | None, stored: Mapping[str, str] | None = None
    ) -> None:
        nodes = self._share.nodes
        if chunks is None:
            needs = [set(self.manifest.files)] * self.peers.size
        else:
            names = stored or {name: name for name in chunks}
            needs = self.peers.run(
                self.what,
                lambda: files_of(self.directory, self.manifest, chunks, names),
                lambda parts: parts,
            )
        wanted: list[set[str]] = [set() for _ in range(nodes.count)]
        for rank, files in enumerate(needs):
            wanted[nodes.of_rank[rank]] |= files
        self._share.fetch_files(wanted)
