"""The root manifest of a checkpoint: the JSON file that lists everything else.

::

    epoch=0-step=500.ckpt/
        manifest.json       the `Manifest`; written last, so a directory without it is torn
        manifest.0.json ... the files and chunks of each rank (rank_manifest.py)
        state.json          Lightning's state and optimizer options (codec.py)
        state.safetensors   tensors of that state; absent when it has none
        __0_0.distcp ...    shards: ``model.<name>``, ``optimizer.<i>.<name>.<key>``
        .metadata           index of the shards for torch.distributed.checkpoint, up to
                            `dcp_metadata.MOST_CHUNKS` chunks

The directory is flat. The root manifest lists every other file with its size and SHA-256, says
which rectangles of which tensor are in which part (the files of one rank), and ends with its own
hash. The manifests of the parts give the bytes. A file that was truncated, flipped, swapped or lost
is thus never taken for weights, and no name can leave the directory. The size of the root grows
with the number of ranks and of tensors, not with their product.

The hashes show damage, not forgery: whoever can write a checkpoint can write its hashes too. That
is why nothing in a checkpoint is trusted with more than numbers.
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
"""Limit of dates, in seconds since 1970."""

_CHUNK_BYTES = 16
"""Least bytes that a chunk takes in the manifest of its part. It keeps the root from claiming more
chunks than there is text about."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the whole model or of an optimizer."""

    dtype: str
    """Name of the dtype, like ``bfloat16``."""
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    """Rectangles that tile the tensor, with their parts."""

    @property
    def count(self) -> int:
        """Number of its chunks."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class PartEntry:
    """One part, the files and chunks of one rank, as the root knows it."""

    number: int
    """The rank."""
    files: tuple[str, ...]
    """Names of its files, without its own manifest."""
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
    """Time of writing, in seconds since 1970."""
    taken: float | None = None
    """Time at which the state was captured, in seconds since 1970; None in older checkpoints."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Degrees of parallelism of the run that wrote it; any other layout can read it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every other file of the directory."""
    parts: Mapping[str, PartEntry] = field(default_factory=dict)
    """The parts, by the name of the manifest of each; empty in schema 2."""
    linked: Sequence[str] = field(default_factory=list)
    """Files that are hard links to those of an earlier checkpoint (incremental.py)."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Every tensor in the shards."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Stored names of shared parameters, by alias."""
    optimizers: int = 0
    """Number of optimizers whose state is stored."""
    embedded: Mapping[int, RankManifest] = field(default_factory=dict, repr=False)
    """Parts that are in the root itself, by number: one for each file in schema 2, else none."""

    @property
    def size(self) -> int:
        """Bytes of all files in the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def own_size(self) -> int:
        """Bytes without the files that are links to earlier ones."""
        return self.size - sum(self.files[name].size for name in self.linked)

    @property
    def files_by_rank(self) -> dict[int, dict[str, FileEntry]]:
        """Files of each rank, with the manifest of its part; empty in schema 2.

        The state, ``.metadata`` and the root are in none of these: the first rank writes them.
        """
        return {
            part.number: {n: self.files[n] for n in (name, *part.files)}
            for name, part in self.parts.items()
        }

    def file(self, role: str) -> str:
        """Return the name of the file that is ``role`` in this checkpoint.

        The name is ``role`` itself, or ``<token>=<role>`` where the checkpoint replaced another in
        a store (remote_commit.py).
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
            DamagedCheckpointError: the text is not a manifest, or not what was written.
            CheckpointError: the format is newer or older than those that are read.
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
    """Return the tensors and the parts; in schema 2 the parts are made here."""
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
    """Split an index of all tensors into parts, one for each file.

    Args:
        kinds: dtype and shape of every tensor.
        chunks: `ChunkEntry` objects of every tensor.

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
        raise ValueError(f"a run of {count!r} chunks")
    return Repeat(count=count, part_step=steps([part_step])[0], steps=steps(distances))


def _part(data: Mapping[str, Any]) -> PartEntry:
    number, files, count = data["part"], data["files"], data["chunks"]
    if not (is_count(number) and is_count(count) and isinstance(files, list)):
        raise ValueError(f"part {data!r}")
    return PartEntry(number=number, files=tuple(files), count=count)


def _check_mappings(manifest: Manifest) -> None:
    if not strings(manifest.aliases) or not strings(manifest.versions):
        raise TypeError("aliases and versions must have strings as names and values")
    if not isinstance(manifest.linked, list) or not manifest.files.keys() >= set(manifest.linked):
        raise TypeError("linked must be a list of names that are in files")
    if not isinstance(manifest.layout, dict) or not is_count(manifest.optimizers):
        raise TypeError("layout must be an object, and optimizers a count")
    for number in (manifest.step, manifest.epoch):
        if number is not None and not is_count(number):
            raise TypeError(f"{number!r} is not a count")
    for moment in (manifest.written, manifest.taken):
        if moment is not None and not (type(moment) is float and 0 <= moment < _LATEST):
            raise TypeError(f"{moment!r} is not a time")


def _check_parts(manifest: Manifest) -> None:
    """Refuse parts that share a file or a number, or claim more chunks than they have text for."""
    if manifest.schema < PART_SCHEMA:
        return
    names = [n for name, part in manifest.parts.items() for n in (name, *part.files)]
    if len(set(names)) < len(names) or not manifest.files.keys() >= set(names):
        raise ValueError("a file of a part is in two parts, or not in files")
    if len({part.number for part in manifest.parts.values()}) < len(manifest.parts):
        raise ValueError("two parts have the same number")
    for name, part in manifest.parts.items():
        if part.count * _CHUNK_BYTES > manifest.files[name].size:
            raise ValueError(f"{name} is too small for {part.count} chunks")
    total = sum(entry.count for entry in manifest.tensors.values())
    held = sum(part.count for part in manifest.parts.values())
    if total != held:
        raise ValueError(f"the tensors have {total} chunks, the parts {held}")


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
        ConfigError: the path is the URL of a remote file system.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(
            f"path {text!r}: must be a path of this machine, not a URL; nearest valid: a path "
            "without a scheme"
        )
    return Path(os.path.abspath(text))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a complete checkpoint directory; nothing in it is verified."""
    return (storage_path(path) / MANIFEST_FILE).is_file()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        DamagedCheckpointError: the manifest is missing, or not what was written.
        CheckpointError: the directory is missing, or the manifest cannot be read.
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
