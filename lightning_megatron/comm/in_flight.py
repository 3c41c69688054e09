"""Collectives in two halves that autograd understands, with something to compute in between.

`InFlight` starts a collective, and its ``wait`` returns the result. What is computed between the
two hides the transfer, in backward too: the gradient sets out where backward meets the ``wait``,
and is waited for where it meets the start. Autograd runs what was computed later first, so all
that lay between the halves in forward lies between them in backward.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_megatron.comm.collectives import start_gather, start_sum_scatter
from lightning_megatron.comm.operators import Waited
from lightning_megatron.topology.axis import Axis


class InFlight:
    """Collective under way.

    Args:
        x: input.
        forward: function that starts the collective on a tensor.
        backward: function that starts the one that makes the gradient of the input from that of
            the result.
    """

    def __init__(
        self, x: Tensor, forward: Callable[[Tensor], Waited], backward: Callable[[Tensor], Waited]
    ) -> None:
        self.backward = backward
        self._waited: Waited | None = None
        # Autograd keeps this object, which must not keep what `forward` knows.
        self._token: Tensor = _Start.apply(x, self, forward)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Finish the collective and return its result."""
        result: Tensor = _Wait.apply(self._token, self)  # type: ignore[no-untyped-call]
        return result

    def depart(self, start: Callable[[Tensor], Waited], x: Tensor) -> Tensor:
        """Start a collective; returns a tensor without elements, to lead to where it ends."""
        self._waited = start(x)
        return x.new_empty(0)

    def arrive(self) -> Tensor:
        """Finish that collective."""
        assert self._waited is not None
        waited, self._waited = self._waited, None
        return waited.wait()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: InFlight, start: Callable[[Tensor], Waited]) -> Tensor:
        ctx.flight = flight
        return flight.depart(start, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None, None]:
        return ctx.flight.arrive(), None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        return flight.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.depart(ctx.flight.backward, grad), None


def begin_all_gather(x: Tensor, axis: Axis, dim: int) -> InFlight:
    """Start `functional.all_gather` on an axis of more than one rank."""
    return InFlight(
        x,
        lambda part: start_gather(part, axis, dim),
        lambda grad: start_sum_scatter(grad.contiguous(), axis, dim),
    )
