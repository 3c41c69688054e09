"""Public names of the package, and the page of the API reference on which each stands.

A name that the top level and a package offer is documented as the top level's, which is where one
imports it from, on the page of the package.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = "lightning_megatron"
SOURCE = Path(__file__).parents[2] / PACKAGE


@cache
def packages() -> tuple[str, ...]:
    """The top level, and the packages whose ``__init__`` offers names."""
    folders = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
    public = [f"{PACKAGE}.{folder.name}" for folder in folders if folder.name[0] != "_"]
    return (PACKAGE, *(name for name in public if names(name)))


@cache
def names(package: str) -> tuple[str, ...]:
    """What a package offers, in the order of the alphabet."""
    module = import_module(package)
    return tuple(sorted(getattr(module, "__all__", ()), key=str.lower))


def imported_from(name: str, package: str) -> str:
    """The dotted name under which documents have a name of a package."""
    return f"{PACKAGE if name in names(PACKAGE) else package}.{name}"


@cache
def documented(package: str) -> tuple[str, ...]:
    """The dotted names that are documented on the page of a package."""
    if package == PACKAGE:
        elsewhere = {name for other in packages()[1:] for name in names(other)}
        return tuple(f"{PACKAGE}.{name}" for name in names(PACKAGE) if name not in elsewhere)
    return tuple(imported_from(name, package) for name in names(package))


@cache
def public_objects() -> dict[str, Any]:
    """Every documented object by its dotted name."""
    dotted = [name for package in packages() for name in documented(package)]
    return {
        name: getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name in dotted
    }
