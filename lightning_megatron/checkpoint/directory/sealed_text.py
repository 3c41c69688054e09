"""JSON texts that end with the hash of themselves, read without trust.

A manifest is such a text, and so is each of its parts: what was truncated, or has a flipped bit, is
told from what was written before anything is parsed. Reading is bounded, and whoever writes checks
the same bound, so that nothing is written that cannot be read.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

LARGEST_TEXT = 1 << 30
"""Bytes of a JSON file or index that is read as a whole: a sparse file of any size costs nothing to
make, and must not cost our memory."""

NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What parsing something else than we have written may raise."""

_SEAL = re.compile(r',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_LENGTH = len(',\n "sha256": ""\n}\n') + 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"(?!\.\.?$)[\w.=+-]{1,255}")
_BLOCK_BYTES = 1 << 20


def sealed(body: str) -> str:
    """Return a JSON object, given without its last brace, with its hash at the end."""
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def is_sealed(text: str, name: str) -> bool:
    """Whether the text ends with its own hash.

    Args:
        text: the content of the file.
        name: of the file, for the error.

    Raises:
        DamagedCheckpointError: it ends with another one.
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
    """Return the bytes of a file, if they are not more than are read.

    Raises:
        CheckpointError: they are.
    """
    content = text.encode()
    if len(content) > LARGEST_TEXT:
        raise CheckpointError(
            f"{name} would have {len(content)} bytes, and more than {LARGEST_TEXT} are not read: "
            "nothing is saved"
        )
    return content


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


def parsed(text: str) -> Any:
    """Parse JSON in which no object has a name twice.

    Raises:
        ValueError: it is something else.
    """
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands there twice")
    return result


def is_file_name(name: str) -> bool:
    """Whether ``name`` can be a file of a checkpoint: a plain name without directories."""
    return _FILE_NAME.fullmatch(name) is not None


def is_hash(value: object) -> bool:
    """Whether it is a SHA-256, in hexadecimal digits."""
    return _SHA256.fullmatch(str(value)) is not None


def is_count(value: object) -> bool:
    """Whether it is an integer that a file has room for."""
    return type(value) is int and 0 <= value < 1 << 63


def counts(values: Any) -> tuple[int, ...]:
    """Return a list of counts as a tuple.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(values, list) or not all(map(is_count, values)):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(values)


def steps(values: Any) -> tuple[int, ...]:
    """Return a list of distances, which may be negative, as a tuple.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(values, list) or not all(
        type(value) is int and abs(value) < 1 << 63 for value in values
    ):
        raise ValueError(f"{values!r} is no list of distances")
    return tuple(values)


def strings(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is one of strings to strings."""
    return all(isinstance(part, str) for pair in values.items() for part in pair)
