"""What a checkpoint directory contains, and the JSON file that says so.

::

    epoch=0-step=500.ckpt/
        manifest.json       this file's `Manifest`; written last, so a directory without it is torn
        manifest.0.json ... what each rank has written (rank_manifest.py)
        state.json          Lightning's state and optimizer options (codec.py)
        state.safetensors   tensors of that state; absent when it has none
        __0_0.distcp ...    shards: ``model.<name>``, ``optimizer.<i>.<name>.<key>``
        .metadata           index of the shards as torch.distributed.checkpoint reads it, up to
                            `dcp_index.MOST_CHUNKS` chunks

The directory is flat. The manifest is the root of all others: it lists every other file with its
size and the hash of its content, says which rectangles of which tensor are in which part, and ends
with the hash of itself; the parts say at which bytes. So nothing that was truncated, flipped,
swapped or lost is taken for a weight, no name can leave the directory, and the root grows with the
number of ranks and of tensors, not with their product. The hashes tell damage, not forgery: who can
write a checkpoint can write its hashes too, which is why nothing in it is trusted with more than
numbers.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.directory.chunk_runs import Repeat, Run, compress
from lightning_megatron.checkpoint.directory.rank_manifest import (
    PART_SCHEMA,
    FileEntry,
    RankManifest,
    chunk_entries,
    file_entry,
)
from lightning_megatron.checkpoint.directory.sealed_text import (
    NOT_OURS,
    counts,
    is_count,
    is_sealed,
    one_line_each,
    parsed,
    read_text,
    sealed,
    steps,
    strings,
)
from lightning_megatron.checkpoint.directory.storage import storage_path
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

SCHEMA = 3
"""Format that is written; raised when older readers cannot read what is written.

Format 2 has the index of all tensors in one piece; format 3 has parts."""

OLDEST_SCHEMA = 2
"""Oldest format that is read. Format 1 had neither hashes nor a seal."""

_LIBRARIES = ("torch", "lightning", "lightning-megatron")

_LATEST = 1e11
"""Seconds since 1970 that are still a date."""

_CHUNK_BYTES = 16
"""Bytes that a chunk takes in the file of its part at the least: the root cannot claim more chunks
than there is text about."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the whole model or of an optimizer."""

    dtype: str
    """Like ``bfloat16``."""
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    """Where its rectangles are: they tile the tensor."""

    @property
    def count(self) -> int:
        """Number of its chunks."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class PartEntry:
    """One part: what a rank has written."""

    number: int
    """The rank."""
    files: tuple[str, ...]
    """Its files, but for the one that describes it."""
    count: int
    """Number of its chunks."""


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
    parts: Mapping[str, PartEntry] = field(default_factory=dict)
    """The parts, by the name of the file that describes each; empty below schema 3."""
    linked: Sequence[str] = field(default_factory=list)
    """Files that were not written but shared with an earlier checkpoint (incremental.py)."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Every tensor in the shards."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of shared parameters, and the name under which each is stored."""
    optimizers: int = 0
    """Number of optimizers whose state is stored."""
    embedded: Mapping[int, RankManifest] = field(default_factory=dict, repr=False)
    """Parts that the manifest itself holds, by number: one per file in schema 2, else none."""

    @property
    def size(self) -> int:
        """Bytes of all files that it lists."""
        return sum(entry.size for entry in self.files.values())

    @property
    def own_size(self) -> int:
        """Bytes that were written for it; the rest was there."""
        return self.size - sum(self.files[name].size for name in self.linked)

    @property
    def files_by_rank(self) -> dict[int, dict[str, FileEntry]]:
        """What each rank has written, with the file that describes it; empty below schema 3.

        Files that are in none (the state, ``.metadata``) are the first rank's, like the manifest.
        """
        return {
            part.number: {n: self.files[n] for n in (name, *part.files)}
            for name, part in self.parts.items()
        }

    def file(self, role: str) -> str:
        """Return the name of the file that is ``role`` in this checkpoint.

        That is ``role`` itself, or ``<token>=<role>`` where it replaced another checkpoint in a
        store (remote_commit.py).
        """
        return next((name for name in self.files if name.rpartition("=")[2] == role), role)

    def to_json(self) -> str:
        """Return the content of ``manifest.json``; only the present format is written."""
        assert self.schema >= PART_SCHEMA, self.schema
        tables = ("files", "parts", "tensors", "embedded")
        head = {k: v for k, v in vars(self).items() if k not in tables}
        texts = [json.dumps(head, indent=1, sort_keys=True)[: -len("\n}")]]
        texts.append(one_line_each("files", ((n, asdict(e)) for n, e in self.files.items())))
        texts.append(one_line_each("parts", ((n, _plain_part(p)) for n, p in self.parts.items())))
        plain = ((name, _plain_tensor(entry)) for name, entry in self.tensors.items())
        texts.append(one_line_each("tensors", plain))
        return sealed(",\n".join(texts))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the content of ``manifest.json``; fields of later versions are ignored.

        Raises:
            DamagedCheckpointError: it is not a manifest, or not what was written.
            CheckpointError: it has a newer schema.
        """
        other = _other_format(text)
        try:
            has_seal = is_sealed(text, MANIFEST_FILE)
        except DamagedCheckpointError as error:
            if other is None:
                raise
            raise DamagedCheckpointError(f"{other}, unless it is damaged: {error}") from None
        if other is not None:
            raise CheckpointError(other)
        try:
            data = parsed(text)
            schema = data["schema"]
            if type(schema) is not int or schema < OLDEST_SCHEMA:
                raise ValueError(f"schema {schema!r}")
            if not has_seal:
                raise ValueError("it does not end with its own hash")
            names = cls.__dataclass_fields__.keys() - {"embedded", "parts", "tensors"}
            known = {k: v for k, v in data.items() if k in names}
            known["files"] = {n: _file(n, e) for n, e in data["files"].items()}
            manifest = cls(**known, **_contents(data, schema))
            _check_mappings(manifest)
            _check_parts(manifest)
        except NOT_OURS as error:
            raise DamagedCheckpointError(f"{MANIFEST_FILE} is not a manifest: {error!r}") from None
        return manifest


def _other_format(text: str) -> str | None:
    """Return the message about a format that is not read; None for the others."""
    try:
        data = json.loads(text)
        schema, versions = data["schema"], data.get("versions")
    except NOT_OURS:
        return None  # whatever it is, it is no manifest
    if type(schema) is not int or schema < 1 or OLDEST_SCHEMA <= schema <= SCHEMA:
        return None
    if schema < OLDEST_SCHEMA:
        if '"sha256": "' in text:
            return None  # a damaged digit: format 1 has no hashes
        return (
            f"it has format {schema}, which has no hashes; formats {OLDEST_SCHEMA} to {SCHEMA} are "
            "read; nearest valid: load it with an earlier version of lightning-megatron and save "
            "it again"
        )
    names = versions if isinstance(versions, dict) else {}
    writer, ours = names.get("lightning-megatron"), _version("lightning-megatron")
    by = "a later lightning-megatron" if writer is None else f"lightning-megatron {writer}"
    return (
        f"{by} wrote it in format {schema}, and lightning-megatron {ours}, which is installed, "
        f"reads formats up to {SCHEMA}: upgrade lightning-megatron"
    )


def _plain_part(part: PartEntry) -> dict[str, Any]:
    return {"part": part.number, "files": list(part.files), "chunks": part.count}


def _plain_tensor(entry: TensorEntry) -> dict[str, Any]:
    runs = [run.plain() for run in entry.runs]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": runs}


def _file(name: str, data: Mapping[str, Any]) -> FileEntry:
    if name == MANIFEST_FILE:
        raise ValueError(f"entry {name!r}: {data!r}")
    return file_entry(name, data)


def _contents(data: Mapping[str, Any], schema: int) -> dict[str, Any]:
    """Return the tensors, and the parts or, in schema 2, what stands for them."""
    if schema < PART_SCHEMA:
        chunks = {n: chunk_entries(t["chunks"]) for n, t in data["tensors"].items()}
        dtypes = {n: (_dtype(t), counts(t["shape"])) for n, t in data["tensors"].items()}
        tensors, embedded = in_parts(dtypes, chunks)
        return {"tensors": tensors, "embedded": embedded}
    tensors = {
        name: TensorEntry(
            dtype=_dtype(t), shape=counts(t["shape"]), runs=tuple(map(_run, t["chunks"]))
        )
        for name, t in data["tensors"].items()
    }
    return {"tensors": tensors, "parts": {n: _part(p) for n, p in data["parts"].items()}}


def in_parts(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, TensorEntry], dict[int, RankManifest]]:
    """Turn an index that is in one piece into parts, one for each file.

    Args:
        kinds: dtype and shape of every tensor.
        chunks: their `ChunkEntry` objects.

    Returns:
        The tensors, and the parts by number.
    """
    files = sorted({chunk.file for found in chunks.values() for chunk in found})
    numbers = {file: number for number, file in enumerate(files)}
    contents: dict[int, dict[str, list[Any]]] = {number: {} for number in numbers.values()}
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        for chunk in chunks[name]:
            contents[numbers[chunk.file]].setdefault(name, []).append(chunk)
        runs = compress((numbers[c.file], (c.offsets, c.sizes)) for c in chunks[name])
        tensors[name] = TensorEntry(dtype=dtype, shape=shape, runs=runs)
    parts = {
        number: RankManifest(
            number=number, files={}, tensors={n: tuple(c) for n, c in held.items()}
        )
        for number, held in contents.items()
    }
    return tensors, parts


def _dtype(data: Mapping[str, Any]) -> str:
    if not isinstance(data["dtype"], str):
        raise TypeError("a dtype is not a string")
    return str(data["dtype"])


def _run(data: Any) -> Run:
    part, offsets, sizes, *rest = data
    if len(rest) > 1 or not is_count(part):
        raise ValueError(f"chunks {data!r}")
    return Run(
        part=part,
        offsets=counts(offsets),
        sizes=counts(sizes),
        repeats=tuple(map(_repeat, rest[0] if rest else [])),
    )


def _repeat(data: Any) -> Repeat:
    count, part_step, distances = data
    if not is_count(count):
        raise ValueError(f"chunks that come {count!r} times")
    return Repeat(count=count, part_step=steps([part_step])[0], steps=steps(distances))


def _part(data: Mapping[str, Any]) -> PartEntry:
    number, files, count = data["part"], data["files"], data["chunks"]
    if not (is_count(number) and is_count(count) and isinstance(files, list)):
        raise ValueError(f"part {data!r}")
    return PartEntry(number=number, files=tuple(files), count=count)


def _check_mappings(manifest: Manifest) -> None:
    if not strings(manifest.aliases) or not strings(manifest.versions):
        raise TypeError("a name is not a string")
    if not isinstance(manifest.linked, list) or not manifest.files.keys() >= set(manifest.linked):
        raise TypeError("a link to no file")
    if not isinstance(manifest.layout, dict) or not is_count(manifest.optimizers):
        raise TypeError("a field has another type")
    for number in (manifest.step, manifest.epoch):
        if number is not None and not is_count(number):
            raise TypeError(f"{number!r} is not a count")
    for moment in (manifest.written, manifest.taken):
        if moment is not None and not (type(moment) is float and 0 <= moment < _LATEST):
            raise TypeError(f"{moment!r} is not a time")


def _check_parts(manifest: Manifest) -> None:
    """Refuse parts that share a file or a number, or that claim more than there is text about."""
    if manifest.schema < PART_SCHEMA:
        return
    names = [n for name, part in manifest.parts.items() for n in (name, *part.files)]
    if len(set(names)) < len(names) or not manifest.files.keys() >= set(names):
        raise ValueError("a file of a part is in none or in two")
    if len({part.number for part in manifest.parts.values()}) < len(manifest.parts):
        raise ValueError("two parts have one number")
    for name, part in manifest.parts.items():
        if part.count * _CHUNK_BYTES > manifest.files[name].size:
            raise ValueError(f"{name} is too small for {part.count} chunks")
    total = sum(entry.count for entry in manifest.tensors.values())
    if total != sum(part.count for part in manifest.parts.values()):
        raise ValueError(f"{total} chunks are not those of the parts")


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
