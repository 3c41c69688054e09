"""Gradients that users make by themselves, and not by the backward that the strategy runs.

There are two ways, and after either all ranks are to have the gradient of one process:

* ``loss.backward()`` in place of ``self.manual_backward(loss)``, or a further one in a hook. The
  first gradient that arrives begins a reduction like that of the strategy's own backward, and the
  end of the run of autograd's engine ends it, as under ``DistributedDataParallel``. Under ZeRO 3
  FSDP2 reduces, whoever calls; the rest (unmanaged parameters, sums over tp) is completed here.
* ``p.grad = g``, where ``g`` comes from ``torch.autograd.grad`` or is made of such. The parameter
  remembers it (`whole.divided_gradient`). Whoever looks at its gradient next, clips or steps has
  the gradients of all averaged first. A mean of what is equal on all ranks already is the same, so
  ``p.grad = p.grad / 2`` costs a reduction and is right. So is a change in place of what was
  assigned, or filled with zeros by ``zero_grad``. A change in place of what a backward has made
  stays what it is, and costs nothing.

Ranks know alike what there is to reduce, as they run the same code.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.dtensor import stamps
from lightning_megatron._torch.graphs import (
    at_end_of_backward,
    backward_number,
    gradient_accumulator,
)
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.data_parallel import ZeroDataParallel
from lightning_megatron.zero.gradients import GradientSet, ParameterRole


@memory_of_parts
class GradientsByHand:
    """Completes gradients that users make by themselves.

    Args:
        gradients: those of all parameters of this rank.
        data: averages them.
        accumulates: whether a later backward is to reduce what there is.
        check: raises where what users write, ``loss.backward()`` or ``p.grad = g``, cannot be made
            right.
        ended: called when such a backward has ended.

    Attributes:
        is_paused: how many times `paused` is entered.
    """

    def __init__(
        self,
        gradients: GradientSet,
        data: ZeroDataParallel,
        *,
        accumulates: Callable[[], bool],
        check: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        self._gradients = gradients
        self._data = data
        self._accumulates = accumulates
        self._check = check
        self._ended = ended
        self.is_paused = 0
        self._backward: int | None = None
        """Number of the backward that is being reduced."""
        self._written: dict[int, tuple[Tensor, _Stamp | None]] = {}
        """Parameters whose gradients users have written, and how these were when averaged last."""
        self._roles: Sequence[ParameterRole] = ()
        self._unwatched: list[nn.Parameter] = []
        """Parameters that have not been trained yet."""
        self._hooks: dict[int, tuple[Any, Any]] = {}
        """Where the gradients of parameters arrive, and the handles of the hooks there."""
        gradients.before_use = self.average
        data.tell_backwards(_Arrival(weakref.ref(self)))

    def close(self) -> None:
        """Take the hooks off."""
        self._gradients.before_use = None
        self._data.tell_backwards(None)
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the strategy itself sees to the gradients of backwards."""
        self.is_paused += 1
        try:
            yield
        finally:
            self.is_paused -= 1

    # Backwards -----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Learn of gradients of parameters that are trained from now on."""
        if self._roles is not self._gradients.roles:
            self._roles = self._gradients.roles
            whole = (p for p in self._gradients.parameters if not isinstance(p, DTensor))
            self._unwatched = [p for p in whole if id(p) not in self._hooks]
        for parameter in [p for p in self._unwatched if p.requires_grad]:
            node = gradient_accumulator(parameter)
            handle = node.register_prehook(_Arrival(weakref.ref(self)))
            self._hooks[id(parameter)] = node, handle
        self._unwatched = [p for p in self._unwatched if not p.requires_grad]

    def arrived(self) -> None:
        """A gradient arrives, and is not yet added to that which is there."""
        number = backward_number()
        if number == self._backward:
            return
        if self._accumulates():
            self._gradients.set_aside()
            return
        self._check("loss.backward()")
        if self._backward is not None:  # one within another, or one that has failed
            self._end()
        self._backward = number
        at_end_of_backward(self._end)
        self._gradients.set_aside()
        self._data.begin()
        self._data.before_backward()

    def _end(self) -> None:
        if self._backward is not None:
            self._backward = None
            self._written.clear()
            with torch.no_grad():
                self._data.finish()
                self._gradients.finish()
            self._ended()

    # Assignments ---------------------------------------------------------------------------------

    def wrote(self, weight: Tensor, value: Tensor | None) -> None:
        """Note that a parameter was given another gradient."""
        if value is None:
            self._written.pop(id(weight), None)
        else:
            self._written[id(weight)] = weight, None

    def cleared(self) -> None:
        """Note that gradients were filled with zeros, to which somebody may add."""
        self._note_seen(p for p in self._gradients.assignable if p.grad is not None)

    def waits(self, weight: Tensor) -> bool:
        """Whether nobody has averaged what a user has written to the gradient of a parameter."""
        known = self._written.get(id(weight))
        return known is not None and _stamp(weight) not in (None, known[1])

    def forget(self) -> None:
        """A reduction has seen all that was written."""
        self._written.clear()

    def average(self) -> None:
        """Average what was written; collective where there is any."""
        if not self._written or self._accumulates() or self.is_paused:
            return
        written = [weight for weight, _ in self._written.values()]
        if any(map(self.waits, written)):
            self._check("p.grad = g")
            with torch.no_grad():
                self._data.average_again()
                self._gradients.average_unmanaged()
            self._note_seen(written)

    def _note_seen(self, weights: Iterable[Tensor]) -> None:
        """Note how gradients are that are written by hand, and the mean at this moment."""
        self._written.update({id(weight): (weight, _stamp(weight)) for weight in weights})


_Stamp = tuple[int, int]


def _stamp(weight: Tensor) -> _Stamp | None:
    """What differs when a gradient has changed; None without one."""
    gradient = weight.grad
    return None if gradient is None else stamps([gradient])[0]


@dataclass(frozen=True)
class _Arrival:
    """Hook on the node of a parameter, or on a reduction; holds nothing alive.

    torch keeps it where Python's garbage collector does not look.
    """

    owner: "weakref.ref[GradientsByHand]"

    def __call__(self, *_: Any) -> None:
        if (owner := self.owner()) is not None and not owner.is_paused:
            owner.arrived()
