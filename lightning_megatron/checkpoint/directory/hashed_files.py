"""Files of a checkpoint with their sizes and hashes, and JSON texts that end with their own.

A truncated text, or one with a flipped bit, is found out before anything is parsed. Reading has a
limit of size, and writing checks the same limit, so every text that is written can be read.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

LARGEST_TEXT = 1 << 30
"""Most bytes of a file of text, or of an index of another library, that is read as a whole."""

_SEAL = re.compile(r',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_LENGTH = len(',\n "sha256": ""\n}\n') + 64
_FILE_NAME = re.compile(r"(?!\.\.?$)[\w.=+-]{1,255}")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and hash of one file."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """Hash of the content; None for files of another library, which has no hashes."""


def entry_of(data: bytes) -> FileEntry:
    """Return the entry of a file with this content."""
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def read_entry(path: AnyPath) -> FileEntry:
    """Return the entry of a file as it is stored now.

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


def is_file_name(name: str) -> bool:
    """Return whether ``name`` is a plain file name, without directories."""
    return _FILE_NAME.fullmatch(name) is not None


def sealed(body: str) -> str:
    """Return a JSON object with its hash at the end.

    Args:
        body: the object without its last brace.
    """
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def seal_of(text: str, name: str) -> str | None:
    """Return the hash with which a text ends; None if it ends with none.

    Args:
        text: the content of the file.
        name: name of the file, for the error.

    Raises:
        DamagedCheckpointError: the text ends with another hash than its own.
    """
    body, seal = text[:-_SEAL_LENGTH], _SEAL.fullmatch(text[-_SEAL_LENGTH:])
    if seal is None:
        return None
    found = hashlib.sha256(body.encode()).hexdigest()
    if found != seal[1]:
        raise DamagedCheckpointError(
            f"{name}: the content has SHA-256 {found}, but {seal[1]} was written"
        )
    return found


def one_line_each(name: str, entries: Iterable[tuple[str, Any]]) -> str:
    """Return a member of a JSON object whose value is an object with a line for each entry."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries)
    return f' "{name}": {{\n{lines}\n }}'


def encoded(name: str, text: str) -> bytes:
    """Return a text as bytes.

    Raises:
        CheckpointError: the text is larger than what is read.
    """
    content = text.encode()
    if len(content) > LARGEST_TEXT:
        raise CheckpointError(
            f"{name} would have {len(content)} bytes, and at most {LARGEST_TEXT} are read; "
            "nothing is saved"
        )
    return content


def read_text(file: AnyPath) -> str:
    """Read a JSON file of a checkpoint.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpointError: the file is not text, or too large.
    """
    if file.exists() and not file.is_file():
        raise DamagedCheckpointError(f"{file.name} is not a file")
    size = file.stat().st_size
    if size > LARGEST_TEXT:
        raise DamagedCheckpointError(
            f"{file.name} has {size} bytes; files of more than {LARGEST_TEXT} are not read"
        )
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{file.name} is not text: {error}") from error
