"""Which tiles of a sequence lie in the same documents, and masks of products by position.

Documents are numbered by whole ids ``[b, s]``, alike on all ranks. Of each tile the smallest and
the largest id are enough to tell most pairs: disjoint intervals see nothing, and a single equal id
sees all. For what lies between there is a mask. The padding behind the sequence is a document of
its own.

The ids are read on the host, once for the tensor that holds them; on a GPU this waits for the
device.
"""

import torch
from torch import Tensor

from lightning_megatron.layers.context_attention.plan import Relation, Rule
from lightning_megatron.layers.packed_documents import remembered

Extent = tuple[tuple[int, int], ...]
"""Smallest and largest id of a tile in every sequence of the batch."""


class Documents:
    """Documents of the sequences of a batch.

    Args:
        ids: whole ids ``[b, length]``.
        padded: positions after the sequence was filled up.
        chunk: positions of a chunk.
        tile: positions of a tile of it.
    """

    def __init__(self, ids: Tensor, padded: int, chunk: int, tile: int) -> None:
        ids = ids.long()
        missing = padded - ids.shape[1]
        if missing:
            own = ids.min() - 1
            ids = torch.cat([ids, own.expand(ids.shape[0], missing)], 1)
        self.ids = ids
        self._chunk, self._tile = chunk, tile
        tiles = -(-chunk // tile)
        by_chunk = torch.unflatten(ids, 1, (-1, chunk))
        short = tiles * tile - chunk
        if short:
            by_chunk = torch.cat([by_chunk, by_chunk[..., -1:].expand(-1, -1, short)], -1)
        by_tile = torch.unflatten(by_chunk, 2, (tiles, tile)).flatten(1, 2)
        low, high = torch.stack([by_tile.amin(-1).t(), by_tile.amax(-1).t()]).tolist()
        self._tiles = tiles
        self._extents: list[Extent] = [
            tuple(zip(*both, strict=True)) for both in zip(low, high, strict=True)
        ]

    def together(self, rows: range, columns: range) -> Relation:
        """Which part of two tiles lies in the same documents."""
        pairs = list(zip(self._extent(rows), self._extent(columns), strict=True))
        if all(a[1] < b[0] or b[1] < a[0] for a, b in pairs):
            return "none"
        return "all" if all(a == b and a[0] == a[1] for a, b in pairs) else "some"

    def _extent(self, tile: range) -> Extent:
        chunk, place = divmod(tile.start, self._chunk)
        return self._extents[chunk * self._tiles + place // self._tile]


def documents_in(ids: Tensor, padded: int, chunk: int, tile: int) -> Documents:
    """Documents of the sequences of a batch, which all calls with the same ``ids`` share."""
    key = "tiles", padded, chunk, tile
    return remembered(ids, key, lambda: Documents(ids, padded, chunk, tile))


def seen_mask(
    rows: Tensor, columns: Tensor, rule: Rule, documents: Documents | None, key_length: int
) -> Tensor | None:
    """Mask ``[b | 1, 1, s, t]``, True where a position sees another one; None: all do.

    Args:
        rows: positions of the queries.
        columns: positions of the keys.
        rule: which positions see which within a document.
        documents: documents of both, if there are any.
        key_length: positions of the keys' sequence; behind it is padding.
    """
    distance = rows[:, None] - columns[None, :]
    parts = []
    if rule.causal:
        parts.append(distance >= 0)
    elif rule.window is not None:
        parts.append(distance > -rule.window)
    if rule.window is not None:
        parts.append(distance < rule.window)
    if not rule.causal and int(columns[-1]) >= key_length:
        parts.append((columns < key_length)[None, :])
    seen: Tensor | None = None
    for part in parts:
        seen = part if seen is None else seen & part
    if documents is not None:
        same = documents.ids[:, rows, None] == documents.ids[:, None, columns]
        seen = same if seen is None else same & seen
        return seen.unsqueeze(1)
    return None if seen is None else seen[None, None]
