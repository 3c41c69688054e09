"""Text to train on, and the order in which ranks read samples.

* Datamodule of a text file: `TextDataModule`; its dataset: `ByteWindows`
* Sizes of the global batch in the course of a run, for `callbacks.BatchSchedule`: `Rampup`,
  `NoiseScale`
* Datamodule of token files, one corpus or a blend: `TokenData`; its dataset: `PackedTokens`
* Samplers that put samples of similar length together: `LengthGrouped`, `TokenBudget`; padding,
  and pieces of long samples: `Pad`, `Fragments`
* Sampler that continues after a resume where it stopped: `ResumableSampler`
* Tokens on disk, in Megatron-LM's format: `Corpus`, `IndexedTokens`, `IndexedWriter`
* Conversations as tokens: `ChatEncoder`, by a `ChatFormat`

Names are imported when they are first used: workers of a DataLoader load nothing heavy.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.data.preprocessing.chat import ChatEncoder, ChatFormat
    from lightning_megatron.data.reading.batch_sizes import NoiseScale, Rampup
    from lightning_megatron.data.reading.collate import Fragments, Pad
    from lightning_megatron.data.reading.lengths import LengthGrouped, TokenBudget
    from lightning_megatron.data.reading.sampler import ResumableSampler
    from lightning_megatron.data.text import ByteWindows, TextDataModule
    from lightning_megatron.data.tokens.corpus import Corpus
    from lightning_megatron.data.tokens.indexed import IndexedTokens, IndexedWriter
    from lightning_megatron.data.tokens.packed import PackedTokens
    from lightning_megatron.data.tokens.token_data import TokenData

_HOMES = {
    "ByteWindows": "text",
    "ChatEncoder": "preprocessing.chat",
    "ChatFormat": "preprocessing.chat",
    "Corpus": "tokens.corpus",
    "Fragments": "reading.collate",
    "IndexedTokens": "tokens.indexed",
    "IndexedWriter": "tokens.indexed",
    "LengthGrouped": "reading.lengths",
    "NoiseScale": "reading.batch_sizes",
    "PackedTokens": "tokens.packed",
    "Pad": "reading.collate",
    "Rampup": "reading.batch_sizes",
    "ResumableSampler": "reading.sampler",
    "TextDataModule": "text",
    "TokenBudget": "reading.lengths",
    "TokenData": "tokens.token_data",
}

__all__ = [
    "ByteWindows",
    "ChatEncoder",
    "ChatFormat",
    "Corpus",
    "Fragments",
    "IndexedTokens",
    "IndexedWriter",
    "LengthGrouped",
    "NoiseScale",
    "PackedTokens",
    "Pad",
    "Rampup",
    "ResumableSampler",
    "TextDataModule",
    "TokenBudget",
    "TokenData",
]

__getattr__ = lazy_names(__name__, _HOMES)
