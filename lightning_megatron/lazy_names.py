"""Names of a package that are imported when they are first used.

A package's ``__init__`` runs before any of its files. If it imported its names, its cheapest file
would load torch and Lightning. So it has a table of the names' modules, and Python calls its
``__getattr__`` for each name that it lacks (PEP 562).
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: ``__name__`` of the package.
        homes: module that has each name, relative to the package:
            ``"linear"`` is below it, ``".monitoring.alerts"`` beside it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    return find
