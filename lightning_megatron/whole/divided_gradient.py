"""Whole weights whose gradients lie in rows with the ranks that own these (ZeRO 1 and 2).

While a run lasts, the class of such a parameter has a property ``grad``. In user's code a look at
it makes the mean whole, on every rank, and from then on it is what lies in memory::

    norm = self.up.weight.grad.norm()     # all ranks that divide the weight must ask
    self.up.weight.grad.mul_(0.5)         # the step is half as long
    self.up.weight.grad = None            # there is none

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

from lightning_megatron.whole.memory import sees_memory

_MEMORY: Any = Tensor.grad
_get, _set = _MEMORY.__get__, _MEMORY.__set__  # here, as they are called for every parameter


class GradientRows(Protocol):
    """Rows of one parameter that this rank owns."""

    parameter: nn.Parameter
    gradient: Tensor | None

    def show_gradient(self) -> None:
        """Make ``parameter.grad`` whole of what the ranks hold in ``gradient``; collective."""
        ...


class LooksWhole:
    """Base of the classes of parameters whose gradient may lie in rows."""

    _rows: GradientRows | None = None

    @property
    def grad(self) -> Tensor | None:
        """The whole mean gradient, or in this library's code what is in memory."""
        rows = self._rows
        if rows is not None and rows.gradient is not None and not sees_memory():
            rows.show_gradient()
        found: Tensor | None = _get(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        rows = self._rows
        _set(self, value)
        if rows is not None and rows.gradient is not None and not sees_memory():
            rows.gradient = None

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
        kind, rows = type(self), self.__dict__.pop("_rows", None)
        self.__class__ = kind._plain  # type: ignore[assignment]
        try:
            yield
        finally:
            self.__class__ = kind
            self._rows = rows


def _divided(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of this class, which may be a user's, while a run lasts."""
    if kind is nn.Parameter:
        return DividedWeight
    return type(kind.__name__, (DividedWeight, kind), {"_plain": kind})


class DividedGradients:
    """The property ``grad`` of a module's parameters while a run lasts.

    Args:
        rows: of parameters whose gradients come to their owners only.
    """

    def __init__(self, rows: Iterable[GradientRows]) -> None:
        self._kinds: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        for owned in rows:
            weight: Any = owned.parameter
            kind = type(weight)
            if not issubclass(kind, LooksWhole):
                weight.__class__ = _divided(kind)
            weight._rows = owned
            self._kinds.append((weight, kind))

    def end(self) -> None:
        """Let the parameters be what they were."""
        for weight, kind in self._kinds:
            weight.__dict__.pop("_rows", None)
            weight.__class__ = kind
        self._kinds = []
