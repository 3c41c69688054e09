"""An open checkpoint.

Opening verifies it, the cheapest check first, and nothing is parsed before its hash was compared:
the manifest against its own hash; names and sizes of the files; their contents; and whether the
chunks tile the tensors. The ranks share the last two.
"""

import difflib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.commit import locate
from lightning_megatron.checkpoint.directory.coverage import raise_if_damaged, tensor_faults
from lightning_megatron.checkpoint.directory.manifest import TensorEntry, read_manifest
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.checkpoint.directory.verify import check_contents, check_files
from lightning_megatron.checkpoint.load.dcp_reader import read_chunks
from lightning_megatron.checkpoint.trainer_state.plain_pickle import tell_left_out
from lightning_megatron.checkpoint.trainer_state.state_files import read_state_files
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError

MODEL_PREFIX = "model"
"""Prefix of the names of parameters and buffers in the shards."""

PRETRAINED = "pretrained"
"""Key in the state of checkpoints that were made of another library's weights."""


class CheckpointReader:
    """An open, verified checkpoint; opening is collective.

    Args:
        path: the directory; the first rank's value is used.
        group: the ranks that read; all when None.
        alone: read in this process only, even if there are process groups.
        weights_only: whether objects of classes that are not registered with
            ``torch.serialization.add_safe_globals`` are left out. False runs code of whoever wrote
            the checkpoint.

    Attributes:
        peers: the ranks that read.
        directory: path of the checkpoint.
        manifest: its manifest, the index of its files and tensors.
        state: Lightning's state.
        extras: module state that is not a parameter or buffer, by name.
        optimizers: the result of `merge_snapshots` for each optimizer.
        versions: versions of the modules, by name, where not 1; None in older checkpoints.
        verify_s: seconds that opening took.

    Raises:
        DamagedCheckpointError: the checkpoint is not what was written.
        CheckpointError: the checkpoint does not exist or cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        alone: bool = False,
        weights_only: bool = True,
    ) -> None:
        began = time.perf_counter()
        self.peers = Peers(group, alone=alone)
        self.weights_only = weights_only
        self.directory = self._locate(path)
        self.what = f"loading {self.directory}"
        self._verify()
        self.peers.run(self.what, self._read, _refuse)
        self.verify_s = time.perf_counter() - began

    def _locate(self, path: str | os.PathLike[str]) -> AnyPath:
        # One rank looks where it is: the others could meet a directory in the midst of a rename.
        return self.peers.run(
            f"loading {os.fspath(path)}",
            lambda: None,
            lambda _: locate(storage_path(path)),
        )

    def _verify(self) -> None:
        """Read the manifest, and compare the files with it."""
        self.peers.run(self.what, self._open, lambda _: check_files(self.directory, self.manifest))
        check_contents(self.what, self.directory, self.manifest, self.peers)

    def _open(self) -> None:
        if self.directory.is_file():
            raise CheckpointError(
                f"{self.directory}: this is a file, not a directory; nearest valid: "
                "lightning_megatron.checkpoint.load.file_reader.open_checkpoint, which takes both"
            )
        self.manifest = read_manifest(self.directory)

    def _read(self) -> list[str]:
        """Read what every rank needs; return the faults of this rank's share of the tensors."""
        content, left_out = read_state_files(
            self.directory, self.manifest, weights_only=self.weights_only
        )
        if self.peers.is_first:
            tell_left_out(str(self.directory), left_out)
        self.state: dict[str, Any] = content["state"]
        self.extras: dict[str, Any] = content["extras"]
        self.optimizers: list[dict[str, Any]] = content["optimizers"]
        self.versions: dict[str, int | str] | None = content.get("versions")
        return tensor_faults(self.manifest.tensors, self.peers.rank, self.peers.size)

    @property
    def is_pretrained(self) -> bool:
        """Whether the checkpoint holds weights to start from, and not the state of a run."""
        return PRETRAINED in self.state

    def entry(self, stored: str) -> TensorEntry | None:
        """Return shape, dtype and chunks of a stored tensor; None if there is none."""
        return self.manifest.tensors.get(stored)

    def model_names(self) -> list[str]:
        """Return the names of the stored parameters and buffers."""
        prefix = f"{MODEL_PREFIX}."
        names = self.manifest.tensors
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def stored_name(self, name: str, aliases: Sequence[str] = ()) -> str | None:
        """Return the name under which a parameter is stored; None if it is not."""
        for candidate in (name, *aliases):
            canonical = self.manifest.aliases.get(candidate, candidate)
            if self.entry(f"{MODEL_PREFIX}.{canonical}") is not None:
                return canonical
        return None

    def fetch_files(
        self, chunks: Mapping[str, Chunk] | None, stored: Mapping[str, str] | None = None
    ) -> None:
        """Fetch the files that this rank needs to `read` some chunks; collective.

        All ranks see all files here, so there is nothing to do; see `LocalReader`.

        Args:
            chunks: the chunks of this rank; None for everything that is stored.
            stored: as for `read`.
        """

    def tensor(
        self,
        name: str,
        index: int | slice | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Read one parameter or buffer, or a part of it along dimension 0; not collective.

        Args:
            name: name in the module; an alias of a shared parameter will do.
            index: index along dimension 0, which is then left out, or a slice with step 1; all of
                it when None.
            device: device of the tensor.

        Raises:
            ConfigError: the checkpoint has no such tensor, or the tensor no such index.
            DamagedCheckpointError: a file does not hold what the manifest says.
        """
        stored = self.stored_name(name)
        if stored is None:
            close = difflib.get_close_matches(name, self.model_names(), n=1, cutoff=0.0)
            nearest = f"; nearest valid: {close[0]!r}" if close else ""
            raise ConfigError(f"name={name!r}: {self.directory} has no such tensor{nearest}")
        entry = self.manifest.tensors[f"{MODEL_PREFIX}.{stored}"]
        rows = _rows(name, entry.shape, index)
        sizes = (len(rows), *entry.shape[1:]) if entry.shape else ()
        part = torch.empty(sizes, dtype=entry.torch_dtype, device=device)
        offsets = (rows.start, *[0] * (len(sizes) - 1)) if sizes else ()
        chunk = Chunk(tensor=part, full_shape=entry.shape, offsets=offsets)
        self.read({f"{MODEL_PREFIX}.{stored}": chunk})
        return part[0] if isinstance(index, int) else part

    def read(self, chunks: Mapping[str, Chunk], stored: Mapping[str, str] | None = None) -> None:
        """Fill chunks in place; not collective.

        Args:
            chunks: the chunks to fill; each must be within the stored tensor.
            stored: the stored name of every chunk, with ``model.`` or ``optimizer.<i>.``; its own
                name when None.
        """
        names = stored or {name: name for name in chunks}
        read_chunks(self.directory, self.manifest, chunks, names)


def _rows(name: str, shape: tuple[int, ...], index: int | slice | None) -> range:
    """Return the indices of dimension 0 that are meant."""
    length = shape[0] if shape else 1
    if index is None:
        return range(length)
    given = f"index={index!r}, {name!r} of shape {shape}"
    if not shape:
        raise ConfigError(f"{given}: a scalar has no dimension; nearest valid: index=None")
    if isinstance(index, slice):
        if (rows := range(length)[index]).step != 1:
            raise ConfigError(f"{given}: only steps of 1 are read; nearest valid: a step of 1")
        return rows
    if not -length <= index < length:
        nearest = f"index={length - 1 if index > 0 else -length}" if length else "index=None"
        raise ConfigError(f"{given}: must lie in [-{length}, {length}); nearest valid: {nearest}")
    return range(index % length, index % length + 1)


def _refuse(found: Sequence[Sequence[str]]) -> None:
    raise_if_damaged([fault for faults in found for fault in faults])
