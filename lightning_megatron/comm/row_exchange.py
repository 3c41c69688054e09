"""Exchange of rows in which every rank sends another number of them to every other rank.

The all-to-all of a mixture of experts: numbers of rows follow from data, and may be 0. Each rank's
rows lie in the order of the ranks they go to; those that arrive lie in the order of the ranks they
come from, each rank's in its own order. So the result depends on no order of arrival. The gradient
is the opposite exchange.

A rank sends ``rows x bytes of a row`` for the rows that go to others. Its own are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.comm.in_flight import InFlight
from lightning_megatron.topology.axis import Axis


@dataclass(frozen=True)
class RowExchange:
    """Numbers of rows that this rank sends to each rank of an axis, and gets from it."""

    axis: Axis
    """Ranks that take part."""
    sent: tuple[int, ...]
    """Rows for each of them, in axis order."""
    received: tuple[int, ...]
    """Rows from each of them, in axis order."""

    def opposite(self) -> "RowExchange":
        """Exchange that sends every row back."""
        return RowExchange(self.axis, self.received, self.sent)

    def begin(self, x: Tensor) -> InFlight:
        """Start to send rows; all ranks of the axis must.

        Args:
            x: rows ``[sum(sent), ...]``, in the order of the ranks that they go to.

        Returns:
            Rows that come, ``[sum(received), ...]``.
        """
        return InFlight(x, self.start, self.opposite().start)

    def start(self, x: Tensor, finish: Callable[[Tensor], Tensor] | None = None) -> Pending:
        """Start to send rows, unknown to autograd.

        Args:
            x: rows.
            finish: function that makes the result of the rows that come.
        """
        source = x.contiguous()
        assert len(source) == sum(self.sent)
        rows = x.new_empty((sum(self.received), *x.shape[1:]))
        row = x[:1].numel() * x.element_size()
        self.axis.meter.to_each([n * row for n in self.sent], self.axis.ranks)
        work = dist.all_to_all_single(
            rows,
            source,
            list(self.received),
            list(self.sent),
            group=self.axis.group,
            async_op=True,
        )
        return Pending(
            work, source, lambda: rows if finish is None else finish(rows), self.axis.meter
        )


class NumberedRows:
    """Rows under way that have integers with them, in one message.

    Args:
        exchange: numbers of rows.
        x: rows ``[n, c]``, float32 or wider.
        numbers: integers ``[n, d]`` below 2^24; they travel in the format of ``x``.
    """

    def __init__(self, exchange: RowExchange, x: Tensor, numbers: Tensor) -> None:
        assert torch.finfo(x.dtype).bits >= 32
        self._width, self._numbers = x.shape[1], numbers
        back = exchange.opposite()
        self._flight = InFlight(
            x,
            lambda rows: exchange.start(torch.cat((rows, numbers.to(x.dtype)), 1), self._parted),
            back.start,
        )

    def _parted(self, both: Tensor) -> Tensor:
        self._numbers = both[:, self._width :].to(self._numbers.dtype)
        return both[:, : self._width].contiguous()

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the rows that came, and their integers."""
        return self._flight.wait(), self._numbers


def exchange_counts(counts_pn: Tensor, axis: Axis) -> Tensor:
    """Send integers ``counts_pn[r]`` to each rank ``r``; returns ``[p, n]``, by sender."""
    one = (1,) * axis.size
    return RowExchange(axis, one, one).start(counts_pn).wait()
