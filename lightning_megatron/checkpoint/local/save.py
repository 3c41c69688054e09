"""Writing a local checkpoint.

What is written, and who writes which rectangle, is settled as for any checkpoint (save_plan.py).
Then, in the background, each step on all ranks and agreed:

1. one rank of each node makes a hidden directory there, if there is room;
2. every rank writes its shards into that of its node;
3. the first rank makes the small files (state, index, manifest) and the inventory, which all get;
4. every rank sends what it wrote to those that keep copies of it (nodes.py), and gets others';
5. each node puts manifest and inventory beside them and renames the directory;
6. when all nodes have, each deletes what is now one too many.

A crash before 5 leaves nothing that looks like a checkpoint, one in the midst of 5 a checkpoint
that some nodes have, which may be all that is needed, and before 6 nothing older is touched.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.directory.commit import Staging
from lightning_megatron.checkpoint.directory.index import summary
from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE, Manifest
from lightning_megatron.checkpoint.directory.rank_manifest import entry_of
from lightning_megatron.checkpoint.directory.sealed_text import encoded
from lightning_megatron.checkpoint.local.directory import check_room
from lightning_megatron.checkpoint.local.inventory import INVENTORY_FILE, Inventory
from lightning_megatron.checkpoint.local.nodes import Nodes
from lightning_megatron.checkpoint.local.transfer import Transfer, exchange
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.checkpoint.save.dcp_writer import WritePlan
from lightning_megatron.checkpoint.save.save_plan import (
    PartReport,
    PlannedSave,
    ShardWriting,
    report_part,
)
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.errors import CheckpointError

OWN_FILE = "node"
"""File that says, by its content, which of the writing nodes a directory is of."""


@dataclass(frozen=True)
class _Small:
    """What the first rank makes, and all get."""

    manifest: Manifest
    inventory: Inventory
    writers: Mapping[str, int]
    """Rank that wrote each of the other files."""
    contents: Mapping[str, bytes]
    """The small files."""


class LocalSave:
    """A local checkpoint of which only the tensors are missing; one of `save_job.Save`.

    Args:
        planned: the same as for a shared checkpoint.
        directory: where this rank's node is to have it; exists but for the last part.
        nodes: who shares a machine.
        replicas: how many other nodes keep copies.
        commit: called on every rank when all nodes have it.
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
        """Who writes which rectangle."""
        return self._planned.plan

    @property
    def unchanged(self) -> bool:
        """Whether all ranks said that their tensors are those of the save before."""
        return self._planned.unchanged

    def write(
        self, shards: ShardWriting, peers: Peers, stop: Callable[[], bool] = lambda: False
    ) -> Manifest | None:
        """Write, copy and publish; collective. As `PlannedSave.write`.

        Raises:
            CheckpointError: it failed on any rank; older ones are what they were.
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
        """Return the bytes that come to the node of a rank."""
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
        files = {**manifest.files, MANIFEST_FILE: entry_of(contents[MANIFEST_FILE])}
        writers = {name: rank for rank, report in enumerate(reports) for name in report.files}
        nodes = {name: self._nodes.of_rank[rank] for name, rank in writers.items()}
        assert manifest.step is not None
        assert manifest.taken is not None
        inventory = Inventory(step=manifest.step, taken=manifest.taken, files=files, nodes=nodes)
        return _Small(manifest, inventory, writers, contents)

    def _copy(self, directory: Path, small: _Small, peers: Peers, made: Sequence[Staging]) -> None:
        """Bring everything that belongs there to the directory of this node."""
        inventory = small.inventory
        transfers = [
            Transfer(name=name, source=rank, target=keeper)
            for name, rank in small.writers.items()
            for keeper in self._nodes.keepers(rank, self._replicas)
        ]
        faults = exchange(transfers, inventory.files, directory, peers)
        if faults:
            raise CheckpointError(f"copies for other nodes: {summary(faults)}")
        for staging in made:
            try:
                for name, content in small.contents.items():
                    if name != MANIFEST_FILE:
                        staging.write(name, content)
                node = self._nodes.of_rank[peers.rank]
                staging.write(OWN_FILE, str(node).encode())
                staging.write(INVENTORY_FILE, inventory.to_json().encode())
                staging.write(MANIFEST_FILE, small.contents[MANIFEST_FILE])
            except OSError as error:
                raise write_error(error, directory, inventory.size(inventory.everywhere)) from error
