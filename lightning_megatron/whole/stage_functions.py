"""Functions of torch by what they need of tensors of pipeline stages (`whole.stage_weights`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.devices import current_cuda_device
from lightning_megatron._torch.graphs import EnableTorchFunction, tree_flatten
from lightning_megatron.whole.torch_functions import (
    OF_MEMORY,
    Args,
    Kwargs,
    changes,
    communicates,
    kind_of,
    name_of,
)


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, or receives into it."""
    return changes(func) or communicates(func)


def stays(func: Callable[..., Any]) -> bool:
    """Whether a function of a buffer of another stage changes it there, or hands it on."""
    return changes(func) or kind_of(func) in ("moved", "detached", "data")


def draws(func: Callable[..., Any]) -> bool:
    """Whether a function draws as many numbers as its tensor has elements, whatever these are."""
    return kind_of(func) in ("draws", "drawn_like", "dropout")


def device_of_result(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> torch.device:
    """Device of what a function of tensors of stages returns."""
    first = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor))
    if name_of(func) == "cpu":
        return torch.device("cpu")
    if name_of(func) == "cuda":
        return current_cuda_device()
    given = [kwargs.get("device"), *(args[1:2] if kind_of(func) == "moved" else ())]
    for device in given:
        if isinstance(device, torch.device | str):
            return torch.device(device)
        if isinstance(device, Tensor):  # x.to(other)
            return device.device
    return first.device


def moved(func: Callable[..., Any], args: Args, kwargs: Kwargs, twin: Callable[[Any], Any]) -> Any:
    """Result of ``to`` and its like on meta: another format, and no other device."""
    if name_of(func) in ("cpu", "cuda"):
        return twin(args[0]).view_as(twin(args[0]))
    kept = [x for x in args[1:] if not isinstance(x, torch.device | str)]
    like = [twin(x) if isinstance(x, Tensor) else x for x in kept]
    named = {k: v for k, v in kwargs.items() if k != "device"}
    if not like and not named and name_of(func) == "to":
        return twin(args[0])
    if not like and not named and name_of(func) == "type":
        raise NotImplementedError("a name of the device's own")
    with EnableTorchFunction():
        return func(twin(args[0]), *like, **named)


FORMATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
"""Number formats that gradients have."""
GRADIENT = frozenset(("gradient", "set_gradient", "delete_gradient", "data", "set_data"))
"""Kinds that get or set ``.grad`` or ``.data``."""
OF_LEARNING = frozenset(
    (
        *("learning", "set_learning", "version", "requires_grad_"),
        *("hook", "retain_grad", "detach_"),
    )
)
"""Kinds about how a tensor learns, which the tensor knows that has the memory."""
READS = frozenset(("reads", "array", "backward"))
"""Kinds that read values."""
_TELLS_NO_VALUES = OF_MEMORY - {"new"} | OF_LEARNING | {"shape", "repr", "deep_copy"}


def tells_no_values(func: Callable[..., Any]) -> bool:
    """Whether what a function tells or sets does not depend on values."""
    return kind_of(func) in _TELLS_NO_VALUES
