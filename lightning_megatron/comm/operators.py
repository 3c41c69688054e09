"""Collectives as operators of compiled graphs.

A compiler cannot look into a collective: it starts in Python, works on memory that it was given and
ends when somebody waits. So where code is traced, `comm.collectives` puts two opaque operators into
the graph, one that *starts* the collective and returns a ticket, and one that *finishes* it and
returns a new tensor. When the graph runs they call the same functions as code that is not compiled:
bytes, the order in which ranks are added, the meter and whoever watches for hangs are the same, and
so is every bit of the result. (The operators of torch's own functional collectives do what the
backend does, and wait where no watcher sees them.)

An axis is an object, and a graph holds none: operators are told the name of its process group, by
which `topology.axis.axis_of` finds it.

*Overlap.* What a layer computes between a start and its wait lies between the two operators: a
column-parallel layer multiplies on while the gradient of its input is summed, in a graph as
outside. Compilers order operations as memory likes it and would wait at once, so the second
operator names, as if it needed them, the products that are to come before. No compiler is asked to
find more.

*Order.* All ranks must run their collectives in one order. In a graph it is the compiler's, which
may exchange what does not depend on each other. But it decides by the graph and by shapes, and tp
ranks, whose slices are equal, trace the same ones; where they differ (a constant, the mask of a
padded vocabulary), it is in no collective. Those along one path of activations depend on each other
anyway.

*Twice or not.* Where a graph is cut into forward and backward, what the forward has may be computed
once more in the backward, which each rank decides for itself, by a search whose ties it may break
in its own way. Of operators that it does not know it never decides so. In a block that is to be
recomputed every collective that the backward needs runs again, on all ranks alike, but for those
whose results are kept (`parallel.activations.selective`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.topology.axis import Axis, axis_of

NAMESPACE = "lightning_megatron"
_under_way: dict[int, "Waited"] = {}
"""Collectives by ticket, kept here as graphs hold only tensors and numbers."""
_numbers = itertools.count()


class Waited(Protocol):
    """Collective that has been started."""

    def wait(self, *after: Tensor) -> Tensor:
        """Finish the collective and return its result.

        Args:
            after: tensors that compiled code computes before it waits.
        """
        ...


class Traced:
    """Collective of a compiled graph.

    Args:
        name: name that was passed to `define`.
        x: input of this rank.
        axis: axis of the ranks that take part.
        dim: dim that the collective works along.
        after: tensor that is computed before. A collective of a backward that depends on no
            gradient would otherwise be merged with its twin in the forward.
    """

    def __init__(
        self, name: str, x: Tensor, axis: Axis, dim: int = 0, after: Tensor | None = None
    ) -> None:
        self._name = name
        self._x = x
        self._where = axis.key, dim
        self._ticket = _operator("start_" + name)(x, *self._where, after)

    def wait(self, *after: Tensor) -> Tensor:
        """Finish the collective and return its result."""
        finish = _operator("finish_" + self._name)
        # The input is named again so that its memory is not used anew before.
        y: Tensor = finish(self._ticket, self._x, *self._where, after)
        return y


def define(
    name: str,
    start: Callable[[Tensor, Axis, int], Waited],
    shape: Callable[[Sequence[int], int, int], Sequence[int]],
) -> None:
    """Define the two operators of a collective.

    Args:
        name: name of the collective.
        start: function that starts it; may write into its input.
        shape: function that returns the result's shape, from the input's shape, the size of the
            axis and the dim.
    """
    known = {"tags": torch.Tag.pt2_compliant_tag}
    where, kind = "Tensor x, str axis, int dim", "CompositeExplicitAutograd"
    started, finished = (f"{NAMESPACE}::{step}_{name}" for step in ("start", "finish"))
    torch.library.define(started, f"({where}, Tensor? after) -> Tensor", **known)
    torch.library.define(finished, f"(Tensor ticket, {where}, Tensor[] after) -> Tensor", **known)

    def run(x: Tensor, axis: str, dim: int, after: Tensor | None) -> Tensor:
        number = next(_numbers)
        _under_way[number] = start(x, axis_of(axis), dim)
        return torch.tensor(number, device="cpu")

    def finish(ticket: Tensor, x: Tensor, axis: str, dim: int, after: list[Tensor]) -> Tensor:
        return _under_way.pop(int(ticket)).wait().contiguous()

    def ticket_like(x: Tensor, axis: str, dim: int, after: Tensor | None) -> Tensor:
        return torch.empty((), dtype=torch.int64, device="cpu")

    def result_like(ticket: Tensor, x: Tensor, axis: str, dim: int, after: list[Tensor]) -> Tensor:
        return x.new_empty(tuple(shape(x.shape, axis_of(axis).size, dim)))

    torch.library.impl(started, kind, run)
    torch.library.impl(finished, kind, finish)
    torch.library.register_fake(started, ticket_like)
    torch.library.register_fake(finished, result_like)


def result_of(name: str) -> Any:
    """Return the operator that finishes a collective."""
    return _operator("finish_" + name).default


def _operator(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name)
