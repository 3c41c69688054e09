"""JSON texts that end with their own SHA-256, read without trust.

The manifests are such texts. A truncated text, or one with a flipped bit, is found out before
anything is parsed. Reading has a limit of size, and writing checks the same limit, so every text
that is written can be read.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

LARGEST_TEXT = 1 << 30
"""Bytes of a JSON file or index that is read as a whole: a sparse file of any size costs nothing to
make, and must not cost our memory."""

NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors that the parsing of a foreign text may raise."""

_SEAL = re.compile(r',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_LENGTH = len(',\n "sha256": ""\n}\n') + 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"(?!\.\.?$)[\w.=+-]{1,255}")
_BLOCK_BYTES = 1 << 20


def sealed(body: str) -> str:
    """Return a JSON object with its hash at the end.

    Args:
        body: the object without its last brace.
    """
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def is_sealed(text: str, name: str) -> bool:
    """Return whether the text ends with its own hash.

    Args:
        text: the content of the file.
        name: name of the file, for the error.

    Raises:
        DamagedCheckpointError: the text ends with another hash.
    """
    body, seal = text[:-_SEAL_LENGTH], _SEAL.fullmatch(text[-_SEAL_LENGTH:])
    if seal is None:
        return False
    found = hashlib.sha256(body.encode()).hexdigest()
    if found != seal[1]:
        raise DamagedCheckpointError(
            f"{name}: the content has SHA-256 {found}, but {seal[1]} was written"
        )
    return True


def one_line_each(name: str, entries: Iterator[tuple[str, Any]]) -> str:
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
    content = bytearray()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            if b"\0" in block:  # a hole, which takes no room on disk
                raise DamagedCheckpointError(f"{file.name} is not text: it has NUL bytes")
            content += block
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{file.name} is not text: {error}") from error


def parsed(text: str) -> Any:
    """Parse JSON in which no object has a name twice.

    Raises:
        ValueError: the text is not JSON, or an object has a name twice.
    """
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the name {twice!r} twice")
    return result


def is_file_name(name: str) -> bool:
    """Return whether ``name`` is a plain file name, without directories."""
    return _FILE_NAME.fullmatch(name) is not None


def is_hash(value: object) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal digits."""
    return _SHA256.fullmatch(str(value)) is not None


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def counts(values: Any) -> tuple[int, ...]:
    """Return a list of counts as a tuple.

    Raises:
        ValueError: the value is no such list.
    """
    if not isinstance(values, list) or not all(map(is_count, values)):
        raise ValueError(f"{values!r}: must be a list of integers from 0")
    return tuple(values)


def steps(values: Any) -> tuple[int, ...]:
    """Return a list of integers as a tuple.

    Raises:
        ValueError: the value is no such list.
    """
    if not isinstance(values, list) or not all(
        type(value) is int and abs(value) < 1 << 63 for value in values
    ):
        raise ValueError(f"{values!r}: must be a list of integers")
    return tuple(values)


def strings(values: Mapping[str, Any]) -> bool:
    """Return whether a mapping has strings as keys and values."""
    return all(isinstance(part, str) for pair in values.items() for part in pair)
