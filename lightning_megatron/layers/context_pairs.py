"""Number of pairs of positions that attention multiplies, by cp rank.

The time of attention goes with the pairs of a query and a key that see each other. Under a causal
mask position ``i`` sees ``i + 1``, so the zig-zag order gives all ranks equally many. With packed
documents a position sees its own document only, and a rank that holds the end of a long document
has more to do than one that holds short ones; at every exchange the others wait for it.

Legend: b batch, s sequence.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.topology.context_layout import ContextLayout


def seen_by_position(
    length: int,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Count the keys that each query sees, ``[b, s]`` (``[1, s]`` without documents).

    Args:
        length: positions of the whole sequence.
        causal: whether a position sees none behind it.
        window: number of positions that each one sees before it (and, without ``causal``, behind
            it), itself included; all when None.
        documents: numbers of packed documents, ``[b, s]``; a change begins another one.

    >>> seen_by_position(5, window=3).tolist()
    [[1, 2, 3, 3, 3]]
    >>> seen_by_position(5, documents=torch.tensor([[4, 4, 4, 0, 0]])).tolist()
    [[1, 2, 3, 1, 2]]
    """
    device = None if documents is None else documents.device
    place = torch.arange(length, device=device).unsqueeze(0)
    first, last = torch.zeros_like(place), torch.full_like(place, length - 1)
    if documents is not None:
        changes = documents[:, 1:] != documents[:, :-1]
        first = (place * F.pad(changes, (1, 0))).cummax(1).values
        ends = place.masked_fill(~F.pad(changes, (0, 1), value=True), length)
        last = ends.flip(1).cummin(1).values.flip(1)
    if causal:
        last = torch.minimum(last, place)
    if window is not None:
        first = torch.maximum(first, place - (window - 1))
        last = torch.minimum(last, place + (window - 1))
    return last - first + 1


def pairs_by_rank(seen: Tensor, layout: ContextLayout) -> list[int]:
    """Add up the pairs of each cp rank, over the samples of a batch.

    Args:
        seen: result of `seen_by_position`.
        layout: split of the sequence; its padding attends to nothing.

    >>> layout = ContextLayout(length=8, cp=2)
    >>> pairs_by_rank(seen_by_position(8), layout)
    [18, 18]
    >>> pairs_by_rank(seen_by_position(8), ContextLayout(length=8, cp=2, order="contiguous"))
    [10, 26]
    """
    by_position = F.pad(seen.sum(0), (0, layout.padded - layout.length)).tolist()
    return [
        sum(sum(by_position[c.start : c.stop]) for c in layout.chunks(rank))
        for rank in range(layout.cp)
    ]
