"""Text to train on, and the order in which ranks read samples.

* Datamodule of a text file: `TextDataModule`; its dataset: `ByteWindows`
* Size of the global batch that changes in the course of a run: `BatchSchedule`, by a list,
  `Rampup` or `NoiseScale`
* Sampler that continues after a resume where it stopped: `ResumableSampler`

Names are imported when they are first used: workers of a DataLoader load nothing heavy.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.data.batch_schedule import BatchSchedule
    from lightning_megatron.data.batch_sizes import NoiseScale, Rampup
    from lightning_megatron.data.sampler import ResumableSampler
    from lightning_megatron.data.text import ByteWindows, TextDataModule

_HOMES = {
    "BatchSchedule": "batch_schedule",
    "ByteWindows": "text",
    "NoiseScale": "batch_sizes",
    "Rampup": "batch_sizes",
    "ResumableSampler": "sampler",
    "TextDataModule": "text",
}

__all__ = [
    "BatchSchedule",
    "ByteWindows",
    "NoiseScale",
    "Rampup",
    "ResumableSampler",
    "TextDataModule",
]

__getattr__ = lazy_names(__name__, _HOMES)
