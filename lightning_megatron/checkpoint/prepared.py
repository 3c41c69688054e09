"""A save in two halves: what must happen at once, and what can wait.

`Preparation` captures everything but the tensors: the path, Lightning's state as JSON, who writes
which rectangle. It is quick, and raises what the user did wrong. `PreparedSave.write` puts the
tensors and all of it into a hidden sibling directory and commits by rename (see commit.py); it may
run later, on another thread and another group, with copies of the tensors. The order is

1. the first rank makes the directory;
2. every rank writes its tensors (shards.py);
3. the first rank writes the index, the state and, last, the manifest with all sizes, and renames.

If any rank fails in any step, all raise the same error, the temporary directory is removed and the
target is what it was.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from lightning_megatron.checkpoint.commit import Staging, staging_for
from lightning_megatron.checkpoint.digest import entry_of
from lightning_megatron.checkpoint.document import Contribution, Document, compose, contribution
from lightning_megatron.checkpoint.index import summary, tensor_entries
from lightning_megatron.checkpoint.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Manifest,
    library_versions,
)
from lightning_megatron.checkpoint.optimizer import OptimizerSnapshot
from lightning_megatron.checkpoint.peers import Peers
from lightning_megatron.checkpoint.reader import MODEL_PREFIX
from lightning_megatron.checkpoint.remote_commit import RemoteStaging
from lightning_megatron.checkpoint.shards import (
    WritePlan,
    Written,
    make_index,
    offer,
    plan_writes,
    write_shards,
)
from lightning_megatron.checkpoint.state import Chunk, chunks_of
from lightning_megatron.checkpoint.storage import AnyPath, sizes, storage_path
from lightning_megatron.checkpoint.write_error import check_room, write_error
from lightning_megatron.errors import CheckpointError

OPTIMIZER_PREFIX = "optimizer"

ShardWriting = Callable[[AnyPath, WritePlan, Callable[[], bool]], Written | None]
"""`write_shards` for given tensors: directory, plan and whether to stop."""


def writing(chunks: Mapping[str, Chunk]) -> ShardWriting:
    """Have these tensors written by the thread that saves."""
    return lambda directory, plan, stop: write_shards(directory, plan, chunks, stop)


@dataclass(frozen=True, kw_only=True)
class PreparedSave:
    """A checkpoint of which only the tensors are missing."""

    target: AnyPath
    """The directory to make."""
    token: str
    """Distinguishes this attempt from others."""
    plan: WritePlan
    """Who writes which rectangle."""
    document: Document | None
    """Everything that is not a shard; on the first rank."""
    unchanged: bool
    """Whether all ranks said that their tensors are those of the save before."""
    summary: Manifest
    """The manifest, as far as it is known before anything is written."""

    def write(
        self,
        shards: ShardWriting,
        peers: Peers,
        stop: Callable[[], bool] = lambda: False,
    ) -> Manifest | None:
        """Write and publish; collective.

        Args:
            shards: writes this rank's part; if it raises, the save fails on all ranks.
            peers: the ranks that prepared it, perhaps over another group.
            stop: asked now and then whether to give up; one rank is enough.

        Returns:
            The manifest, on every rank; None when it was given up.

        Raises:
            CheckpointError: it failed on any rank; the target is what it was before.
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

        def finish(results: list[Written | None]) -> Manifest | None:
            written = [part for part in results if part is not None]
            if len(written) < len(results):
                return None
            try:
                return self.finish(staging, written)
            except OSError as error:
                raise write_error(error, staging.directory, self.plan.size) from error

        try:
            prefix = peers.run(what, lambda: None, create)
            plan = self.plan.under(prefix)
            manifest = peers.run(what, lambda: shards(staging.directory, plan, stop), finish)
            published = manifest is not None
            return manifest
        finally:
            if peers.is_first and not published:
                staging.discard()

    def finish(self, staging: Staging | RemoteStaging, written: Sequence[Written]) -> Manifest:
        """Write index, state and manifest, and publish; on the first rank."""
        manifest, small = self.assemble(written, staging.prefix)
        for name, content in small.items():
            staging.write(name, content)
        visible = sizes(staging.directory)
        lost = {n for n, entry in manifest.files.items() if visible.get(n) != entry.size}
        if lost:
            raise CheckpointError(
                "files written by other ranks are not visible to the first: "
                f"{summary(sorted(lost))}; checkpoints need a directory that all ranks share"
            )
        staging.write(MANIFEST_FILE, manifest.to_json().encode())
        staging.publish()
        return manifest

    def assemble(
        self, written: Sequence[Written], prefix: str = ""
    ) -> tuple[Manifest, dict[str, bytes]]:
        """Return the manifest, and the small files beside it by name; on the first rank.

        Args:
            written: what each rank wrote.
            prefix: of the names of files.
        """
        assert self.document is not None
        metadata, index = make_index(self.plan, written)
        roles = {METADATA_FILE: index, **self.document.files()}
        small = {prefix + role: content for role, content in roles.items()}
        files = {name: entry_of(content) for name, content in small.items()}
        for part in written:
            files |= part.files
        manifest = replace(
            self.summary,
            written=time.time(),
            versions=library_versions(),
            files=files,
            linked=sorted(name for part in written for name in part.linked),
            tensors=tensor_entries(metadata),
            aliases=dict(self.document.aliases),
        )
        return manifest, small


class Preparation:
    """Makes `PreparedSave` objects, and remembers the plan from one to the next.

    Args:
        peers: the ranks that save.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._offered: SavePlan | None = None
        self._plan: WritePlan | None = None

    def prepare(
        self,
        path: str | os.PathLike[str],
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        optimizers: Sequence[OptimizerSnapshot] = (),
        layout: Mapping[str, int] | None = None,
        *,
        unchanged: bool = False,
    ) -> PreparedSave:
        """Capture what is not a tensor; collective.

        Args and errors are those of `save_directory`, and ``unchanged``: whether this rank's
        tensors are those of the save before.
        """
        documents: list[Document] = []  # on the first rank
        offered = offer(all_chunks(model, optimizers))

        def each() -> tuple[AnyPath, Contribution, bool, bool]:
            known = self._plan is not None and offered == self._offered
            return storage_path(path), contribution(model, optimizers), known, unchanged

        def first(
            parts: list[tuple[AnyPath, Contribution, bool, bool]],
        ) -> tuple[AnyPath, str, bool, bool]:
            paths, contributions, known, same = zip(*parts, strict=True)
            documents.append(compose(state, contributions))
            return paths[0], Staging.new_token(), all(known), all(known) and all(same)

        target, token, known, same = self._peers.run(f"saving {os.fspath(path)}", each, first)
        if not known:
            self._plan = None
            self._plan = plan_writes(f"saving {target}", offered, self._peers)
            self._offered = offered
        assert self._plan is not None
        return PreparedSave(
            target=target,
            token=token,
            plan=self._plan,
            document=documents[0] if documents else None,
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
