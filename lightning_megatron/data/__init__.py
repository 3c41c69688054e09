"""Text to train on, and the order in which ranks read samples.

* Datamodule of a text file: `TextDataModule`; its dataset: `ByteWindows`
* Datamodule of token files, one corpus or a blend: `TokenData`; its dataset: `PackedTokens`
* Sampler that continues after a resume where it stopped: `ResumableSampler`

Names are imported when they are first used: workers of a DataLoader load nothing heavy.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.data.packed import PackedTokens
    from lightning_megatron.data.sampler import ResumableSampler
    from lightning_megatron.data.text import ByteWindows, TextDataModule
    from lightning_megatron.data.token_data import TokenData

_HOMES = {
    "ByteWindows": "text",
    "PackedTokens": "packed",
    "ResumableSampler": "sampler",
    "TextDataModule": "text",
    "TokenData": "token_data",
}

__all__ = [
    "ByteWindows",
    "PackedTokens",
    "ResumableSampler",
    "TextDataModule",
    "TokenData",
]

__getattr__ = lazy_names(__name__, _HOMES)
