"""Change of the class of a module in place.

An adopted module stays the object that it was: its name in the model, its parameters, its hooks and
whoever refers to it are not touched. What it does beside is in a class of ours that is put in front
of its own, as FSDP2 does: ``isinstance`` and the class's name stay.
"""

import copy
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, SupportsIndex, TypeVar

from torch import nn
from typing_extensions import Self

from lightning_megatron._torch.groups import known_groups
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.whole.memory import mark_forward

M = TypeVar("M", bound=nn.Module)


def become(module: nn.Module, front: type[M]) -> M:
    """Put the class ``front`` in front of the class of ``module``, and return the module.

    The constructor of ``front`` is not called: what it would set is the caller's to set. A method
    that ``front`` names in ``surrounds`` keeps the signature that it had. A class that it names as
    ``behind`` comes after the module's own: its methods are what ``super()`` finds there.
    """
    if not isinstance(module, front):
        module.__class__ = _joined(front, type(module))  # type: ignore[arg-type]  # classes are hashable
    assert isinstance(module, front)
    return module


def own_class(module: nn.Module) -> type[nn.Module]:
    """Class that a module had before it was adopted."""
    found: type[nn.Module] = type(module)
    while (own := getattr(found, "adopted_class", None)) is not None:
        found = own
    return found


@cache
def _joined(front: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "adopted_class": own,
        "adopted_front": front,
        "__reduce_ex__": _reduced,
    }
    methods = {name: _like(front, own, name) for name in getattr(front, "surrounds", ())}
    behind = getattr(front, "behind", None)
    bases = (own,) if behind is None else (behind,) if issubclass(behind, own) else (own, behind)
    joined = type(own.__name__, (front, *bases), {**names, **methods})
    if issubclass(front, ParallelLayer):
        mark_forward(joined)  # which may be that of the module's own class
    return joined


RUN_STATE = ("_gathered", "_divided", "writers")
"""Attributes that a run gives an adopted module, and that no file holds."""


def _reduced(self: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Tuple that `pickle` writes: the classes that were joined, by name, and the state."""
    kind: Any = type(self)
    made: Any = super(_last_joined(kind), self).__reduce_ex__(protocol)
    if "adopted_front" not in kind.__dict__:
        return tuple(made)
    fronts = []
    while "adopted_front" in kind.__dict__:
        fronts.append(kind.adopted_front)
        kind = kind.adopted_class
    state = made[2]
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in RUN_STATE}
    return (_remade, (kind, tuple(reversed(fronts))), state, *made[3:])


def _last_joined(kind: Any) -> Any:
    """The innermost of the classes of which `_reduced` is a method."""
    return [k for k in kind.__mro__ if k.__dict__.get("__reduce_ex__") is _reduced][-1]


def _remade(own: type[nn.Module], fronts: tuple[type[nn.Module], ...]) -> nn.Module:
    for front in fronts:
        own = _joined(front, own)  # type: ignore[arg-type]  # classes are hashable
    return own.__new__(own)


class CopiedWhole(nn.Module):
    """Class in front of a model whose copies leave a run behind, and save themselves."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model; raises a `ConfigError` where this rank holds a part of it."""
        state = dict(self.__dict__)
        for name in ("_gathered", "_divided"):
            refuse = getattr(state.pop(name, None), "refuse_copy", None)
            if refuse is not None:
                refuse()
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        memo.update((id(group), group) for group in known_groups())  # a copy is on the same ranks
        made.__dict__.update(copy.deepcopy(state, memo))
        return made


def _like(front: type[nn.Module], own: type[nn.Module], name: str) -> Callable[..., Any]:
    method = getattr(front, name)

    @wraps(getattr(own, name))
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return call
