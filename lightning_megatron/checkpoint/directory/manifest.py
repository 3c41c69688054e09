"""The manifest: the one index of a checkpoint, which is JSON.

::

    epoch=0-step=500.ckpt/
        manifest.json       files with sizes and hashes, and the rectangles of every tensor; written
                            last, so a directory without it is torn
        manifest.0.json ... part of rank 0: the bytes of each of its rectangles
        state.json          Lightning's state and optimizer options (codec.py)
        state.safetensors   tensors of that state; absent when it has none
        __0_0.distcp ...    shards: ``model.<name>``, ``optimizer.<i>.<name>.<key>``
        .metadata           export for torch.distributed.checkpoint (dcp_metadata.py); never read

The directory is flat. ``manifest.json`` lists every other file with its size and SHA-256, says
which rank wrote which rectangles of which tensor, and ends with its own hash. A file that was
truncated, flipped, swapped or lost is thus never taken for weights.

Where the bytes of a rectangle are, only its writer knows. Each rank that writes tensors adds such a
part after its shards, and a reader opens the parts that hold what it needs. So no rank has to know
the chunks of all, and ``manifest.json`` grows with the number of ranks and of tensors, not with
their product (chunk_runs.py).

The hashes show damage, not forgery: whoever can write a checkpoint can write its hashes too. That
is why nothing in a checkpoint is trusted with more than numbers.
"""

import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_megatron.checkpoint.directory.chunk_runs import Repeat, Run, compress
from lightning_megatron.checkpoint.directory.hashed_files import (
    FileEntry,
    entry_of,
    is_file_name,
    one_line_each,
    read_text,
    seal_of,
    sealed,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    NoSuchCheckpointError,
)

if TYPE_CHECKING:
    import torch

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
STATE_TENSORS_FILE = "state.safetensors"
OBJECTS_FILE = "objects.pkl"
METADATA_FILE = ".metadata"

SCHEMA = 4
"""Format that is written; raised when older readers cannot read what is written.

Format 2 has the bytes of all chunks in ``manifest.json``. Formats 3 and 4 have parts; those of
format 3 repeat what ``manifest.json`` says of files, which is ignored."""

OLDEST_SCHEMA = 2
"""Oldest format that is read. Format 1 had neither hashes nor a seal."""

_LIBRARIES = ("torch", "lightning", "lightning-megatron")
_KEPT_PARTS = 256
"""Number of parts that are kept in memory once they were read."""
_NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors that the parsing of another JSON text may raise."""


@dataclass(frozen=True, kw_only=True)
class ChunkEntry:
    """A rectangle of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    """Index of its first element, per dimension."""
    sizes: tuple[int, ...]
    """Elements, per dimension."""
    file: str
    """Name of the file."""
    begin: int
    """First byte in the file."""
    length: int
    """Bytes in the file."""


Part: TypeAlias = Mapping[str, Sequence[ChunkEntry]]
"""Chunks that one rank has written, by name of the tensor."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the whole model or of an optimizer."""

    dtype: str
    """Name of the dtype, like ``bfloat16``."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    runs: tuple[Run, ...]
    """Rectangles that tile the tensor, with the numbers of their parts."""

    @property
    def count(self) -> int:
        """Number of its chunks."""
        return sum(run.count for run in self.runs)

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype; torch has it, or opening the checkpoint has failed."""
        import torch  # late: who only lists checkpoints need not wait for torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The index of a checkpoint."""

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
    linked: Sequence[str] = field(default_factory=list)
    """Files that are hard links to those of an earlier checkpoint (incremental.py)."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Stored names of shared parameters, by alias."""
    optimizers: int = 0
    """Number of optimizers whose state is stored."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every other file of the directory."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Every tensor in the shards."""
    parts: dict[int, Part] = field(default_factory=dict, repr=False, compare=False)
    """Parts in memory, by rank: those that were read last, and all where no file has them."""
    sha256: str | None = field(default=None, repr=False, compare=False)
    """Hash of the file from which it was read; no other checkpoint has it."""

    @property
    def size(self) -> int:
        """Bytes of all files in the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def own_size(self) -> int:
        """Bytes without the files that are links to earlier ones."""
        return self.size - sum(self.files[name].size for name in self.linked)

    @property
    def writers(self) -> list[int]:
        """Ranks that have written tensors."""
        runs = (run for entry in self.tensors.values() for run in entry.runs)
        return sorted({number for run in runs for number, _ in run.rectangles()})

    def file(self, role: str) -> str:
        """Return the name of the file that is ``role`` in this checkpoint.

        The name is ``role`` itself, or ``<token>=<role>`` where the checkpoint replaced another in
        a store (remote_commit.py).
        """
        return next((name for name in self.files if name.rpartition("=")[2] == role), role)

    def part(self, directory: AnyPath, number: int) -> Part:
        """Return the part of a rank.

        Args:
            directory: the checkpoint.
            number: the rank.

        Raises:
            OSError: the file cannot be read.
            DamagedCheckpointError: the file is not what was written.
        """
        if number not in self.parts:
            found = self._read_part(directory, self.file(part_file(number)))
            if len(self.parts) >= _KEPT_PARTS:
                self.parts.clear()
            self.parts[number] = found
        return self.parts[number]

    def _read_part(self, directory: AnyPath, name: str) -> Part:
        if name not in self.files:
            raise DamagedCheckpointError(f"{name} is not in the manifest")
        text = read_text(directory / name)
        if entry_of(text.encode()) != self.files[name]:
            raise DamagedCheckpointError(f"{name} is not the part that was written")
        names = {file: file for file in self.files}  # one string for all chunks of a file
        try:
            tensors = json.loads(text)["tensors"]
            return {tensor: _chunks(held, names) for tensor, held in tensors.items()}
        except _NOT_OURS as error:
            raise DamagedCheckpointError(f"{name} is not part of a manifest: {error!r}") from None

    def to_json(self) -> str:
        """Return the content of ``manifest.json``; only the present format is written."""
        assert self.schema == SCHEMA, self.schema
        tables = ("files", "tensors", "parts", "sha256")
        head = {k: v for k, v in vars(self).items() if k not in tables}
        texts = [json.dumps(head, indent=1, sort_keys=True)[: -len("\n}")]]
        texts.append(one_line_each("files", ((n, asdict(e)) for n, e in self.files.items())))
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
            seal = seal_of(text, MANIFEST_FILE)
        except DamagedCheckpointError as error:
            if other is None:
                raise
            raise DamagedCheckpointError(f"{other}, unless it is damaged: {error}") from None
        if other is not None:
            raise CheckpointError(other)
        try:
            data = json.loads(text)
            if seal is None:
                raise ValueError("it does not end with its own hash")
            tables = _tables_of_format_2(data) if data["schema"] == 2 else _tables(data)
            names = cls.__dataclass_fields__.keys() - {"parts", "tensors"}
            known = {k: v for k, v in data.items() if k in names}
            known["files"] = {name: _file(name, entry) for name, entry in data["files"].items()}
            return cls(**known, **tables)
        except _NOT_OURS as error:
            raise DamagedCheckpointError(f"{MANIFEST_FILE} is not a manifest: {error!r}") from None


def part_file(number: int) -> str:
    """Return the name of the file with the part of a rank.

    >>> part_file(5)
    'manifest.5.json'
    """
    return f"manifest.{number}.json"


def part_text(part: Part) -> str:
    """Return the content of the file of a part."""
    plain = ((name, [_plain_chunk(c) for c in chunks]) for name, chunks in part.items())
    return f"{{\n{one_line_each('tensors', plain)}\n}}\n"


def split(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]], chunks: Mapping[str, Sequence[ChunkEntry]]
) -> dict[str, Any]:
    """Split an index of all chunks into tensors and parts, one part for each file.

    Args:
        kinds: dtype and shape of every tensor.
        chunks: chunks of every tensor.

    Returns:
        The fields ``tensors`` and ``parts`` of a `Manifest`.
    """
    files = sorted({chunk.file for found in chunks.values() for chunk in found})
    numbers = {file: number for number, file in enumerate(files)}
    parts: dict[int, dict[str, list[ChunkEntry]]] = {number: {} for number in numbers.values()}
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        for chunk in chunks[name]:
            parts[numbers[chunk.file]].setdefault(name, []).append(chunk)
        runs = compress((numbers[c.file], (c.offsets, c.sizes)) for c in chunks[name])
        tensors[name] = TensorEntry(dtype=dtype, shape=shape, runs=runs)
    return {"tensors": tensors, "parts": parts}


def _tables_of_format_2(data: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {n: (str(t["dtype"]), tuple(t["shape"])) for n, t in data["tensors"].items()}
    return split(kinds, {n: _chunks(t["chunks"]) for n, t in data["tensors"].items()})


def _tables(data: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {
        name: TensorEntry(
            dtype=str(t["dtype"]), shape=tuple(t["shape"]), runs=tuple(map(_run, t["chunks"]))
        )
        for name, t in data["tensors"].items()
    }
    return {"tensors": tensors}


def _other_format(text: str) -> str | None:
    """Return the message about a format that is not read; None for the others."""
    try:
        data = json.loads(text)
        schema, versions = data["schema"], data.get("versions")
    except _NOT_OURS:
        return None  # whatever it is, it is no manifest
    if type(schema) is not int or schema < 1 or OLDEST_SCHEMA <= schema <= SCHEMA:
        return None
    if schema < OLDEST_SCHEMA:
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


def _file(name: str, data: Mapping[str, Any]) -> FileEntry:
    if not is_file_name(name):
        raise ValueError(f"{name!r} is no name of a file")
    return FileEntry(size=data["size"], sha256=data["sha256"])


def _plain_tensor(entry: TensorEntry) -> dict[str, Any]:
    runs = [run.plain() for run in entry.runs]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": runs}


def _run(data: Sequence[Any]) -> Run:
    part, offsets, sizes, *rest = data
    repeats = tuple(
        Repeat(count=count, part_step=part_step, steps=tuple(steps))
        for count, part_step, steps in (rest[0] if rest else ())
    )
    return Run(part=part, offsets=tuple(offsets), sizes=tuple(sizes), repeats=repeats)


def _plain_chunk(chunk: ChunkEntry) -> list[Any]:
    return [list(chunk.offsets), list(chunk.sizes), chunk.file, chunk.begin, chunk.length]


def _chunks(
    data: Iterable[Sequence[Any]], names: Mapping[str, str] | None = None
) -> tuple[ChunkEntry, ...]:
    """Parse chunks; of files that are in ``names``, unless that is None."""
    return tuple(
        ChunkEntry(
            offsets=tuple(offsets),
            sizes=tuple(sizes),
            file=file if names is None else names[file],
            begin=begin,
            length=length,
        )
        for offsets, sizes, file, begin, length in data
    )


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
    """Return whether ``path`` is a complete checkpoint; nothing in it is verified.

    It is a directory of this package, or a file that this package or Lightning wrote.
    """
    place = storage_path(path)
    if isinstance(place, Path) and place.is_file():
        return file_entries(place) is not None
    return (place / MANIFEST_FILE).is_file()


def file_entries(file: Path) -> frozenset[str] | None:
    """Return which of some keys a checkpoint has that is a file; None for any other file.

    It reads names in the pickle without unpickling it, and nothing is verified.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            pickled = archive.read(name)
    except (OSError, zipfile.BadZipFile, StopIteration):
        return None
    if b"pytorch-lightning_version" not in pickled:
        return None
    return frozenset(key for key in ("optimizer_states",) if key.encode() in pickled)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint directory.

    That of a file says only how large and how old it is, and whether it has optimizer state.

    Raises:
        DamagedCheckpointError: the manifest is missing, or not what was written.
        CheckpointError: the directory is missing, or the manifest cannot be read.
    """
    directory = storage_path(path)
    if not directory.is_dir():
        if isinstance(directory, Path) and directory.is_file():
            return _manifest_of_file(directory)
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


def _manifest_of_file(file: Path) -> Manifest:
    entries = file_entries(file)
    if entries is None:
        raise DamagedCheckpointError(f"{file}: a file, but no checkpoint, or damaged")
    found = file.stat()
    return Manifest(
        written=found.st_mtime,
        optimizers=int("optimizer_states" in entries),
        files={file.name: FileEntry(size=found.st_size)},
    )
