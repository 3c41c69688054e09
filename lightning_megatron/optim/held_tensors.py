"""Tensors that an optimizer holds: in its groups, its state, lists of its own, optimizers inside.

An optimizer may hold another one (Lookahead, SAM), with groups that both share or with own ones,
and lists of parameters that were made with it (``LBFGS._params``). `HeldTensors` puts other tensors
in the place of parameters in all of them, and back again. Attributes of optimizers, and containers
in them, are looked through; other objects are not.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def optimizers_in(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer under an empty name, and those inside it by their attributes.

    >>> import torch
    >>> p = [torch.zeros(1)]
    >>> outer = torch.optim.SGD(p)
    >>> outer.base = torch.optim.Adam(p)
    >>> list(optimizers_in(outer))
    ['', 'base']
    """
    found = {"": optimizer}
    waiting = [("", optimizer)]
    while waiting:
        path, holder = waiting.pop(0)
        for name, value in vars(holder).items():
            inner = value if isinstance(value, list | tuple) else [value]
            for number, each in enumerate(inner):
                if isinstance(each, Optimizer) and all(
                    each is not known for known in found.values()
                ):
                    place = f"{name}{number}" if each is not value else name
                    key = f"{path}:{place}" if path else place
                    found[key] = each
                    waiting.append((key, each))
    return found


def states_in(optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer under an empty name, and those of optimizers inside it."""
    found: dict[str, Any] = {}
    for path, each in optimizers_in(optimizer).items():
        if all(each.state is not known for known in found.values()):
            found[path] = each.state
    return found


def keeps_others(optimizer: Any) -> bool:
    """Whether an optimizer holds tensors besides its groups and its state."""
    inside = optimizers_in(optimizer).values()
    without = [id(each.state) for each in inside]
    others = HeldTensors(optimizer).tensors([*without, *map(id, optimizer.param_groups)])
    return next(others, None) is not None


class HeldTensors:
    """Exchange of the parameters that an optimizer holds.

    Args:
        optimizer: see the module's text.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._of: Mapping[int, Tensor] = {}
        self._seen: set[int] = set()

    def exchange(self, of: Mapping[int, Tensor], without: Iterable[int] = ()) -> None:
        """Put others in the place of tensors.

        Args:
            of: tensors by the ``id`` of those in whose place they come.
            without: the ``id`` of containers into which it does not look.
        """
        self._of, self._seen = of, set(without)
        self._look_through(vars(self._optimizer))
        self._of = {}

    def tensors(self, without: Iterable[int] = ()) -> Iterator[Tensor]:
        """All tensors there are, parameters included, but for those in some containers."""
        found: list[Tensor] = []
        seen = set(without)
        waiting: list[Any] = [vars(self._optimizer)]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, Optimizer):
                waiting.append(vars(value))
            elif isinstance(value, dict):
                waiting += [*dict.keys(value), *dict.values(value)]
            elif isinstance(value, list | tuple | set):
                waiting += list(value)
        return iter(found)

    def _look_through(self, values: dict[Any, Any]) -> None:
        """Exchange in a dictionary, in place and in its order."""
        changed = False
        entries = []
        for key, value in list(dict.items(values)):
            own, held = self._exchanged(key), self._exchanged(value)
            changed = changed or own is not key or held is not value
            entries.append((own, held))
        if changed:
            dict.clear(values)
            for key, value in entries:
                dict.__setitem__(values, key, value)

    def _exchanged(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._of.get(id(value), value)
        if not isinstance(value, dict | list | tuple | set | Optimizer):
            return value
        if isinstance(value, tuple):
            return self._exchanged_tuple(value)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, Optimizer):
            self._look_through(vars(value))
        elif isinstance(value, dict):
            self._look_through(value)
        elif isinstance(value, list):
            for place, held in enumerate(list(value)):
                other = self._exchanged(held)
                if other is not held:
                    value[place] = other
        else:
            others = [self._exchanged(held) for held in value]
            value.clear()
            value.update(others)
        return value

    def _exchanged_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        others = [self._exchanged(held) for held in value]
        if all(other is held for other, held in zip(others, value, strict=True)):
            return value
        kind: Any = type(value)
        made: tuple[Any, ...] = kind(*others) if hasattr(value, "_fields") else kind(others)
        return made
