"""A ledger of what makes the host wait for a device: an instrument for tests of steady steps.

On a CPU nothing waits, but the calls that would are made all the same: those that read a value
(``item``, ``tolist``, ``bool``, ...) and those that copy numbers of the host to a given device from
memory that is not page-locked (``torch.tensor([...], device=device)``, or ``to(device)`` of what
``torch.tensor([...])`` made). Each is entered under the place in the package that made it. The
functions themselves are replaced, as a mode of torch would not see what runs within a backward or
an operator. Other copies of tensors are not seen (both sides are the host's), nor is what waits
inside of torch.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import lightning_megatron

PACKAGE = str(Path(lightning_megatron.__file__).parent) + "/"
TORCH = str(Path(torch.__file__).parent) + "/"
READS = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "unique", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
)
"""Methods of tensors that read values."""
COPIES = ("tensor", "as_tensor", "asarray")
"""Functions of torch that copy numbers to a device if one is given."""


class HostSyncs:
    """Counts the calls of this process that would wait, while ``counts``.

    Attributes:
        counts: whether to count.
        found: number of calls, by ``file.py:function call``.
    """

    def __init__(self) -> None:
        self.counts = False
        self.found: Counter[str] = Counter()
        self._of_host: Any = WeakTensorKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the ledger is kept."""
        with ExitStack() as stack:
            for name in READS:
                method = self._entered(getattr(Tensor, name), name.strip("_"), _always)
                stack.enter_context(mock.patch.object(Tensor, name, method))
            for name in COPIES:
                function = self._entered(getattr(torch, name), name, _copies)
                stack.enter_context(mock.patch.object(torch, name, function))
            for name in ("nonzero", "unique", "equal", "allclose"):
                function = self._entered(getattr(torch, name), name, _always)
                stack.enter_context(mock.patch.object(torch, name, function))
            to = self._entered(Tensor.to, "to", self._leaves_the_host)
            stack.enter_context(mock.patch.object(Tensor, "to", to))
            method = self._entered(Tensor.new_tensor, "new_tensor", _always)
            stack.enter_context(mock.patch.object(Tensor, "new_tensor", method))
            yield

    def _entered(self, function: Any, name: str, waits: Callable[..., bool]) -> Any:
        @wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            if self.counts and waits(*args, **kwargs) and (place := _place()) is not None:
                self.found[f"{place} {name}"] += 1
            result = function(*args, **kwargs)
            if name in COPIES and not _copies(*args, **kwargs) and result is not args[0]:
                self._of_host[result] = True
            return result

        return entered

    def _leaves_the_host(self, tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Whether a tensor that was made of numbers of the host is copied, and waited for."""
        given = any(isinstance(x, torch.device | str) for x in (*args, kwargs.get("device")))
        return given and not kwargs.get("non_blocking") and tensor in self._of_host


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _copies(data: Any, *args: Any, device: Any = "cpu", **kwargs: Any) -> bool:
    """Whether numbers of the host are copied to a device that was given; ``cpu`` is none."""
    return not isinstance(data, Tensor) and device not in (None, "cpu")


def _place() -> str | None:
    """File and function of the package that called torch; None if somebody else did."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{file[len(PACKAGE) :]}:{frame.f_code.co_name}" if file.startswith(PACKAGE) else None
