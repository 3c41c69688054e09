"""An open checkpoint."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.commit import locate
from lightning_megatron.checkpoint.document import read_document
from lightning_megatron.checkpoint.index import check_metadata, read_metadata
from lightning_megatron.checkpoint.manifest import check_files, local_path, read_manifest
from lightning_megatron.checkpoint.peers import Peers
from lightning_megatron.checkpoint.shards import read_chunks
from lightning_megatron.checkpoint.state import Chunk

MODEL_PREFIX = "model"
"""Of the names of parameters and buffers in the shards."""


class CheckpointReader:
    """An open, verified checkpoint; opening is collective.

    Args:
        path: the directory; the first rank's value counts.
        group: the ranks that read; all when None.
        alone: read in this process only, even if there are process groups.

    Attributes:
        peers: the ranks that read.
        directory: where the checkpoint is.
        manifest: its manifest.
        metadata: the index of its shards.
        state: Lightning's state.
        extras: module state that is not a parameter or buffer, by name.
        optimizers: what `merge_snapshots` returned for each optimizer.

    Raises:
        CheckpointError: it does not exist, is incomplete or damaged, or would run code.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        alone: bool = False,
    ) -> None:
        self.peers = Peers(group, alone=alone)
        # One rank looks where it is: the others could meet a directory in the midst of a rename.
        self.directory = self.peers.run(
            f"loading {os.fspath(path)}",
            lambda: None,
            lambda _: locate(local_path(path)),
        )
        self.what = f"loading {self.directory}"
        self.peers.run(self.what, self._open, lambda _: self._verify())

    def _open(self) -> None:
        self.manifest = read_manifest(self.directory)
        if self.peers.is_first:
            check_files(self.directory, self.manifest)
        self.metadata: Metadata = read_metadata(self.directory)
        document = read_document(self.directory, self.manifest)
        self.state: dict[str, Any] = document["state"]
        self.extras: dict[str, Any] = document["extras"]
        self.optimizers: list[dict[str, Any]] = document["optimizers"]

    def _verify(self) -> None:
        check_metadata(self.metadata, self.manifest.files)

    def entry(self, stored: str) -> TensorStorageMetadata | None:
        """Return shape, dtype and chunks of a stored tensor."""
        entry = self.metadata.state_dict_metadata.get(stored)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def model_names(self) -> list[str]:
        """Return the names of the stored parameters and buffers."""
        prefix = f"{MODEL_PREFIX}."
        names = self.metadata.state_dict_metadata
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def stored_name(self, name: str, aliases: Sequence[str] = ()) -> str | None:
        """Return the name under which a parameter is stored, or None."""
        for candidate in (name, *aliases):
            canonical = self.manifest.aliases.get(candidate, candidate)
            if self.entry(f"{MODEL_PREFIX}.{canonical}") is not None:
                return canonical
        return None

    def read(self, chunks: Mapping[str, Chunk], stored: Mapping[str, str] | None = None) -> None:
        """Fill chunks in place; not collective.

        Args:
            chunks: what to fill; every one must lie within the stored tensor.
            stored: the stored name (with ``model.`` or ``optimizer.<i>.``) of every chunk; the
                chunk's own where None.
        """
        names = stored or {name: name for name in chunks}
        read_chunks(self.directory, self.metadata, chunks, names)
