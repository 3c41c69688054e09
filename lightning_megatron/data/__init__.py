"""Text that models read, and the order in which they do.

Names are imported when they are first used: workers of a DataLoader load nothing heavy.
"""

from lightning_megatron.lazy_names import lazy_names

_HOMES = {
    "ByteWindows": "text",
    "ResumableSampler": "sampler",
    "TextDataModule": "text",
}

__all__ = ["ByteWindows", "ResumableSampler", "TextDataModule"]

__getattr__ = lazy_names(__name__, _HOMES)
