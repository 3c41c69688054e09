"""Explanations for users who treat weights or gradients in parts as if they were whole.

Under ZeRO 3 parameters and gradients are DTensors, of which a rank holds a part; weights are whole
only while the forward of the module runs that owns them. torch says so in words that name neither
the module nor a way out: `explain` replaces them. What would not fail is made true by
`whole.weights`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.errors import ConfigError

_WHOLE = "zero=2 or lower keeps parameters whole"


@dataclass(frozen=True)
class Explanation:
    """Meaning of an error of torch under ZeRO 3."""

    pattern: str
    """Words in the text of the error."""
    happened: str
    """Its cause."""
    remedy: str
    """Remedy, where it is another than `_WHOLE`."""


EXPLANATIONS = (
    Explanation(
        r"mixed torch\.Tensor and DTensor",
        "a weight was used outside of the forward of the module that owns it (in another of its "
        "methods, in another module or in a hook), where zero=3 keeps it in parts",
        "or call the module itself",
    ),
    Explanation(
        r"data is not allocated yet",
        "a parameter or gradient, or what was computed from one, was used as an ordinary tensor, "
        "and under zero=3 it is a DTensor of which each rank holds a part",
        "or make it whole by .full_tensor(), or take gradients from strategy.gradients",
    ),
    Explanation(
        r"Cannot (?:un)?flatten unevenly sharded tensor",
        "a parameter or gradient was given another shape, and under zero=3 it is in parts that "
        "cannot take it",
        "or make it whole by .full_tensor(), or take gradients from strategy.gradients",
    ),
    Explanation(
        r"cannot assign .* as parameter",
        "a tensor was put in the place of a weight, which zero=3 keeps in parts",
        "or write into the weight, as in p.data.copy_(values)",
    ),
    Explanation(
        r"weights trying to be saved contained shared tensors",
        "a module was saved whose weights zero=3 keeps in parts",
        "or save what lightning_megatron.gather(module) returns",
    ),
    Explanation(
        r"setStorage: .* out of bounds for storage of size 0",
        "a backward needed weights that zero=3 had freed, as a second backward through one graph "
        "does",
        "or differentiate once",
    ),
    Explanation(
        r"already been lazily initialized",
        "a part of the module ran before the module that it belongs to",
        "or call it from the step only",
    ),
    Explanation(
        r"\bDTensor\b|Sharding propagation failed|sharding strategy",
        "a parameter or gradient was used in an operation that cannot be done on the parts in "
        "which zero=3 keeps it",
        "or make it whole by .full_tensor(), or take gradients from strategy.gradients",
    ),
)
"""The first that matches counts."""


def explain(exception: BaseException, module: LightningModule) -> None:
    """Replace the text of an error that ZeRO 3 has caused; leave all others as they are.

    Args:
        exception: as it was raised.
        module: the user's.
    """
    text = str(exception)
    if isinstance(exception, ConfigError) or f"; {_WHOLE}" in text:
        return
    found = next((e for e in EXPLANATIONS if re.search(e.pattern, text)), None)
    if found is not None:
        exception.args = (
            f"{_place(exception, module)}: {found.happened}; {_WHOLE}, {found.remedy} "
            f"[{text.strip().splitlines()[0]}]",
        )


def _place(exception: BaseException, module: LightningModule) -> str:
    """The innermost submodule in which it was raised, and what of the user's led there."""
    names = {id(child): name for name, child in module.named_modules()}
    callbacks: list[object] = module.trainer.callbacks  # type: ignore[attr-defined]
    place, callers = "", []
    for frame in _frames(exception):
        owner = frame.f_locals.get("self")
        # The others are what functions of torch and copy.deepcopy call the module they work on.
        for value in (owner, frame.f_locals.get("module"), frame.f_locals.get("x")):
            if isinstance(value, nn.Module) and names.get(id(value)):
                place = names[id(value)]
        is_callback = any(owner is callback for callback in callbacks)
        if is_callback or (owner is module and not _is_library(frame)):
            callers.append(f"{type(owner).__name__}.{frame.f_code.co_name}")
    # Lightning runs the whole step inside of `optimizer_step`.
    callers = [c for c in callers if not c.endswith(".optimizer_step")] or callers[-1:]
    if place and callers:
        return f"{place}, used in {callers[0]}"
    return place or (callers[0] if callers else type(module).__name__)


def _frames(exception: BaseException) -> Iterator[FrameType]:
    """Frames of the traceback, from the outermost to the innermost."""
    trace = exception.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_library(frame: FrameType) -> bool:
    globals_: Mapping[str, object] = frame.f_globals
    return str(globals_.get("__name__", "")).split(".")[0] in (
        *("torch", "lightning", "pytorch_lightning", "lightning_megatron"),
    )
