"""Registries of strategies, which a Trainer or a Fabric asks about whatever it is given as one.

Changed: ``available_strategies`` and ``get`` of registries, which are instances of the private
class `lightning.fabric.strategies.registry._StrategyRegistry`. A registry knows a finite list of
names, and there are as many names of layouts as there are layouts. And it is the one thing of this
package's that is asked when a Trainer or a Fabric is made: a strategy cannot notice that itself.
Unnecessary if a registry could be given a function for names, and a strategy were told of its
Trainer.
"""

from collections.abc import Callable
from typing import Any


class _Names(list[str]):
    """Names of a registry, and whatever else is taken.

    Args:
        names: that are registered.
        takes: told of everything else that is looked up; says whether it is the name of a strategy.
    """

    def __init__(self, names: list[str], takes: Callable[[object], bool]) -> None:
        super().__init__(names)
        self._takes = takes

    def __contains__(self, given: object) -> bool:
        return super().__contains__(given) or self._takes(given)


def open_registry(
    registry: Any,
    takes: Callable[[object], bool],
    make: Callable[[str], Any] | None = None,
) -> None:
    """Have a registry of strategies ask about what it does not know.

    Args:
        registry: of Lightning's Trainer, of Fabric, or of the package ``pytorch_lightning``.
        takes: told of every name or strategy that a Trainer is given and that is not registered;
            says whether it is a name for ``make``, and may raise.
        make: makes the strategy of such a name.
    """
    kind = type(registry)

    def available_strategies() -> list[str]:
        return _Names(kind.available_strategies(registry), takes)

    def get(name: str, default: Any | None = None) -> Any:
        if make is not None and name not in registry and takes(name):
            return make(name)
        return kind.get(registry, name, default)

    vars(registry).update(available_strategies=available_strategies, get=get)
