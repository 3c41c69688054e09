"""Where a resumed run goes on reading, whatever its layout.

Lightning restores how many batches of the epoch are done, but iterates the loader from its start,
and creates the iterator before it tells the sampler which epoch it is. Here the epoch is set and
the samples that were read are skipped when the loader is prepared; skipping draws indices and
reads no data. The position is counted in samples of the whole job, so it means the same under
another data-parallel degree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import _update_dataloader
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Sampler

from lightning_megatron.topology.mesh import Topology

KEY = "lightning_megatron"
"""Of our entry in a checkpoint."""


@dataclass
class DataPosition:
    """Position in the training data; of interest between loading a checkpoint and reading on."""

    samples_per_batch: int | None = None
    """Of the run that saved, over all ranks; None when nothing is to be resumed."""

    def save(self, trainer: Trainer, topology: Topology) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"samples_per_batch": _global_batch(trainer.train_dataloader, topology)}

    def load(self, state: dict[str, Any] | None) -> None:
        """Remember what `save` returned until the loader is prepared."""
        self.samples_per_batch = (state or {}).get("samples_per_batch")

    def resume(
        self, trainer: Trainer, dataloader: DataLoader[Any], topology: Topology
    ) -> DataLoader[Any]:
        """The training loader, moved to the restored position if there is one."""
        saved, self.samples_per_batch = self.samples_per_batch, None
        fit_loop = trainer.fit_loop
        batches: int = getattr(fit_loop.epoch_loop.batch_progress.current, "processed", 0)
        epoch: int = getattr(fit_loop.epoch_progress.current, "processed", 0)
        sampler: Any = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
        if saved is None or has_iterable_dataset(dataloader) or not hasattr(sampler, "__len__"):
            return dataloader
        if batches >= len(dataloader):  # saved with the last batch of an epoch
            batches, epoch = 0, epoch + 1
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if not batches:
            return dataloader
        now = _global_batch(dataloader, topology)
        if now != saved:
            rank_zero_warn(
                f"The checkpoint was saved with {saved} samples per batch over all ranks and is "
                f"resumed with {now}: the rest of this epoch has as many batches as Lightning "
                f"counts, which is not as many as there are samples left; batch_size="
                f"{saved // topology.batch.size} would keep the batch"
            )
        return _update_dataloader(
            dataloader, _Resumed(sampler, batches * saved // topology.batch.size)
        )


class _Resumed(Sampler[Any]):
    """A sampler whose first pass starts in the middle.

    Args:
        sampler: of whole passes.
        skip: indices of the first pass that are left out.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(iter(self._sampler), skip, None)

    def __len__(self) -> int:
        """Length of a whole pass; Lightning counts the batches that were done."""
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the sampler."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


def _global_batch(dataloader: Any, topology: Topology) -> int | None:
    size = getattr(dataloader, "batch_size", None)
    return size * topology.batch.size if isinstance(size, int) else None
