"""Docstrings of the package as Sphinx reads them: Google style, names in single backticks."""

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

_STYLE = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)

_NO_SECTIONS = ("attribute", "data", "property", "module")
"""What has no sections; napoleon would take what precedes a colon for a type."""

_NAME_AND_LETTER = re.compile(r"(?<!`)(`[^`\n]+`)(?=\w)")
"""A name with a letter behind, as in the plural: reStructuredText wants a mark between them."""

_HOOKS = (
    "lightning.pytorch.strategies",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.plugins",
)
"""Packages of classes whose methods the Trainer calls, not a user."""


def _process(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [_NAME_AND_LETTER.sub(r"\1\\ ", line) for line in lines]
    if what not in _NO_SECTIONS:
        lines[:] = GoogleDocstring(lines, _STYLE, app, what, name, found, options).lines()


def _skip(app: Sphinx, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out hooks: their callers know them."""
    function = found.fget if isinstance(found, property) else inspect.unwrap(found)
    owner = getattr(function, "__qualname__", "").rpartition(".")[0]
    module = inspect.getmodule(function) if owner else None
    cls = getattr(module, owner, None)
    if not inspect.isclass(cls) or name == "__init__":
        return None
    bases = [base for base in cls.__mro__[1:] if name in vars(base)]
    return True if any(base.__module__.startswith(_HOOKS) for base in bases) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
