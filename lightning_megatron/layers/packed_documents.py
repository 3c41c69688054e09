"""Several documents in one row of a batch, none of which sees another.

Rows of equal length are filled with documents one after the other, so that no position is wasted on
padding (Krell et al., arXiv 2107.02027). ``documents`` ``[b, s]`` says which is which: neighbours
with equal numbers belong to one document, whatever the numbers are. A document that comes back
later in the row is another one. Attention is block-diagonal then, and positions start at 0 in every
document, so that the losses are those of the same documents in rows of their own.

What follows from a tensor ``documents`` is computed once and kept as long as the tensor lives
(`remembered`). In particular the lengths, which kernels for sequences of many lengths must know,
are read from the device once: asking in every layer would stop it.

Legend: b batch, s sequence.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatron.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class DocumentBounds:
    """Places of documents in the rows of a batch, one row after the other."""

    sizes: list[int]
    """Length of each document."""
    starts: Tensor
    """First position of each document, and the end of the last: int32 ``[documents + 1]``."""

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max(self.sizes)


def documents_of(lengths: Sequence[Sequence[int]], s: int) -> Tensor:
    """Make the numbers ``[b, s]`` of documents from their lengths.

    What the documents of a row leave over is a document of its own, such as padding.

    Args:
        lengths: lengths of the documents of each row.
        s: positions of a row.

    Raises:
        ConfigError: the documents of a row are longer than the row.

    Example:
        >>> documents_of([[2, 3], [4]], 5)
        tensor([[0, 0, 1, 1, 1],
                [0, 0, 0, 0, 1]])
    """
    rows = []
    for row, sizes in enumerate(lengths):
        left = s - sum(sizes)
        if left < 0 or min(sizes, default=0) < 0:
            raise ConfigError(
                f"lengths[{row}]={list(sizes)}, s={s}: lengths must not be negative, and their sum "
                f"at most s; nearest valid: s={max(sum(sizes), s)}"
            )
        numbers = torch.arange(len(sizes) + 1)
        rows.append(numbers.repeat_interleave(torch.tensor([*sizes, left])))
    return torch.stack(rows)


def numbered(documents: Tensor) -> Tensor:
    """Number the documents of each row from 0 on, so that none has another's number."""

    def make() -> Tensor:
        changes = documents[:, 1:] != documents[:, :-1]
        return F.pad(changes.cumsum(1), (1, 0))

    return remembered(documents, "numbers", make)


def restarted_positions(documents: Tensor) -> Tensor:
    """Positions ``[b, s]`` that start at 0 in every document."""

    def make() -> Tensor:
        place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
        changes = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        return place - (place * changes).cummax(1).values

    return remembered(documents, "positions", make)


def bounds(documents: Tensor) -> DocumentBounds:
    """Find where documents begin; waits for the device the first time."""

    def make() -> DocumentBounds:
        changes = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        starts = F.pad(changes.flatten().nonzero().flatten(), (0, 1), value=documents.numel())
        return DocumentBounds(starts.diff().tolist(), starts.to(torch.int32))

    return remembered(documents, "bounds", make)


def remembered(documents: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """Compute something of ``documents`` once, until the tensor is written to or given up.

    Args:
        documents: tensor of which it is a function.
        key: name of it.
        make: function that computes it.
    """
    if torch.compiler.is_compiling() or documents.is_inference():
        return make()
    version, known = _KEPT.get(documents, (None, {}))
    if version != documents._version:
        known = {}
        _KEPT[documents] = documents._version, known
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


def check_documents(documents: Tensor, b: int, s: int) -> None:
    """Raise a `ConfigError` if ``documents`` do not fit a batch."""
    if tuple(documents.shape) != (b, s):
        raise ConfigError(
            f"documents of shape {tuple(documents.shape)}: must be one number for each of the "
            f"[{b}, {s}] positions; nearest valid: documents_of(lengths, {s})"
        )


_KEPT: Any = WeakTensorKeyDictionary()
