"""The two names of Lightning: ``lightning.pytorch`` and ``pytorch_lightning``.

Both are installed as packages of their own with equal sources, so that each class exists twice, and
a Trainer of one refuses modules, callbacks and strategies of the other. Here the names
``pytorch_lightning`` and ``lightning_fabric`` are made to mean the modules of ``lightning``: the
same objects, submodules included, so that there is one of each class.

A finder in front of all others answers for the names. The module that Python makes for such a name
is replaced by the one that it stands for as soon as it is "executed", as `importlib` allows for.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from lightning.pytorch.utilities import rank_zero_info

_STANDS_FOR = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Package of ``lightning`` by the name of the one that stands beside it."""

UNITING = (
    "`import lightning_megatron.pytorch_lightning` before the first import of pytorch_lightning, "
    "which then means lightning.pytorch"
)
"""Import that a user writes who has the other package."""


def other_package(name: str) -> ModuleType | None:
    """A module of the package ``pytorch_lightning`` (or ``lightning_fabric``) itself.

    Args:
        name: of the module.

    Returns:
        None where it has not been imported, or where its name means a module of ``lightning``.
    """
    module = sys.modules.get(name)
    return None if module is None or module.__name__.startswith("lightning.") else module


class _Names:
    """Finder and loader of modules under another name; it tells of the first."""

    def __init__(self) -> None:
        self._told = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Tell Python that this object loads the module, if there is one that the name means."""
        del path, target
        known = name.partition(".")[0] in _STANDS_FOR and find_spec(_meant_by(name)) is not None
        return ModuleSpec(name, self) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make a module, which is then replaced."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module by the one that its name means."""
        sys.modules[module.__name__] = import_module(_meant_by(module.__name__))
        if not self._told:
            self._told = True
            rank_zero_info("pytorch_lightning means lightning.pytorch in this process")


def _meant_by(name: str) -> str:
    package, dot, rest = name.partition(".")
    return _STANDS_FOR[package] + dot + rest


def unite_names() -> bool:
    """Let ``pytorch_lightning`` mean ``lightning.pytorch`` from here on; whether it does.

    It does not where the other package has been imported before.
    """
    if any(other_package(name) is not None for name in _STANDS_FOR):
        return False
    if not any(isinstance(finder, _Names) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Names())
    return True
