"""Part that a cp rank has of a whole tensor, behind a `whole.context_tensor.ContextTensor`.

The part holds the rows of this rank's positions, without padding, as ``[b, rows, ...]``. The whole
tensor is ``[b, n, ...]`` for the positions from ``start`` up to ``stop``, or ``[b n, ...]`` (as
losses take it), or ``[b, c, n]`` (as losses of images do).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal
from weakref import ReferenceType

import torch
from torch import Tensor

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass
from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.comm.functional import gather_from
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.context_rows import Rows, join_rows, keep_rows, own_rows, sum_rows
from lightning_megatron.whole.splits import marked, own_part, split_of

Form = Literal["rows", "flat", "columns"]
"""Whole tensor as ``[b, n, ...]``, ``[b n, ...]`` or ``[b, c, n]``."""


@dataclass(frozen=True)
class Place:
    """Positions of a whole tensor, and who has them."""

    layout: ContextLayout
    """Split of the sequence."""
    axis: Axis
    """cp axis."""
    start: int
    """First position."""
    stop: int
    """Position behind the last."""
    form: Form = "rows"
    """Order of the dims."""
    residual: Axis | None = None
    """Axis of the tp ranks among which sequence parallelism divides each part once more."""
    may_gather: bool = True
    """Whether a part that is divided among tp ranks is gathered where somebody reads it."""
    said: set[str] = field(default_factory=set, compare=False, repr=False)
    """Functions of which the log already says that they gathered."""

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """Positions that each cp rank holds, counted from ``start``."""
        ranks = range(self.layout.cp)
        return tuple(own_rows(self.layout, rank, self.start, self.stop) for rank in ranks)

    @property
    def own(self) -> Rows:
        """Positions of this rank."""
        return self.rows[self.axis.rank]

    @property
    def count(self) -> int:
        """Number of positions of the whole."""
        return self.stop - self.start

    @property
    def is_complete(self) -> bool:
        """Whether the whole has every position of the sequence, in dim 1."""
        return self.form == "rows" and (self.start, self.stop) == (0, self.layout.length)

    @property
    def dim(self) -> int:
        """Dim of the whole that has the positions."""
        return {"flat": 0, "rows": 1, "columns": 2}[self.form]

    def shape(self, part: Tensor) -> torch.Size:
        """Shape of the whole."""
        batch, rest = part.shape[0], part.shape[2:]
        if self.form == "flat":
            return torch.Size((batch * self.count, *rest))
        if self.form == "columns":
            return torch.Size((batch, *rest, self.count))
        return torch.Size((batch, self.count, *rest))

    def between(self, first: int, stop: int) -> "Place":
        """Return the place of the positions from ``first`` up to ``stop``, counted from here."""
        return replace(self, start=self.start + first, stop=self.start + max(first, stop))

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Keep this rank's rows of a whole tensor."""
        return keep_rows(whole, self.own, dim)


class ContextPart:
    """A part, and the whole once it was gathered.

    Args:
        part: rows of this rank, a plain tensor or a `SplitTensor`; under sequence parallelism of a
            residual stream this rank's part of it, with padding.
        place: their place in the whole.

    Attributes:
        is_settled: whether the whole was changed, or watched, so that only the whole counts.
        is_used: whether something that learns was computed from the part.
        sharers: tensors that have one memory in one process, where some are views of another.
        node: autograd node of the `ContextTensor` when it was made. It has another one where an
            autograd function of the user's returned it.
    """

    node: Any = None

    def __init__(self, part: Tensor, place: Place) -> None:
        self.part = part
        self.place = place
        self.is_settled = False
        self.is_used = False
        self.sharers: list[ReferenceType[Tensor]] = []
        self._whole: Tensor | None = None

    def is_behind(self, x: Tensor) -> bool:
        """Whether the gradient of ``x`` is that of this part."""
        return x.grad_fn is self.node

    def in_form(self) -> Tensor:
        """Return the part with the last dims of the whole, from that of the positions on."""
        return self.part.transpose(1, 2) if self.place.form == "columns" else self.part

    def local(self) -> Tensor:
        """Return the part as layers inside of a `PipelineSequential` take it, with padding."""
        x = own_part(self.part)
        missing = self.place.layout.local - x.shape[1]
        if self.place.residual is not None or not missing:
            return x
        return torch.cat((x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))), 1)

    def is_part(self, layout: ContextLayout) -> bool:
        """Whether `local` is what this layout's ranks have, with all features."""
        return self.is_one_part and self.place.residual is None and self.place.layout == layout

    @property
    def is_one_part(self) -> bool:
        """Whether `local` is one rank's part of a whole sequence, with all features."""
        return split_of(self.part) is None and not self.is_settled and self.place.is_complete

    def whole_of(self, x: Tensor) -> Tensor:
        """Gather ``x``; all cp ranks must call this. Over tp it may still be split."""
        if self.is_behind(x):
            return self.whole()
        with DisableTorchFunctionSubclass():
            return x.clone()

    def whole(self) -> Tensor:
        """Gather the whole of the part (see `whole_of`)."""
        learns = self.part.requires_grad and torch.is_grad_enabled()
        if self._whole is None or (learns and not self._whole.requires_grad):
            self._whole = self._joined()
        return self._whole

    def _joined(self) -> Tensor:
        x, place, features = own_part(self.part), self.place, split_of(self.part)
        if place.axis.size > 1 and place.axis.group is None:
            raise ConfigError(
                "a tensor of one of the parts of sequences was kept from a run that has ended; "
                "nearest valid: lightning_megatron.layers.whole(x) while the run lasts"
            )
        if place.residual is not None:
            x = gather_from(x, place.residual, 1)
        x = join_rows(x, place.rows, place.axis, 1)
        if place.form == "flat":
            x = x.flatten(0, 1)
        elif place.form == "columns":
            x = x.transpose(1, 2)
        if features is None:
            return x
        moved = {"rows": features.dim, "flat": features.dim - 1, "columns": 1}[place.form]
        return marked(x, type(self.part), features.topology, moved)

    def gradient(self, of_whole: Tensor) -> Tensor:
        """Sum a gradient of the whole over the ranks, and keep that of the part."""
        part, place = self.part, self.place
        x, features = of_whole, split_of(part)
        if place.form == "flat":
            x = x.reshape(part.shape[0], place.count, *x.shape[1:])
        elif place.form == "columns":
            x = x.transpose(1, 2)
        if features is not None:
            x = own_slice(x, features.axis, features.dim)
        held = own_part(part).shape[1] * (1 if place.residual is None else place.residual.size)
        x = sum_rows(x, place.rows, place.axis, 1, held)
        return x if place.residual is None else own_slice(x, place.residual, 1).contiguous()
