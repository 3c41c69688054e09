"""Products of blocks by position: which queries of one rank see which keys of another one.

A rank holds two chunks of the sequence (`ContextLayout.chunks`), so of the scores between its
queries and the keys of a rank there are four blocks. By positions alone each is seen in full, not
at all, along its diagonal, or in some other way (*mixed*). Neighbours that are alike make one
product. Under a causal mask in zig-zag order every pair of ranks needs one, of equal cost::

    keys of the rank itself     of a lower rank      of a higher rank
        causal  none                full  none           none  none
        full    causal              full  none           full  full

A window or documents cut finer, into *tiles*, of which those that see nothing are left out. Only
those that a border of a document or the edge of a window goes through need a mask. The padding at
the end is left out by whoever calls, where no causal mask hides it.

Here is arithmetic on integers; no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Seen = Literal["full", "causal", "mixed"]
Relation = Literal["all", "some", "none"]

SMALLEST_TILE = 128
"""Positions below which a kernel's call costs more than the scores that it leaves out."""
_TILES = 8
"""Tiles of a chunk where documents are told apart."""


@dataclass(frozen=True)
class Product:
    """Rectangle of scores between local queries and local keys, and what of it is seen."""

    rows: tuple[int, int]
    """First query, and the one behind the last, by place on the rank."""
    columns: tuple[int, int]
    """The same of the keys."""
    seen: Seen
    """``causal``: query ``i`` of the rectangle sees keys up to ``i``; ``mixed``: see the mask."""


@dataclass(frozen=True)
class Rule:
    """Which positions see which."""

    causal: bool
    """Whether a position sees itself and those before it only."""
    window: int | None
    """Number of positions that each one sees; without ``causal`` on both sides."""
    biased: bool = False
    """Whether every score gets an addend, so that no product goes without a mask."""

    def relation(self, rows: range, columns: range) -> Relation:
        """Relation of queries at some positions to keys at others."""
        if not rows or not columns:
            return "none"
        least, most = rows[0] - columns[-1], rows[-1] - columns[0]
        low = 0 if self.causal else (least if self.window is None else 1 - self.window)
        high = most if self.window is None else self.window - 1
        if most < low or least > high:
            return "none"
        return "all" if least >= low and most <= high else "some"


def tile_size(chunk: int, window: int | None, documents: bool) -> int:
    """Positions of a tile of a chunk."""
    size = chunk
    if window is not None:
        size = min(size, window)
    if documents:
        size = min(size, -(-chunk // _TILES))
    return min(chunk, max(size, SMALLEST_TILE))


Together = Callable[[range, range], Relation]
"""Function that tells which part of two tiles lies in the same documents."""


@lru_cache(maxsize=512)
def products(
    rows: tuple[range, ...], columns: tuple[range, ...], rule: Rule, tile: int
) -> tuple[Product, ...]:
    """Products between chunks of queries and chunks of keys.

    Args:
        rows: positions of the queries, in the order in which the rank holds them.
        columns: positions of the keys.
        rule: which positions see which.
        tile: positions of a tile.
    """
    if rows and rows == columns and _is_triangle(range(rows[0].start, rows[-1].stop), rule):
        places = 0, sum(map(len, rows))
        return (Product(places, places, "causal"),)
    return tuple(products_of_documents(rows, columns, rule, tile, lambda a, b: "all"))


def products_of_documents(
    rows: tuple[range, ...],
    columns: tuple[range, ...],
    rule: Rule,
    tile: int,
    together: Together,
) -> list[Product]:
    """The same, where documents hide some positions from others.

    Args:
        rows: positions of the queries.
        columns: positions of the keys.
        rule: which positions see which within a document.
        tile: positions of a tile.
        together: which part of two tiles lies in the same documents.
    """
    found: list[Product] = []
    placed = _tiles(columns, tile)
    for place, row in _tiles(rows, tile):
        for product in _row(place, row, placed, rule, together):
            above = next((p for p in found if _continues(p, product)), None)
            if above is None:
                found.append(product)
            else:
                found[found.index(above)] = replace(above, rows=(above.rows[0], product.rows[1]))
    return found


def _is_triangle(span: range, rule: Rule) -> bool:
    """Whether positions see exactly those before them in an ascending span."""
    wide = rule.window is None or len(span) <= rule.window
    return rule.causal and not rule.biased and wide


def _tiles(chunks: Sequence[range], tile: int) -> list[tuple[int, range]]:
    """Tiles of all chunks, each with its place on the rank."""
    found, place = [], 0
    for chunk in chunks:
        for start in range(0, len(chunk), tile):
            found.append((place + start, chunk[start : start + tile]))
        place += len(chunk)
    return found


def _row(
    place: int,
    row: range,
    columns: Sequence[tuple[int, range]],
    rule: Rule,
    together: Together,
) -> list[Product]:
    """Products of one tile of queries; neighbours that are alike are one."""
    rows = place, place + len(row)
    found: list[Product] = []
    for start, column in columns:
        seen = _seen(row, column, rule, together)
        if seen is None:
            continue
        end = start + len(column)
        last = found[-1] if found else None
        if last and last.seen == seen != "causal" and last.columns[1] == start:
            found[-1] = replace(last, columns=(last.columns[0], end))
        else:
            found.append(Product(rows, (start, end), seen))
    return found


def _seen(row: range, column: range, rule: Rule, together: Together) -> Seen | None:
    by_rule = rule.relation(row, column)
    if by_rule == "none":
        return None
    by_documents = together(row, column)
    if by_documents == "none":
        return None
    if by_documents == "all" and by_rule == "all" and not rule.biased:
        return "full"
    if by_documents == "all" and row == column and _is_triangle(row, rule):
        return "causal"
    return "mixed"


def _continues(last: Product, product: Product) -> bool:
    """Whether a product is the lower neighbour of a full one."""
    alike = last.seen == product.seen == "full" and last.columns == product.columns
    return alike and last.rows[1] == product.rows[0]
