"""Files of tokens in Megatron-LM's indexed format, byte by byte from its description."""

import struct
from collections.abc import Sequence
from pathlib import Path

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def index_bytes(
    lengths: Sequence[int], code: int = 8, bounds: Sequence[int] | None = None, version: int = 1
) -> bytes:
    """Content of an index; `bounds` are the first sequences of documents, and their number."""
    size = struct.calcsize(LETTERS.get(code, "H"))
    pointers = [size * sum(lengths[:number]) for number in range(len(lengths))]
    bounds = range(len(lengths) + 1) if bounds is None else bounds
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(bounds))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )


def token_bytes(documents: Sequence[Sequence[int]], code: int = 8) -> bytes:
    """Content of a file of tokens."""
    flat = [token for document in documents for token in document]
    return struct.pack(f"<{len(flat)}{LETTERS[code]}", *flat)


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], code: int = 8) -> Path:
    """Write both files and return the prefix."""
    prefix.with_name(f"{prefix.name}.bin").write_bytes(token_bytes(documents, code))
    index = index_bytes([len(document) for document in documents], code)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    return prefix
