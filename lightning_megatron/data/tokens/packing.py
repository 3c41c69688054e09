"""Rows of equal length out of documents of any length.

A *row* is what a model is trained on at once, ``capacity`` tokens; a *piece* is a document, or a
part of one, in a row. Three ways of making rows:

* `best_fit`: documents are cut only if they are longer than a row. Such a document fills rows of
  its own; what is left of it, and every other document, goes into the row with the least room that
  it still fits into, longest first (best-fit decreasing; Ding et al., arXiv 2404.10830). All
  documents of a length are placed at once: rows are known by the room that they have left, so that
  the time is that of sorting numbers below ``capacity``, about 0.2 s per million documents.
* `concatenated`: documents one after the other, in their order, cut wherever a row is full. Fewest
  rows, and it needs no search, but a third of the documents may be cut.
* `one_each`: a row for each document, or for each ``capacity`` tokens of it; the rest is padding.

A token is trained on as the *label* of the one before it in its document, so that a document of
``n`` tokens has ``n - 1`` labels. A piece that is followed by more of its document takes the label
of its last token from there: each label is in exactly one row, wherever documents are cut. A single
token at the end of a document that has been cut, and a document of one token, have no label and go
into no row, but for `concatenated`, which leaves out nothing.

Pieces are kept in three arrays, 12 bytes each.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

PackName = Literal["best-fit", "concat", "none"]
"""Way of making rows: `best_fit`, `concatenated` or `one_each`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Contents of rows.

    Example:
        >>> packing = best_fit([5, 2, 3, 9], capacity=5)
        >>> [packing.row(i) for i in range(len(packing))]
        [[(0, 0, 5)], [(3, 5, 9)], [(2, 0, 3), (1, 0, 2)], [(3, 0, 5)]]
    """

    capacity: int
    """Number of tokens of a full row."""
    offsets: NDArray[np.int64]
    """First piece of each row, and the number of all pieces."""
    documents: NDArray[np.int32]
    """Document of each piece."""
    starts: NDArray[np.int32]
    """First token of each piece, counted from the beginning of its document."""
    stops: NDArray[np.int32]
    """Token after the last of each piece."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """Document, first token and token after the last of each piece of a row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        pieces = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        columns = (self.documents[pieces], self.starts[pieces], self.stops[pieces])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows, without padding."""
        return int((self.stops - self.starts).sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens / max(len(self) * self.capacity, 1)

    @property
    def documents_cut(self) -> int:
        """Number of documents with more than one piece."""
        firsts = np.bincount(self.documents[self.starts > 0])
        return int(np.count_nonzero(firsts))


def pack(how: PackName, lengths: ArrayLike, capacity: int) -> Packing:
    """Make rows in the way of this name.

    Args:
        how: name of it.
        lengths: number of tokens of each document.
        capacity: number of tokens of a row.
    """
    return PACKINGS[how](np.asarray(lengths), capacity)


def best_fit(lengths: ArrayLike, capacity: int) -> Packing:
    """Make rows by best fit, in which only documents that fit into no row are cut."""
    documents, starts, stops, full = _pieces(np.asarray(lengths), capacity)
    sizes = stops - starts
    order = _argsort(sizes)[::-1]
    rows_of_sorted = _place(np.bincount(sizes, minlength=capacity + 1), capacity)
    by_row = _argsort(rows_of_sorted)
    kept = order[by_row]
    counts = np.bincount(rows_of_sorted)
    return _with_full_rows((documents[kept], starts[kept], stops[kept], counts), full, capacity)


def concatenated(lengths: ArrayLike, capacity: int) -> Packing:
    """Make rows of documents one after the other, cut wherever a row is full."""
    lengths = np.asarray(lengths).astype(np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    documents = np.flatnonzero(lengths).astype(np.int32)
    ends = ends[documents]
    begins = ends - lengths[documents]
    first = begins // capacity
    rows = (ends - 1) // capacity - first + 1  # that a document is in
    number = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    row = np.repeat(first, rows) + number
    begins, ends = np.repeat(begins, rows), np.repeat(ends, rows)
    return Packing(
        capacity=capacity,
        offsets=np.append(0, np.cumsum(np.bincount(row))).astype(np.int64),
        documents=np.repeat(documents, rows),
        starts=(np.maximum(begins, row * capacity) - begins).astype(np.int32),
        stops=(np.minimum(ends, (row + 1) * capacity) - begins).astype(np.int32),
    )


def one_each(lengths: ArrayLike, capacity: int) -> Packing:
    """Make rows with a document each; one that is longer than a row takes several."""
    *pieces, full = _pieces(np.asarray(lengths), capacity)
    counts = np.ones(len(pieces[0]), dtype=np.int64)
    return _with_full_rows((*pieces, counts), full, capacity)


PACKINGS: dict[str, Callable[[NDArray[Any], int], Packing]] = {
    "best-fit": best_fit,
    "concat": concatenated,
    "none": one_each,
}
"""Functions that make rows."""


def _pieces(lengths: NDArray[Any], capacity: int) -> tuple[Any, Any, Any, Any]:
    """Documents, starts and stops of what is shorter than a row, and documents by full rows.

    A document has ``length - 1`` labels; its first ``(length - 1) // capacity`` rows are full.
    """
    lengths = lengths.astype(np.int32, copy=False)
    full = np.maximum((lengths - 1) // capacity, 0)
    starts = full * capacity
    documents = np.flatnonzero(lengths - starts > 1).astype(np.int32)
    return documents, starts[documents], lengths[documents], full


def _with_full_rows(pieces: tuple[Any, Any, Any, Any], full: Any, capacity: int) -> Packing:
    """Rows of pieces, and after them the rows that hold a part of one document each."""
    documents, starts, stops, counts = pieces
    long = np.flatnonzero(full).astype(np.int32)
    rows = full[long]
    number = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    begins = (number * capacity).astype(np.int32)
    counts = np.concatenate([counts, np.ones(len(begins), dtype=np.int64)])
    return Packing(
        capacity=capacity,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        documents=np.concatenate([documents, np.repeat(long, rows)]),
        starts=np.concatenate([starts, begins]),
        stops=np.concatenate([stops, begins + np.int32(capacity)]),
    )


def _place(counts: NDArray[Any], capacity: int) -> NDArray[np.int32]:
    """Row of each piece, the pieces ordered by falling length.

    Args:
        counts: number of pieces of each length.
        capacity: room of an empty row.
    """
    row_of = np.empty(int(counts.sum()), dtype=np.int32)
    rooms: list[int] = []  # that any row has left, in order
    rows: dict[int, list[NDArray[np.int32]]] = {}  # with so much room
    done = opened = 0

    def leave(room: int, which: NDArray[np.int32]) -> None:
        if room > 1 and len(which):  # no piece is shorter than 2
            if room not in rows:
                insort(rooms, room)
            rows.setdefault(room, []).append(which)

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                which = rows[room].pop()
                if not rows[room]:
                    del rows[room], rooms[at]
            else:
                room = capacity
                which = np.arange(opened, opened - (-left // (room // length)), dtype=np.int32)
                opened += len(which)
            if left == 1:
                row_of[done] = which[0]
                leave(room - length, which[:1])
                leave(room, which[1:])
                done += 1
                break
            each = room // length
            needed = -(-left // each)
            leave(room, which[needed:])
            which = which[:needed]
            placed = min(left, each * len(which))
            row_of[done : done + placed] = np.repeat(which, each)[:placed]
            whole, rest = divmod(placed, each)
            leave(room - each * length, which[:whole])
            if rest:
                leave(room - rest * length, which[whole:])
            done += placed
            left -= placed
    return row_of


def _argsort(numbers: NDArray[Any]) -> NDArray[Any]:
    """Stable order of numbers from 0 on, 16 bits at a time: numpy sorts these in linear time."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")  # their lower bits
    if len(numbers) and int(numbers.max()) >> 16:
        higher = (numbers >> 16).astype(np.uint16)[order]
        order = order[np.argsort(higher, kind="stable")]
    return order
