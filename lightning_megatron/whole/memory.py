"""Scopes in which weights in parts are what this rank holds in memory, and not the whole.

While a run trains, a weight of which this rank has a part behaves like the whole weight in user's
code (`whole.weights`). Two kinds of code want the part itself:

* the layer that owns the weight: `own_weights` marks the forward of this library's layers, and
  `weights_of_self` that of a user's;
* optimizers, ZeRO, checkpoints and all else of this library that moves memory: `on_memory` marks a
  function, `memory_of_parts` the methods of a class. Within them no tensor asks its class for
  rules.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass,
    EnableTorchFunction,
    asks_classes,
    break_graph,
    runs_transform,
)
from lightning_megatron.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.layers: list[nn.Module | None] = []


class _Graphs:
    """Compiled blocks of this library that run now."""

    ours = 0


_SCOPES = _Scopes()
_GRAPHS = _Graphs()
_MARK = "_marks_weights"
_TRANSFORMED = "_in_transforms"


def computes_with_part(weights: Iterable[Tensor]) -> bool:
    """Whether the layer that runs computes with its parts of these weights."""
    layers = _SCOPES.layers
    if not layers:
        return False
    layer = layers[-1]
    if layer is None:
        return True
    own = {id(p) for p in layer.parameters(recurse=False)}
    return all(id(weight) in own for weight in weights)


def runs_layer() -> bool:
    """Whether a layer runs, or a function of this library that takes weights as they are here."""
    return bool(_SCOPES.layers)


def own_weights(function: Callable[P, R]) -> Callable[P, R]:
    """Within ``function`` weights are the parts that this rank holds; activations keep rules."""

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            _leave_graph_of_users(args)
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if runs_transform():
            _check_transform(function, args)
        _SCOPES.layers.append(None)
        try:
            return function(*args, **kwargs)
        finally:
            _SCOPES.layers.pop()

    setattr(within, _MARK, True)
    return within


def weights_of_self(method: Callable[P, R]) -> Callable[P, R]:
    """Within a layer's ``method`` the layer's own weights are parts, and others' are whole."""

    @wraps(method)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            _leave_graph_of_users(args)
            with DisableTorchFunctionSubclass():
                return method(*args, **kwargs)
        _SCOPES.layers.append(args[0])  # type: ignore[arg-type]
        try:
            return method(*args, **kwargs)
        finally:
            _SCOPES.layers.pop()

    setattr(within, _MARK, True)
    return within


def mark_forward(kind: type[nn.Module]) -> None:
    """Let the forward of a class of parallel layers compute with parts of weights.

    One of this library may pass weights on; one of a user's sees its own as parts.
    """
    forward = kind.forward
    if not getattr(forward, _MARK, False):
        ours = forward.__module__.partition(".")[0] == __name__.partition(".")[0]
        kind.forward = (own_weights if ours else weights_of_self)(forward)


@contextmanager
def weights_in_parts() -> Iterator[None]:
    """Context in which weights are the parts that this rank holds, as within `own_weights`."""
    _SCOPES.layers.append(None)
    try:
        yield
    finally:
        _SCOPES.layers.pop()


@contextmanager
def own_graph() -> Iterator[None]:
    """Context in which a block of the network runs compiled, on what this rank holds."""
    _GRAPHS.ours += 1
    try:
        with weights_in_parts():
            yield
    finally:
        _GRAPHS.ours -= 1


def traces_users_code() -> bool:
    """Whether a compiler traces a function of the user's, outside of layers."""
    return torch.compiler.is_compiling() and not _GRAPHS.ours


def _leave_graph_of_users(args: Any) -> None:
    """Call a split layer for what it is where a user's compiler traces it.

    A graph has plain parts.
    """
    if traces_users_code() and args and getattr(args[0], "tp_size", 1) > 1:
        break_graph()


def transformed(forward: F) -> F:
    """Mark a layer's forward that ``torch.vmap`` and transforms of ``torch.func`` can take."""
    setattr(forward, _TRANSFORMED, True)
    return forward


def _check_transform(function: Callable[..., Any], args: Any) -> None:
    layer: Any = args[0] if args else None
    if getattr(layer, "tp_size", 1) > 1 and not hasattr(function, _TRANSFORMED):
        raise ConfigError(
            f"tp={layer.tp_size}: {type(layer).__name__} within torch.vmap or a transform of "
            "torch.func, where layers of one process alone can be; nearest valid: tp=1, a layer of "
            "torch.nn, or torch.autograd.grad(..., create_graph=True) in their place"
        )


def marked_functions() -> tuple[Callable[..., Any], ...]:
    """Functions with the code of all that `own_weights` and `weights_of_self` make."""
    return own_weights(scopes), weights_of_self(scopes)


def scopes() -> tuple[nn.Module | None, ...]:
    """Layers that run now, for `as_within`."""
    return tuple(_SCOPES.layers)


@contextmanager
def as_within(layers: tuple[nn.Module | None, ...]) -> Iterator[None]:
    """Context in which weights are what they were within these layers; for what runs again."""
    before, _SCOPES.layers = _SCOPES.layers, list(layers)
    try:
        yield
    finally:
        _SCOPES.layers = before


def unwrapped(method: Callable[P, R]) -> Callable[P, R]:
    """Return a layer's forward without `own_weights`, which all layers' have the code of.

    A compiler counts by code how often it has made another graph.
    """
    inner = getattr(method, "__wrapped__", None)
    owner = getattr(method, "__self__", None)
    return method if inner is None or owner is None else MethodType(inner, owner)


def on_memory(function: Callable[P, R]) -> Callable[P, R]:
    """Within ``function`` every tensor is what this rank holds of it."""

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        # Most calls come from functions that are marked, too; it counts for each parameter.
        if not asks_classes() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return within


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """Tensors that a function has saved; what is recomputed for them may be code of the user's."""
    if torch.compiler.is_compiling():
        return tuple(ctx.saved_tensors)
    with EnableTorchFunction():
        found: tuple[Tensor, ...] = ctx.saved_tensors
        return found


def sees_memory() -> bool:
    """Whether what runs is code `on_memory`, or a compiler's."""
    return not asks_classes() or torch.compiler.is_compiling()


def memory_of_parts(kind: C) -> C:
    """Class decorator: all public methods and properties of ``kind`` are `on_memory`."""
    return _each(kind, on_memory)


def parts_of_weights(kind: C) -> C:
    """Class decorator: within the public methods of ``kind`` weights are parts (`own_weights`)."""
    return _each(kind, own_weights)


def _each(kind: C, mark: Callable[[Any], Any]) -> C:
    for name, value in list(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, FunctionType):
            setattr(kind, name, mark(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(kind, name, property(mark(value.fget), value.fset, value.fdel))
        elif isinstance(value, cached_property):
            value.func = mark(value.func)
        elif isinstance(value, staticmethod):
            setattr(kind, name, staticmethod(mark(value.__func__)))
    return kind
