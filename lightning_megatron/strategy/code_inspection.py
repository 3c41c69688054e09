"""Reading what users have written in modules and callbacks, as far as code tells.

ZeRO 1 and 2 bring each gradient to the rank that owns it. Users may look at ``.grad`` all the same,
to clip, log or change it, and see then what they would see under ``DistributedDataParallel``: the
whole mean. Where they exist to look, gradients are reduced whole at once, an all-reduce in place of
a reduce-scatter:

* under manual optimization, where the step itself may;
* where the module or a callback overrides a hook that runs between the backward and the moment
  when gradients are cleared (`HOOKS`).

Whoever looks anywhere else gathers what the owners have (`whole.divided_gradient`). Callbacks of
Lightning and of this package do not count: the former look at no gradient, the latter know where
gradients are.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_megatron.", "torch.", "builtins")


def own_functions(observer: object) -> Iterator[tuple[str, FunctionType]]:
    """Functions of an object, of its class and of the bases of that, that no library has written.

    Hooks may be set on the object, as ``LambdaCallback`` does. What anybody has added to a class of
    a library, such as ``nn.Module``, is nobody's code for this object, and not on every rank.
    """
    classes = (c for c in type(observer).__mro__ if not is_of_library(c))
    for holder in (vars(observer), *map(vars, classes)):
        for name, value in holder.items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType) and not is_of_library(function):
                yield name, function


def methods_of(observer: object) -> dict[str, list[FunctionType]]:
    """`own_functions` by name; several where classes override each other's."""
    methods: dict[str, list[FunctionType]] = {}
    for name, function in own_functions(observer):
        methods.setdefault(name, []).append(function)
    return methods


def functions_from(
    methods: Mapping[str, Sequence[FunctionType]], start: str
) -> Iterator[FunctionType]:
    """Functions of a method, and of those that it calls by name."""
    to_read, seen = [start], set[str]()
    while to_read:
        if (name := to_read.pop()) not in seen:
            seen.add(name)
            for function in methods.get(name, ()):
                yield function
                to_read += names_in(function) & methods.keys()


def names_in(function: FunctionType) -> frozenset[str]:
    """Names of attributes and globals in a function and in those that it calls as globals."""
    seen: set[FunctionType] = set()
    found: set[str] = set()
    to_read = [function]
    while to_read:
        reading = to_read.pop()
        if reading in seen:
            continue
        seen.add(reading)
        names = set(_names_of(reading.__code__))
        found |= names
        called = (reading.__globals__.get(name) for name in names)
        to_read += [f for f in called if isinstance(f, FunctionType) and not is_of_library(f)]
    return frozenset(found)


def is_users(hook: Any) -> bool:
    """Whether a function or another callable is of no library's code."""
    function = getattr(hook, "func", hook)  # of a partial
    written = getattr(function, "__module__", None) or type(function).__module__
    return not f"{written}.".startswith(_LIBRARIES)


def is_of_library(written: FunctionType | type) -> bool:
    """Whether a function or class is of torch, of Lightning or of this package."""
    return f"{written.__module__}.".startswith(_LIBRARIES)


def _names_of(code: CodeType) -> Iterator[str]:
    """Names in a function and those defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of modules and callbacks that exist to look at gradients, or can."""


def looks_at_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether hooks of the module or of a callback of the user's are there to see gradients."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return not module.automatic_optimization or any(
        name in HOOKS for observer in (module, *callbacks) for name, _ in own_functions(observer)
    )


def transforms_batches(module: LightningModule) -> bool:
    """Whether hooks of the module or of its data change a batch before it is trained on."""
    sources = (module, getattr(module.trainer, "datamodule", None))
    return any(
        source is not None and is_overridden(hook, source)
        for source in sources
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
    )
