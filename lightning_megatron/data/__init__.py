"""Text that models read, and the order in which they do.

Names are imported when they are first used: workers of a DataLoader load nothing heavy.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "ByteWindows": "text",
    "ResumableSampler": "sampler",
    "TextDataModule": "text",
}

__all__ = ["ByteWindows", "ResumableSampler", "TextDataModule"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
