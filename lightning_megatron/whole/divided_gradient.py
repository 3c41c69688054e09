"""Whole weights whose gradients lie in rows with the ranks that own these (ZeRO 1 and 2).

While a run lasts, the class of such a parameter has a property ``grad``. In user's code a look at
it makes the mean whole, on every rank, and from then on it is what lies in memory::

    norm = self.up.weight.grad.norm()     # all ranks that divide the weight must ask
    self.up.weight.grad.mul_(0.5)         # the step is half as long
    self.up.weight.grad = None            # there is none

What users assign to it is noted, and averaged before it is looked at or used
(`zero.gradients_by_hand`).

Nobody pays for it who does not look: functions of torch take such a parameter as any other, as
there is no ``__torch_function__``. Optimizers and this library read what this rank has in memory
(`whole.memory`), and so do compilers.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass
from lightning_megatron.whole.memory import sees_memory

_MEMORY: Any = Tensor.grad
_KNOWN = ("_rows", "_by_hand")
_get, _set = _MEMORY.__get__, _MEMORY.__set__  # here, as they are called for every parameter


class GradientRows(Protocol):
    """Rows of one parameter that this rank owns."""

    parameter: nn.Parameter
    gradient: Tensor | None

    def show_gradient(self) -> None:
        """Make ``parameter.grad`` whole of what the ranks hold in ``gradient``; collective."""
        ...


class GradientsByHand(Protocol):
    """Sees to gradients that users have assigned."""

    def wrote(self, weight: Any, value: Tensor | None) -> None:
        """Note that a parameter was given another gradient."""
        ...

    def waits(self, weight: Any) -> bool:
        """Whether nobody has averaged the gradient that a parameter was given."""
        ...

    def average(self) -> None:
        """Average what was written; collective."""
        ...


class LooksWhole:
    """Base of the classes of parameters whose gradient may lie in rows, or wait for its mean."""

    _rows: GradientRows | None = None
    _by_hand: GradientsByHand | None = None

    @property
    def grad(self) -> Tensor | None:
        """The whole mean gradient, or in this library's code what is in memory."""
        rows = self._rows
        if rows is not None and rows.gradient is not None and not sees_memory():
            rows.show_gradient()
        by_hand = self._by_hand
        if by_hand is not None and not sees_memory() and by_hand.waits(self):
            by_hand.average()
        found: Tensor | None = _get(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if sees_memory():
            _set(self, value)
            return
        rows, by_hand = self._rows, self._by_hand
        is_new = by_hand is not None and value is not _get(self)
        _set(self, _as_held(self, value))
        if rows is not None:
            rows.gradient = None
        if by_hand is not None and is_new:
            by_hand.wrote(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def gradient_format(weight: nn.Parameter) -> torch.dtype | None:
    """Number format of a weight's gradient, also of one that lies in rows; None without one."""
    gradient: Tensor | None = _get(weight)
    rows = weight._rows if isinstance(weight, LooksWhole) else None
    if gradient is None and rows is not None and rows.gradient is not None:
        return weight.grad_dtype or weight.dtype
    return None if gradient is None else gradient.dtype


def _as_held(weight: Any, value: Tensor | None) -> Tensor | None:
    """A gradient of the format of a narrowed weight, in the wide one in which it is held."""
    if value is None:
        return None
    with DisableTorchFunctionSubclass():
        held_in = weight.grad_dtype
        is_narrow = held_in is not None and value.dtype == weight.dtype != held_in
    return value.to(held_in) if is_narrow else value


class DividedWeight(LooksWhole, nn.Parameter):
    """Parameter, whole, with a gradient that may lie in rows; copies of it are plain."""

    _plain: type[nn.Parameter] = nn.Parameter

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._unmarked():
            return copy.deepcopy(self, memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._unmarked():
            return self.__reduce_ex__(protocol)

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        kind, known = type(self), {n: self.__dict__.pop(n) for n in _KNOWN if n in self.__dict__}
        self.__class__ = kind._plain  # type: ignore[assignment]
        try:
            yield
        finally:
            self.__class__ = kind
            self.__dict__.update(known)


def _divided(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of this class, which may be a user's, while a run lasts."""
    if kind is nn.Parameter:
        return DividedWeight
    return type(kind.__name__, (DividedWeight, kind), {"_plain": kind})


class DividedGradients:
    """The property ``grad`` of a module's parameters while a run lasts.

    Args:
        rows: of parameters whose gradients come to their owners only.
        assigned: parameters whose gradients users may assign.
        by_hand: sees to these, where several ranks average them.
    """

    def __init__(
        self,
        rows: Iterable[GradientRows],
        assigned: Iterable[nn.Parameter] = (),
        by_hand: GradientsByHand | None = None,
    ) -> None:
        self._kinds: list[tuple[Any, type[nn.Parameter]]] = []
        for owned in rows:
            self._mark(owned.parameter)._rows = owned
        self.add(assigned, by_hand)

    def add(self, assigned: Iterable[nn.Parameter], by_hand: GradientsByHand | None) -> None:
        """Let parameters note what users assign; see the class."""
        known = {id(weight) for weight, _ in self._kinds if weight._by_hand is not None}
        for weight in assigned:
            if id(weight) not in known:
                self._mark(weight)._by_hand = by_hand

    def _mark(self, weight: Any) -> Any:
        kind = type(weight)
        if not issubclass(kind, LooksWhole):
            weight.__class__ = _divided(kind)
        self._kinds.append((weight, kind))
        return weight

    def end(self) -> None:
        """Let the parameters be what they were."""
        for weight, kind in reversed(self._kinds):
            for name in _KNOWN:
                weight.__dict__.pop(name, None)
            weight.__class__ = kind
        self._kinds = []
