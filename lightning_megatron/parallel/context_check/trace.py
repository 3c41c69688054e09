"""Watches two runs of an item, and finds the call from which on they differ.

`Quiet` surrounds both runs. It takes chance out of them (dropout, noise), and computes products
with large weights, whose values do not matter, as cheaper ones that act on a position alike. On
demand it notes every call of torch with a copy of its results.

`culprit` compares the notes of both. A call whose operands agree between the runs and whose result
does not is where positions meet; of several such calls it is the one on which the item's output
depends.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.parallel.context_check.parts import Parts
from lightning_megatron.parallel.context_check.stand_ins import LARGE

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, sys.modules["lightning_megatron"].__file__ or "")
)


@dataclass(frozen=True)
class Call:
    """A call of torch."""

    function: Any
    place: str
    """File and line of who called it, outside of torch and of this package."""
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    """Tensors that it returned or wrote to."""
    values: tuple[Tensor, ...]
    """Copies of these, as they were then."""

    @property
    def name(self) -> str:
        """Name as users know it."""
        return str(resolve_name(self.function) or getattr(self.function, "__name__", "?"))


@dataclass
class Trace:
    """Calls of one run, in order."""

    calls: list[Call] = field(default_factory=list)

    def producer(self, tensor: Any, before: int | None = None) -> int | None:
        """Number of the latest call that returned a tensor or wrote to it."""
        for number in reversed(range(len(self.calls) if before is None else before)):
            if any(tensor is result for result in self.calls[number].results):
                return number
        return None


class Quiet(TorchFunctionMode):
    """Runs torch without chance.

    Args:
        trace: takes notes of all calls; may be None.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        super().__init__()
        self._trace = trace
        self._paused = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which everything runs as it is, and is not noted."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if self._paused:
            return func(*args, **given)
        found = _INSTEAD.get(func, func)(*args, **given)
        if self._trace is not None:
            self._note(self._trace, func, args, given, found)
        return found

    def _note(
        self, trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
    ) -> None:
        results = [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)]
        name = getattr(func, "__name__", "")
        if found is None or (name.endswith("_") and not name.endswith("__")):
            results += [x for x in args[:1] if isinstance(x, Tensor)]
        if results:
            operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
            values = tuple(x.detach().clone() for x in results)
            call = Call(func, _caller(sys._getframe(2)), tuple(operands), tuple(results), values)
            trace.calls.append(call)


def culprit(parts: Parts, whole: Trace, part: Trace, output: Any) -> Call | None:
    """Call in the run on the whole sequence at which positions met; None if it does not show.

    Args:
        parts: what both runs were made on.
        whole: notes of the run on the whole sequence.
        part: notes of the run on a part.
        output: tensor of the run on the whole that differs, if it is known.
    """
    agrees = []
    for a, b in zip(whole.calls, part.calls, strict=False):
        if a.function != b.function or len(a.values) != len(b.values):
            break
        agrees.append(all(parts.relation(x, y)[0] for x, y in zip(a.values, b.values, strict=True)))
    number = whole.producer(output)
    if number is None or number >= len(agrees) or agrees[number]:
        number = next((n for n, good in enumerate(agrees) if not good), None)
    if number is None:
        return None
    while True:
        causes = (whole.producer(x, number) for x in whole.calls[number].operands)
        earlier = [cause for cause in causes if cause is not None and not agrees[cause]]
        if not earlier:
            return whole.calls[number]
        number = min(earlier)


def _caller(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of(error: BaseException) -> str:
    """File and line of the innermost code outside of torch and this package in an error."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<")):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


# What runs in place of calls of torch -------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    features = weight.shape[-1]
    if weight.numel() <= LARGE or weight.dim() != 2 or x.shape[-1] != features:
        return F.linear(x, weight, bias)
    count = torch.arange(weight.shape[0], device=x.device)
    factors = torch.cos(count.to(x.dtype)) * weight[0, 0]
    out = x[..., count % features] * factors + x.sum(-1, keepdim=True) * weight[0, 0]
    return out if bias is None else out + bias


def _unchanged(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _even(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.detach().fill_(0.5) if not x.requires_grad else x


def _even_like(x: Tensor, *_: Any, **kwargs: Any) -> Tensor:
    return torch.full_like(x, 0.5, dtype=kwargs.get("dtype"))


def _evenly(*sizes: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    size = kwargs.pop("size", sizes[0] if sizes and not isinstance(sizes[0], int) else sizes)
    return torch.full(tuple(size), 0.5, **kwargs)


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 0.0, dim: int = -1
) -> Tensor:
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    return torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    kwargs.pop("dropout_p", None)
    return F.scaled_dot_product_attention(*args, **kwargs)


def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        F.linear: _linear,
        F.gumbel_softmax: _gumbel_softmax,
        F.scaled_dot_product_attention: _attention,
        torch.rand: _evenly,
        torch.randn: _evenly,
    }
    drops = "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_alpha_dropout"
    drops += " dropout1d dropout2d dropout3d"
    for rule, names, spaces in (
        (_unchanged, drops, (torch, F)),
        (_even_like, "rand_like randn_like bernoulli", (torch, Tensor)),
        (_even, "bernoulli_ uniform_ normal_ exponential_ geometric_ log_normal_", (Tensor,)),
    ):
        functions: Sequence[Any] = [
            getattr(space, name)
            for name in names.split()
            for space in spaces
            if hasattr(space, name)
        ]
        table.update(dict.fromkeys(functions, rule))
    return table


_INSTEAD = _table()
