"""Building on the meta device what can be given its values later, and only that.

``configure_model`` runs where tensors have a shape and no values; `layers.init` makes the values
once it is known what this rank holds. A metric has no rule to make them: its constructor says what
its state begins with (``torch.tensor(0.0)``, ``torch.zeros(num_classes)``), and the answer is lost
on the meta device. So what the constructor of a metric makes is real.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric
from typing_extensions import override

_CONSTRUCTORS = frozenset(
    {
        torch.tensor,
        torch.as_tensor,
        torch.scalar_tensor,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.empty,
        torch.eye,
        torch.arange,
        torch.linspace,
        torch.logspace,
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
    }
)
"""What makes a tensor from no other."""


class _RealMetrics(TorchFunctionMode):
    """Takes what the constructors of metrics make off the device that is in force."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if (
            func in _CONSTRUCTORS
            and options.get("device") is None
            and _builds_metric(sys._getframe(1))
        ):
            options["device"] = torch.device("cpu")
        return func(*args, **options)


def _builds_metric(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__":
            first = code.co_varnames[0] if code.co_varnames else ""
            if isinstance(frame.f_locals.get(first), Metric):
                return True
        frame = frame.f_back
    return False


@contextmanager
def on_meta() -> Iterator[None]:
    """Within the block tensors are made on the meta device, but for the state of metrics."""
    with torch.device("meta"), _RealMetrics():
        yield
