"""What a checkpoint directory contains, and the JSON file that says so.

::

    epoch=0-step=500.ckpt/
        manifest.json       this file's `Manifest`; written last, so a directory without it is torn
        state.json          Lightning's state and optimizer options (codec.py)
        state.safetensors   tensors of that state; absent when it has none
        .metadata           index of the shards as torch.distributed.checkpoint reads it
        __0_0.distcp ...    shards: ``model.<name>``, ``optimizer.<i>.<name>.<key>``

The directory is flat. The manifest lists every other file with its size and the hash of its content
and every tensor with its chunks, and ends with the hash of itself, so that nothing that was
truncated, flipped, swapped or lost is taken for a weight, and no name can leave the directory. The
hashes tell damage, not forgery: who can write a checkpoint can write its hashes too, which is why
nothing in it is trusted with more than numbers.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.storage import AnyPath, storage_path
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    NoSuchCheckpointError,
)

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
STATE_TENSORS_FILE = "state.safetensors"
METADATA_FILE = ".metadata"

SCHEMA = 2
"""Raised when older readers can no longer read what is written, or must not trust it less.

Since 2 a manifest has hashes, tensors and its own seal. As no single flipped bit turns the digit 2
into a 1, a sealed manifest cannot be taken for one of the time before seals."""

_FILE_NAME = re.compile(r"(?!\.\.?$)[\w.=+-]{1,255}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEAL = re.compile(r',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_LENGTH = len(',\n "sha256": ""\n}\n') + 64
_LIBRARIES = ("torch", "lightning", "lightning-megatron")

_LATEST = 1e11
"""Seconds since 1970 that are still a date."""

LARGEST_TEXT = 1 << 30
"""Bytes of a JSON file or index that is read as a whole: a sparse file of any size costs nothing to
make, and must not cost our memory."""

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the checkpoint."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """Hash of the content; None in manifests of schema 1."""


@dataclass(frozen=True, kw_only=True)
class ChunkEntry:
    """A rectangle of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    """Index of its first element, per dimension."""
    sizes: tuple[int, ...]
    """Elements, per dimension."""
    file: str
    begin: int
    """First byte in the file."""
    length: int
    """Bytes in the file."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the whole model or of an optimizer."""

    dtype: str
    """Like ``bfloat16``."""
    shape: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]
    """They tile the tensor."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Summary of a checkpoint."""

    schema: int = SCHEMA
    """Version of the format."""
    step: int | None = None
    """Optimizer steps taken."""
    epoch: int | None = None
    """Epoch of the training loop."""
    written: float | None = None
    """When, in seconds since 1970."""
    taken: float | None = None
    """When the state was as it is in the checkpoint, in seconds since 1970; None in older ones."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Degrees under which it was written; for information, any other can read it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every other file of the directory."""
    linked: Sequence[str] = field(default_factory=list)
    """Files that were not written but shared with an earlier checkpoint (incremental.py)."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Every tensor in the shards; empty in schema 1."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of shared parameters, and the name under which each is stored."""
    optimizers: int = 0
    """Number of optimizers whose state is stored."""

    @property
    def size(self) -> int:
        """Bytes of all files that it lists."""
        return sum(entry.size for entry in self.files.values())

    @property
    def own_size(self) -> int:
        """Bytes that were written for it; the rest was there."""
        return self.size - sum(self.files[name].size for name in self.linked)

    def file(self, role: str) -> str:
        """Return the name of the file that is ``role`` in this checkpoint.

        That is ``role`` itself, or ``<token>=<role>`` where it replaced another checkpoint in a
        store (remote_commit.py).
        """
        return next((name for name in self.files if name.rpartition("=")[2] == role), role)

    @property
    def is_sealed(self) -> bool:
        """Whether it has hashes and tensors, and was checked against its own hash."""
        return self.schema > 1

    def to_json(self) -> str:
        """Return the content of ``manifest.json``."""
        head = {k: v for k, v in vars(self).items() if k not in ("files", "tensors")}
        parts = [json.dumps(head, indent=1, sort_keys=True)[: -len("\n}")]]
        files = {name: asdict(entry) for name, entry in self.files.items()}
        parts.append(_one_line_each("files", files))
        if not self.is_sealed:
            return ",\n".join(parts) + "\n}\n"
        parts.append(_one_line_each("tensors", {n: _plain(t) for n, t in self.tensors.items()}))
        body = ",\n".join(parts)
        return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the content of ``manifest.json``; fields of later versions are ignored.

        Raises:
            DamagedCheckpointError: it is not a manifest, or not what was written.
            CheckpointError: it has a newer schema.
        """
        newer = _newer(text)
        try:
            sealed = _is_sealed(text)
        except DamagedCheckpointError as error:
            if newer is None:
                raise
            raise DamagedCheckpointError(f"{newer}, unless it is damaged: {error}") from None
        if newer is not None:
            raise CheckpointError(newer)
        try:
            data = json.loads(text, object_pairs_hook=_without_repetition)
            schema = data["schema"]
            if type(schema) is not int or schema < 1:
                raise ValueError(f"schema {schema!r}")
            if schema > 1 and not sealed:
                raise ValueError("it does not end with its own hash")
            if schema == 1 and (sealed or '"sha256": "' in text):
                raise ValueError("it has hashes but not their schema")
            known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
            known["files"] = {n: _file_entry(n, e, schema) for n, e in data["files"].items()}
            tensors = data["tensors"] if schema > 1 else {}
            known["tensors"] = {n: _tensor_entry(e) for n, e in tensors.items()}
            manifest = cls(**known)
            _check_mappings(manifest)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(f"{MANIFEST_FILE} is not a manifest: {error!r}") from None
        return manifest


def _newer(text: str) -> str | None:
    """Say that a manifest has a format of the future, if it has."""
    try:
        data = json.loads(text)
        schema, versions = data["schema"], data.get("versions")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None  # whatever it is, it is no manifest
    if type(schema) is not int or schema <= SCHEMA:
        return None
    names = versions if isinstance(versions, dict) else {}
    writer, ours = names.get("lightning-megatron"), _version("lightning-megatron")
    by = "a later lightning-megatron" if writer is None else f"lightning-megatron {writer}"
    return (
        f"{by} wrote it in format {schema}, and lightning-megatron {ours}, which is installed, "
        f"reads formats up to {SCHEMA}: upgrade lightning-megatron"
    )


def _one_line_each(name: str, entries: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(v)}" for key, v in entries.items())
    return f' "{name}": {{\n{lines}\n }}'


def _plain(entry: TensorEntry) -> dict[str, Any]:
    chunks = [[*map(list, (c.offsets, c.sizes)), c.file, c.begin, c.length] for c in entry.chunks]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": chunks}


def _is_sealed(text: str) -> bool:
    """Whether the text ends with its own hash.

    Raises:
        DamagedCheckpointError: it ends with another one.
    """
    body, seal = text[:-_SEAL_LENGTH], _SEAL.fullmatch(text[-_SEAL_LENGTH:])
    if seal is None:
        return False
    found = hashlib.sha256(body.encode()).hexdigest()
    if found != seal[1]:
        raise DamagedCheckpointError(
            f"{MANIFEST_FILE}: the content has SHA-256 {found}, but {seal[1]} was written"
        )
    return True


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands there twice")
    return result


def _file_entry(name: str, data: Mapping[str, Any], schema: int) -> FileEntry:
    size, sha256 = data["size"], data.get("sha256")
    if not is_file_name(name) or name == MANIFEST_FILE or not _is_count(size):
        raise ValueError(f"entry {name!r}: {data!r}")
    if schema > 1 and _SHA256.fullmatch(str(sha256)) is None:
        raise ValueError(f"entry {name!r}: {data!r}")
    return FileEntry(size=size, sha256=sha256)


def _tensor_entry(data: Mapping[str, Any]) -> TensorEntry:
    chunks = [
        ChunkEntry(
            offsets=_counts(offsets), sizes=_counts(sizes), file=file, begin=begin, length=length
        )
        for offsets, sizes, file, begin, length in data["chunks"]
    ]
    if not all(
        isinstance(c.file, str) and _is_count(c.begin) and _is_count(c.length) for c in chunks
    ):
        raise ValueError("a chunk without a place")
    if not isinstance(data["dtype"], str):
        raise TypeError("a dtype is not a string")
    return TensorEntry(dtype=data["dtype"], shape=_counts(data["shape"]), chunks=tuple(chunks))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(map(_is_count, values)):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(values)


def _check_mappings(manifest: Manifest) -> None:
    names = (*manifest.aliases.items(), *manifest.versions.items())
    if not all(isinstance(part, str) for pair in names for part in pair):
        raise TypeError("a name is not a string")
    if not isinstance(manifest.linked, list) or not manifest.files.keys() >= set(manifest.linked):
        raise TypeError("a link to no file")
    if not isinstance(manifest.layout, dict) or not _is_count(manifest.optimizers):
        raise TypeError("a field has another type")
    for number in (manifest.step, manifest.epoch):
        if number is not None and not _is_count(number):
            raise TypeError(f"{number!r} is not a count")
    for moment in (manifest.written, manifest.taken):
        if moment is not None and not (type(moment) is float and 0 <= moment < _LATEST):
            raise TypeError(f"{moment!r} is not a time")


def is_file_name(name: str) -> bool:
    """Whether ``name`` can be a file of a checkpoint: a plain name without directories."""
    return _FILE_NAME.fullmatch(name) is not None


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a checkpoint depends on."""
    return {name: _version(name) for name in _LIBRARIES}


@cache  # it reads and parses files: 5 ms each, in every save
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as an absolute path of this machine's file system.

    Raises:
        ConfigError: it is the URL of a remote file system.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(
            f"path {text!r}: this is written to a file of this machine; nearest valid: a path "
            "without a scheme"
        )
    return Path(os.path.abspath(text))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a complete checkpoint directory (its content is not verified)."""
    return (storage_path(path) / MANIFEST_FILE).is_file()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        DamagedCheckpointError: there is none, or it is not what was written.
        CheckpointError: there is no such directory, or it cannot be read.
    """
    directory = storage_path(path)
    if not directory.is_dir():
        if directory.exists():
            raise CheckpointError(f"{directory}: this is a file, not a checkpoint directory")
        raise NoSuchCheckpointError(f"{directory}: there is no such checkpoint")
    try:
        return Manifest.from_json(read_text(directory / MANIFEST_FILE))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{directory}: no {MANIFEST_FILE}: not a checkpoint of this library, or one that was "
            "not finished"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{directory}: {MANIFEST_FILE} cannot be read: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"{directory}: {error}") from None


def read_text(file: AnyPath) -> str:
    """Read a JSON file of a checkpoint.

    Raises:
        OSError: it cannot be read.
        DamagedCheckpointError: it is not a text of acceptable size.
    """
    if file.exists() and not file.is_file():
        raise DamagedCheckpointError(f"{file.name} is not a file")
    size = file.stat().st_size
    if size > LARGEST_TEXT:
        raise DamagedCheckpointError(
            f"{file.name} has {size} bytes: more than {LARGEST_TEXT} are not read"
        )
    content = bytearray()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            if b"\0" in block:  # a hole, which takes no room on disk
                raise DamagedCheckpointError(f"{file.name} is not a text: it has zero bytes")
            content += block
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{file.name} is not a text: {error}") from error
