"""Where a resumed run goes on reading, whatever its layout.

Lightning restores how many batches of the epoch are done, but iterates the loader from its start,
and creates the iterator before it tells the sampler which epoch it is. Here the epoch is set and
the samples that were read are skipped when the loader is prepared; skipping draws indices and
reads no data. The position is counted in samples of the whole job, so it means the same under
another data-parallel degree.
"""

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Position in a checkpoint."""

    samples_per_batch: int
    epoch: int
    batches: int
    """Of the epoch, that were trained on."""


class DataPosition:
    """Position in the training data; of interest between loading a checkpoint and reading on."""

    def __init__(self) -> None:
        self._saved: _Saved | None = None

    def save(self, trainer: Trainer, topology: Topology) -> dict[str, Any]:
        """What a checkpoint must hold beside Lightning's own progress."""
        return {"samples_per_batch": _global_batch(trainer.train_dataloader, topology)}

    def load(self, checkpoint: Mapping[str, Any], trainer: Trainer, topology: Topology) -> None:
        """Move the training loader to where the checkpoint was saved, now or once it exists."""
        samples = checkpoint.get(KEY, {}).get("samples_per_batch")
        progress = checkpoint.get("loops", {}).get("fit_loop")
        if samples is None or progress is None:
            return
        self._saved = _Saved(
            samples_per_batch=samples,
            epoch=progress["epoch_progress"]["current"]["processed"],
            batches=progress["epoch_loop.batch_progress"]["current"]["processed"],
        )
        fit_loop = trainer.fit_loop
        combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
        if combined is not None and fetcher is not None:
            # `trainer.estimated_stepping_batches` in configure_optimizers has prepared the loader,
            # and a batch may have been fetched from its start.
            saved = self._saved
            loaders = []
            for loader in combined.flattened:
                self._saved = saved
                loaders.append(self.resume(loader, topology))
            combined.flattened = loaders
            fetcher.setup(combined)
            iter(fetcher)

    def resume(self, dataloader: Any, topology: Topology) -> Any:
        """The training loader, moved to the restored position if there is one."""
        saved, self._saved = self._saved, None
        if saved is None or not isinstance(dataloader, DataLoader):
            return dataloader
        sampler: Any = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
        if has_iterable_dataset(dataloader) or not hasattr(sampler, "__len__"):
            return dataloader
        epoch, batches = saved.epoch, saved.batches
        if batches >= len(dataloader):  # saved with the last batch of an epoch
            epoch, batches = epoch + 1, 0
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if not batches:
            return dataloader
        before, now = saved.samples_per_batch, _global_batch(dataloader, topology)
        if now != before:
            rank_zero_warn(
                f"The checkpoint was saved with {before} samples per batch over all ranks and is "
                f"resumed with {now}: the rest of this epoch has as many batches as Lightning "
                f"counts, which is not as many as there are samples left; "
                f"batch_size={before // topology.batch.size} would keep the batch"
            )
        skip = batches * before // topology.batch.size
        return _update_dataloader(dataloader, _Resumed(sampler, skip))


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
