"""Functions of torch by what they need of tensors of pipeline stages (`layers.stage_weights`)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch import EnableTorchFunction, tree_flatten
from lightning_megatron.layers import split_rules as rules
from lightning_megatron.layers.copied_view import changes
from lightning_megatron.layers.split_rules import Args, Kwargs, communicates, name_of
from lightning_megatron.layers.split_tensor import OF_TENSOR, rule_of


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, or receives into it."""
    return changes(func) or communicates(func)


def stays(func: Callable[..., Any]) -> bool:
    """Whether a function of a buffer of another stage changes it there, or hands it on."""
    return changes(func) or rule_of(func) is rules.moved or name_of(func) in ("detach", "data")


def draws(func: Callable[..., Any]) -> bool:
    """Whether a function draws as many numbers as its tensor has elements, whatever these are."""
    return rule_of(func) in (rules.drawn_like, rules.dropout) or name_of(func) in _DRAWN


def device_of_result(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> torch.device:
    """Device of what a function of tensors of stages returns."""
    first = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor))
    if name_of(func) == "cpu":
        return torch.device("cpu")
    if name_of(func) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    given = [kwargs.get("device"), *(args[1:2] if rule_of(func) is rules.moved else ())]
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


_PROPERTIES: Any = Tensor
GRADIENT: Mapping[Any, str] = {
    _PROPERTIES.grad.__get__: "get grad",
    _PROPERTIES.grad.__set__: "set grad",
    _PROPERTIES.grad.__delete__: "set grad",
    _PROPERTIES.data.__get__: "get data",
    _PROPERTIES.data.__set__: "set data",
}
_DESCRIBES = frozenset(
    (
        *(_PROPERTIES.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel),
        *(Tensor.__len__, Tensor.__repr__, Tensor.__format__, Tensor.__hash__),
        *(Tensor.requires_grad_, Tensor.detach_, Tensor.register_hook, Tensor.retain_grad),
        Tensor.__deepcopy__,  # a part's: what stands for another stage's has its own
    )
)
OF_LEARNING = frozenset(
    (
        *(_PROPERTIES.requires_grad.__get__, _PROPERTIES.requires_grad.__set__),
        *(_PROPERTIES.grad_fn.__get__, _PROPERTIES.is_leaf.__get__, Tensor.requires_grad_),
        *(Tensor.register_hook, Tensor.retain_grad, Tensor.detach_),
        *(_PROPERTIES._version.__get__, _PROPERTIES._backward_hooks.__get__),
        Tensor.register_post_accumulate_grad_hook,
    )
)
"""Functions about how a tensor learns, which the tensor knows that has the memory."""
_DRAWN = frozenset(
    (
        *("normal", "uniform", "bernoulli", "exponential", "geometric", "cauchy", "log_normal"),
        *("random", "trunc_normal", "dropout1d", "dropout2d", "dropout3d"),
        *("kaiming_uniform", "kaiming_normal"),
    )
)
RESHAPES = frozenset(
    (
        *("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "resize", "resize_as"),
        *("set", "as_strided", "swap"),
    )
)
FORMATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
"""Number formats that gradients have."""
ADDRESSES = frozenset((Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage))
"""Functions that tell where values lie."""
_NEW = frozenset(
    (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor)
)
READS = frozenset(
    (
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__),
        *(Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__, torch.equal),
        *(Tensor.equal, Tensor.allclose, torch.allclose, Tensor.is_nonzero, torch.is_nonzero),
        *(Tensor.backward, Tensor.__contains__),
    )
)
"""Functions that read values."""


def tells_no_values(func: Callable[..., Any]) -> bool:
    """Whether what a function tells or sets does not depend on values."""
    return (func in OF_TENSOR and func not in _NEW) or func in _DESCRIBES
