"""Division of the sources into parts, each of which becomes one shard.

The division follows from the sources and one size alone, never from the number of workers: any
number of workers writes the same files. A part is about `shard_bytes` of text: many small files, or
a range of a large one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_megatron.data.preprocessing.sources import Source

SHARDS = 256
"""Number of shards to aim at: enough parts for many workers, few enough files to hold open."""
_SMALLEST, _LARGEST = 4 << 20, 1 << 30
"""Bytes of text of a shard, unless the user says them."""


@dataclass(frozen=True)
class Piece:
    """Range of a source: bytes of its text, or blocks of a source that has these.

    Attributes:
        source: number of the source.
        start: first byte or block.
        stop: end of them.
    """

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """Text of one shard.

    Attributes:
        number: number of the shard.
        pieces: its pieces, in the order of their documents.
        text_bytes: bytes of their text.
    """

    number: int
    pieces: tuple[Piece, ...]
    text_bytes: int

    @property
    def name(self) -> str:
        """Name of the shard's files without ending."""
        return f"shard-{self.number:05d}"


def default_shard_bytes(sources: Sequence[Source]) -> int:
    """Return the bytes of text of a shard: a 256th of all, between 4 MiB and 1 GiB."""
    text_bytes = sum(source.text_bytes for source in sources)
    return min(max(text_bytes // SHARDS, _SMALLEST), _LARGEST)


def divide(sources: Sequence[Source], shard_bytes: int) -> list[Part]:
    """Return the parts of the sources, in order.

    Args:
        sources: files.
        shard_bytes: bytes of text after which a shard ends; blocks that cannot be cut go beyond.
    """
    parts: list[Part] = []
    pieces: list[Piece] = []
    room = shard_bytes
    for number, source in enumerate(sources):
        start = 0
        for stop, size in _ends(source, shard_bytes, room):
            pieces.append(Piece(number, start, stop))
            start = stop
            room -= size
            if room <= 0:
                parts.append(Part(len(parts), tuple(pieces), shard_bytes - room))
                pieces, room = [], shard_bytes
    if pieces:
        parts.append(Part(len(parts), tuple(pieces), shard_bytes - room))
    return parts


def _ends(source: Source, shard_bytes: int, room: int) -> Iterator[tuple[int, int]]:
    """Ends of the pieces of a source, and their bytes; the first piece has `room` bytes."""
    if source.blocks is None:
        start = 0
        while start < source.text_bytes:
            stop = min(start + room, source.text_bytes)
            yield stop, stop - start
            start, room = stop, shard_bytes
        return
    taken = 0
    for block, size in enumerate(source.blocks):
        taken += size
        if taken >= room or block == len(source.blocks) - 1:
            yield block + 1, taken
            taken, room = 0, shard_bytes
