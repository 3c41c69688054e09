"""`LocalSave`: the writing of a local checkpoint.

The plan is that of any checkpoint (save_plan.py). In the background all ranks then carry out these
steps together:

1. one rank of each node makes a hidden directory there, if there is room;
2. every rank writes its shards into the directory of its node;
3. the first rank makes the small files (state, export, manifest), for all nodes;
4. every rank sends its files to the ranks that keep copies (nodes.py), and receives others' files;
5. each node writes the small files beside them, the manifest last, and renames the directory;
6. when all nodes have done so, each deletes its oldest checkpoint if there are too many.

A crash before step 5 leaves nothing that looks like a checkpoint. A crash in step 5 leaves a
checkpoint on some nodes, which may be enough to load it. Before step 6 no older one is touched.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.directory.commit import Staging
from lightning_megatron.checkpoint.directory.hashed_files import encoded
from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE, Manifest
from lightning_megatron.checkpoint.local.directory import check_room
from lightning_megatron.checkpoint.local.nodes import Nodes
from lightning_megatron.checkpoint.local.transfer import Transfer, exchange
from lightning_megatron.checkpoint.save.dcp_writer import WritePlan
from lightning_megatron.checkpoint.save.save_plan import (
    PartReport,
    PlannedSave,
    ShardWriting,
    report_part,
)
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, summary


@dataclass(frozen=True)
class _Small:
    """Small files of the first rank, for all nodes."""

    manifest: Manifest
    writers: Mapping[str, int]
    """Rank that wrote each of the other files."""
    contents: Mapping[str, bytes]
    """Content of the small files, the manifest last."""


class LocalSave:
    """A local checkpoint without its tensors; a `saver.Save`.

    Args:
        planned: the plan, as for a shared checkpoint.
        directory: function that returns the directory of the run on this node, with room for some
            bytes.
        nodes: the nodes of the ranks.
        replicas: number of other nodes that keep copies.
        commit: function that is called on every rank when all nodes have the checkpoint.
    """

    def __init__(
        self,
        planned: PlannedSave,
        directory: Callable[[int], Path],
        nodes: Nodes,
        replicas: int,
        commit: Callable[[], None],
    ) -> None:
        self._planned = planned
        self._directory = directory
        self._nodes = nodes
        self._replicas = replicas
        self._commit = commit
        self.target = Path(os.fspath(planned.target))

    @property
    def plan(self) -> WritePlan:
        """Assignment of rectangles to ranks."""
        return self._planned.plan

    @property
    def unchanged(self) -> bool:
        """Whether the tensors of all ranks are those of the save before."""
        return self._planned.unchanged

    def write(
        self, shards: ShardWriting, peers: Peers, stop: Callable[[], bool] = lambda: False
    ) -> Manifest | None:
        """Write, copy and publish; collective. Arguments are those of `PlannedSave.write`.

        Raises:
            CheckpointError: the save failed on some rank; older checkpoints are unchanged.
        """
        name = self.target.name
        what = f"saving the local checkpoint {name}"
        loads = peers.run(what, lambda: self.plan.size, lambda sizes: sizes)
        needed = self._needed(loads, peers.rank)
        leads = self._nodes.is_leader(peers.rank)
        made: list[Staging] = []  # on the rank that leads its node
        published = False

        def create() -> str | None:
            if not leads:
                return None
            staging = Staging(self._directory(needed) / name, self._planned.token)
            made.append(staging)
            try:
                staging.create()
                check_room(staging.target.parent, needed)
            except OSError as error:
                raise write_error(error, staging.directory, needed) from error
            return str(staging.target)

        def publish() -> None:
            for staging in made:
                staging.publish()

        try:
            targets = peers.run(what, create, lambda paths: paths)
            mine = targets[self._nodes.ranks(self._nodes.of_rank[peers.rank])[0]]
            assert mine is not None
            self.target = Path(mine)
            staging = Staging(self.target, self._planned.token)

            def part() -> PartReport | None:
                written = shards(staging.directory, self.plan, stop)
                if written is None:
                    return None
                return report_part("", self.plan, written).write(staging)

            small = peers.run(what, part, self._assemble)
            if small is None:
                return None
            peers.run(
                what, lambda: self._copy(staging.directory, small, peers, made), lambda _: None
            )
            peers.run(what, publish, lambda _: None)
            published = True
        finally:
            if not published:
                for staging in made:
                    staging.discard()
        peers.run(what, self._commit, lambda _: None)
        return small.manifest

    def _needed(self, loads: Sequence[int], rank: int) -> int:
        """Return the bytes that the node of a rank will hold."""
        node = self._nodes.of_rank[rank]
        total = 0
        for writer, load in enumerate(loads):
            holders = [writer, *self._nodes.keepers(writer, self._replicas)]
            total += load * sum(self._nodes.of_rank[holder] == node for holder in holders)
        return total

    def _assemble(self, results: list[PartReport | None]) -> _Small | None:
        reports = [report for report in results if report is not None]
        if len(reports) < len(results):
            return None
        manifest, contents = self._planned.assemble(reports)
        contents[MANIFEST_FILE] = encoded(MANIFEST_FILE, manifest.to_json())
        writers = {name: rank for rank, report in enumerate(reports) for name in report.files}
        return _Small(manifest, writers, contents)

    def _copy(self, directory: Path, small: _Small, peers: Peers, made: Sequence[Staging]) -> None:
        """Exchange the copies, and write the small files into the directory of this node."""
        transfers = [
            Transfer(name=name, source=rank, target=keeper)
            for name, rank in small.writers.items()
            for keeper in self._nodes.keepers(rank, self._replicas)
        ]
        faults = exchange(transfers, small.manifest.files, directory, peers)
        if faults:
            raise CheckpointError(f"copies for other nodes: {summary(faults)}")
        for staging in made:
            try:
                for name, content in small.contents.items():
                    staging.write(name, content)
            except OSError as error:
                needed = sum(map(len, small.contents.values()))
                raise write_error(error, directory, needed) from error
