"""A save in two halves: the plan, made at once, and the writing, which can wait.

`SavePlanning` captures everything but the tensors: the path, Lightning's state as JSON, and the
assignment of rectangles to ranks. It is quick, and raises the user's mistakes. `PlannedSave.write`
writes tensors and state into a hidden sibling directory and commits by a rename (commit.py). It may
run later, on another thread and another group, with copies of the tensors. The order is

1. the first rank makes the directory;
2. every rank writes its tensors (dcp_writer.py) and then its part of the manifest (manifest.py);
3. the first rank writes the state, the export for torch.distributed.checkpoint where that is small
   enough (dcp_metadata.py) and, last, the manifest with all sizes and hashes, and renames.

The other ranks send the first one the names, sizes and hashes of their files.

If any rank fails in any step, all ranks raise the same error, the temporary directory is removed
and the target is unchanged.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from lightning_megatron.checkpoint.chunks import Chunk, chunks_of
from lightning_megatron.checkpoint.directory.commit import Staging, staging_for
from lightning_megatron.checkpoint.directory.dcp_metadata import MOST_CHUNKS, pickled_metadata
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry, encoded, entry_of
from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Manifest,
    Part,
    library_versions,
    part_file,
    part_text,
)
from lightning_megatron.checkpoint.directory.remote_commit import RemoteStaging
from lightning_megatron.checkpoint.directory.storage import AnyPath, sizes, storage_path
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot
from lightning_megatron.checkpoint.save.dcp_writer import (
    WritePlan,
    Written,
    offer,
    part_of,
    write_shards,
)
from lightning_megatron.checkpoint.save.write_assignment import plan_writes
from lightning_megatron.checkpoint.save.write_error import check_room, write_error
from lightning_megatron.checkpoint.trainer_state.state_files import (
    RankState,
    StateFiles,
    join_states,
    rank_state,
)
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, summary

logger = logging.getLogger(__name__)

OPTIMIZER_PREFIX = "optimizer"

ShardWriting = Callable[[AnyPath, WritePlan, Callable[[], bool]], Written | None]
"""`write_shards` for given tensors; takes directory, plan and a function that says to stop."""


def writing(chunks: Mapping[str, Chunk]) -> ShardWriting:
    """Return the function that writes these tensors."""
    return lambda directory, plan, stop: write_shards(directory, plan, chunks, stop)


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """Report of a rank about its part, for the first rank."""

    name: str | None
    """Name of the file of the part; None for a rank that has nothing to write."""
    files: Mapping[str, FileEntry]
    """Files of the rank, that of the part included."""
    linked: frozenset[str]
    """Names of the files that are links to earlier ones."""
    part: Part | None
    """The part itself, if it is needed for ``.metadata``."""
    content: bytes | None = None
    """Content of the file of the part until it is written."""

    def write(self, staging: Staging | RemoteStaging) -> "PartReport":
        """Write the part of the rank.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if self.name is not None and self.content is not None:
            try:
                staging.write(self.name, self.content)
            except OSError as error:
                raise write_error(error, staging.directory, len(self.content)) from error
        return replace(self, content=None)


def report_part(prefix: str, plan: WritePlan, written: Written) -> PartReport:
    """Return the report of a rank after its shards were written.

    Args:
        prefix: prefix of the names of files.
        plan: the plan that was carried out.
        written: the result.

    Raises:
        CheckpointError: the part would be too large to be read.
    """
    part = part_of(plan, written)
    files, name, content = dict(written.files), None, None
    if part:
        name = prefix + part_file(plan.number)
        content = encoded(name, part_text(part))
        files[name] = entry_of(content)
    return PartReport(
        name=name,
        files=files,
        linked=written.linked,
        part=part if plan.count <= MOST_CHUNKS else None,
        content=content,
    )


@dataclass(frozen=True, kw_only=True)
class PlannedSave:
    """A checkpoint without its tensors."""

    target: AnyPath
    """The directory to make."""
    token: str
    """Name of this attempt, different from that of any other."""
    plan: WritePlan
    """Assignment of rectangles to ranks."""
    state_files: StateFiles | None
    """Files other than shards; on the first rank."""
    unchanged: bool
    """Whether the tensors of all ranks are those of the save before."""
    summary: Manifest
    """The manifest as far as it is known before writing."""

    def write(
        self,
        shards: ShardWriting,
        peers: Peers,
        stop: Callable[[], bool] = lambda: False,
    ) -> Manifest | None:
        """Write and publish; collective.

        Args:
            shards: function that writes this rank's shards; if it raises, all ranks fail.
            peers: the ranks that planned the save, perhaps over another group.
            stop: function that is called now and then; True on any rank gives up.

        Returns:
            The manifest, on every rank; None when the save was given up.

        Raises:
            CheckpointError: the save failed on some rank; the target is unchanged.
        """
        what, staging = f"saving {self.target}", staging_for(self.target, self.token)
        published = False

        def create(_: list[None]) -> str:
            try:
                staging.create()
                check_room(staging.directory, self.plan.total)
                return staging.prefix
            except OSError as error:
                raise write_error(error, staging.directory, self.plan.total) from error

        def each() -> PartReport | None:
            written = shards(staging.directory, plan, stop)
            if written is None:
                return None
            report = report_part(prefix, plan, written)
            # The first rank writes its own with the other small files.
            return report if peers.is_first else report.write(staging)

        def finish(results: list[PartReport | None]) -> Manifest | None:
            reports = [report for report in results if report is not None]
            if len(reports) < len(results):
                return None
            try:
                return self.finish(staging, reports)
            except OSError as error:
                raise write_error(error, staging.directory, self.plan.size) from error

        try:
            prefix = peers.run(what, lambda: None, create)
            plan = self.plan.under(prefix)
            manifest = peers.run(what, each, finish)
            published = manifest is not None
            return manifest
        finally:
            if peers.is_first and not published:
                staging.discard()

    def finish(self, staging: Staging | RemoteStaging, reports: Sequence[PartReport]) -> Manifest:
        """Write state, export and manifest, and publish; on the first rank."""
        manifest, small = self.assemble(reports, staging.prefix)
        staging.write_all(small)
        visible = sizes(staging.directory)
        lost = {n for n, entry in manifest.files.items() if visible.get(n) != entry.size}
        if lost:
            raise CheckpointError(
                "files written by other ranks are not visible to the first: "
                f"{summary(sorted(lost))}; checkpoints need a directory that all ranks share"
            )
        staging.write(MANIFEST_FILE, encoded(MANIFEST_FILE, manifest.to_json()))
        staging.publish()
        return manifest

    def assemble(
        self, reports: Sequence[PartReport], prefix: str = ""
    ) -> tuple[Manifest, dict[str, bytes]]:
        """Return the manifest and the content of files still to write; on the first rank.

        Args:
            reports: reports of all ranks.
            prefix: prefix of the names of files.
        """
        assert self.state_files is not None
        assert self.plan.tensors is not None
        contents = self.state_files.files()
        parts = [report.part for report in reports if report.part is not None]
        if len(parts) == len(reports):
            contents = {METADATA_FILE: pickled_metadata(self.plan.tensors, parts), **contents}
        else:
            logger.info(
                "%s has %d chunks: %s, which torch.distributed.checkpoint reads, is left out; "
                "`lightning-megatron ckpt index` makes it",
                *(self.target, self.plan.count, METADATA_FILE),
            )
        named = {prefix + role: content for role, content in contents.items()}
        files = {name: entry_of(content) for name, content in named.items()}
        for report in reports:
            files |= report.files
            if report.name is not None and report.content is not None:
                named[report.name] = report.content
        manifest = replace(
            self.summary,
            written=time.time(),
            versions=library_versions(),
            files=files,
            linked=sorted(name for report in reports for name in report.linked),
            tensors=self.plan.tensors,
            aliases=dict(self.state_files.aliases),
        )
        return manifest, named


class SavePlanning:
    """Makes `PlannedSave` objects; the write plan is kept while chunks stay the same.

    Args:
        peers: the ranks that save.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._offered: SavePlan | None = None
        self._plan: WritePlan | None = None

    def plan(
        self,
        path: str | os.PathLike[str],
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        optimizers: Sequence[OptimizerSnapshot] = (),
        layout: Mapping[str, int] | None = None,
        *,
        unchanged: bool = False,
    ) -> PlannedSave:
        """Capture everything but the tensors; collective.

        Arguments and errors are those of `save_directory`; ``unchanged`` says whether this rank's
        tensors are those of the save before.
        """
        joined: list[StateFiles] = []  # on the first rank
        offered = offer(all_chunks(model, optimizers))

        def each() -> tuple[AnyPath, RankState, bool, bool]:
            known = self._plan is not None and offered == self._offered
            return storage_path(path), rank_state(model, optimizers), known, unchanged

        def first(
            parts: list[tuple[AnyPath, RankState, bool, bool]],
        ) -> tuple[AnyPath, str, bool, bool]:
            paths, states, known, same = zip(*parts, strict=True)
            joined.append(join_states(state, states))
            return paths[0], Staging.new_token(), all(known), all(known) and all(same)

        target, token, known, same = self._peers.run(f"saving {os.fspath(path)}", each, first)
        if not known:
            self._plan = None
            self._plan = plan_writes(f"saving {target}", offered, self._peers)
            self._offered = offered
        assert self._plan is not None
        return PlannedSave(
            target=target,
            token=token,
            plan=self._plan,
            state_files=joined[0] if joined else None,
            unchanged=same,
            summary=Manifest(
                step=_integer(state.get("global_step")),
                epoch=_integer(state.get("epoch")),
                taken=time.time(),
                layout=dict(layout or {}),
                optimizers=len(optimizers),
            ),
        )


def all_chunks(
    model: Mapping[str, Any], optimizers: Sequence[OptimizerSnapshot]
) -> dict[str, Chunk]:
    """Return all tensors of this rank, by their names in the checkpoint."""
    found = {f"{MODEL_PREFIX}.{name}": chunk for name, chunk in chunks_of(model).items()}
    for index, snapshot in enumerate(optimizers):
        prefix = f"{OPTIMIZER_PREFIX}.{index}"
        found |= {f"{prefix}.{name}": chunk for name, chunk in snapshot.tensors.items()}
    return found


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None
