"""The manifest of one rank: its files, and the place of each of its chunks.

::

    manifest.5.json     files of rank 5 with sizes and hashes, the place of each of its chunks

Every rank that writes tensors writes such a manifest after its shards, so no rank has to know the
chunks of all. The root (manifest.py) holds the hash of each rank's manifest, which holds the hashes
of that rank's files. The root also says which rectangles are in which part, so a reader opens only
the parts that it needs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.checkpoint.directory.sealed_text import (
    NOT_OURS,
    counts,
    is_count,
    is_file_name,
    is_hash,
    is_sealed,
    one_line_each,
    parsed,
    sealed,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import DamagedCheckpointError

_BLOCK_BYTES = 1 << 20

PART_SCHEMA = 3
"""First format with a manifest for each rank."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and hash of one file."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """Hash of the content; None for files of another library, which has no hashes."""


def entry_of(data: bytes) -> FileEntry:
    """Return the manifest's entry for a file with this content."""
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def read_entry(path: AnyPath) -> FileEntry:
    """Return the manifest's entry for a file as it is stored now.

    Raises:
        OSError: the file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileEntry(size=size, sha256=digest.hexdigest())


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


def part_file(number: int) -> str:
    """Return the name of the manifest of a rank.

    >>> part_file(5)
    'manifest.5.json'
    """
    return f"manifest.{number}.json"


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    """Files and chunks of one rank."""

    number: int
    """The rank."""
    files: Mapping[str, FileEntry]
    """Files of the rank, by name."""
    tensors: Mapping[str, tuple[ChunkEntry, ...]]
    """Chunks of the rank, by name of the tensor."""

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(map(len, self.tensors.values()))

    def to_json(self) -> str:
        """Return the content of the file."""
        head = json.dumps({"schema": PART_SCHEMA, "part": self.number}, indent=1)[: -len("\n}")]
        files = one_line_each("files", ((name, asdict(e)) for name, e in self.files.items()))
        plain = ((name, plain_chunks(chunks)) for name, chunks in self.tensors.items())
        return sealed(",\n".join((head, files, one_line_each("tensors", plain))))

    @classmethod
    def from_json(cls, text: str, name: str) -> "RankManifest":
        """Parse the content of a file.

        Args:
            text: the content.
            name: name of the file, for errors.

        Raises:
            DamagedCheckpointError: the text is not a manifest, or not what was written.
        """
        if not is_sealed(text, name):
            raise DamagedCheckpointError(f"{name} does not end with its own hash")
        try:
            data = parsed(text)
            if data["schema"] != PART_SCHEMA or not is_count(data["part"]):
                raise ValueError(f"part {data['part']!r} of schema {data['schema']!r}")
            files = {n: file_entry(n, entry) for n, entry in data["files"].items()}
            names = {file: file for file in files}  # one string for all chunks of a file
            tensors = {n: chunk_entries(c, names) for n, c in data["tensors"].items()}
        except NOT_OURS as error:
            raise DamagedCheckpointError(f"{name} is not part of a manifest: {error!r}") from None
        return cls(number=data["part"], files=files, tensors=tensors)


def file_entry(name: str, data: Mapping[str, Any]) -> FileEntry:
    """Parse the entry of a file.

    Raises:
        ValueError: the entry has no name, size or hash.
    """
    size = data["size"]
    sha256 = data.get("sha256")
    if not is_file_name(name) or not is_count(size) or not is_hash(sha256):
        raise ValueError(f"entry {name!r}: {data!r}")
    return FileEntry(size=size, sha256=sha256)


def plain_chunks(chunks: Iterable[ChunkEntry]) -> list[Any]:
    """Return chunks as JSON data."""
    return [[list(c.offsets), list(c.sizes), c.file, c.begin, c.length] for c in chunks]


def chunk_entries(data: Any, files: Mapping[str, str] | None = None) -> tuple[ChunkEntry, ...]:
    """Parse chunks.

    Args:
        data: the chunks as JSON data.
        files: names of the files that chunks may be in; any when None.

    Raises:
        ValueError: the data are not chunks.
        LookupError: a chunk is in a file that is not in ``files``.
    """
    chunks = []
    for offsets, sizes, file, begin, length in data:
        if not isinstance(file, str) or not is_count(begin) or not is_count(length):
            raise ValueError("a chunk has no file, begin or length")
        chunks.append(
            ChunkEntry(
                offsets=counts(offsets),
                sizes=counts(sizes),
                file=file if files is None else files[file],
                begin=begin,
                length=length,
            )
        )
    return tuple(chunks)
