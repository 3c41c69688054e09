"""Which samples a rank reads: its data-parallel share, in an order that no layout changes.

Lightning's own insertion of a ``DistributedSampler`` shuffles every training loader, whatever the
user chose, and leaves a single process to its own random order; a run would then see other batches
under dp=2 than under dp=1. Here a loader that does not shuffle keeps its order, one that does takes
the order of ``DistributedSampler`` (a function of the seed and the epoch) on any number of
processes. With batches of ``b / dp`` samples, the ranks' batches together are the batch of ``b``
samples that one process would read.
"""

from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_megatron import env
from lightning_megatron.topology.mesh import Topology


def split_dataloader(dataloader: DataLoader[Any], topology: Topology) -> DataLoader[Any]:
    """The loader of this rank's share of ``dataloader``; itself where there is nothing to divide.

    A loader with a ``DistributedSampler`` or an ``IterableDataset`` is left to the user.
    """
    sampler: Any = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
    if isinstance(sampler, DistributedSampler) or has_iterable_dataset(dataloader):
        return dataloader
    permutes = _is_permutation(sampler)
    if topology.batch.size == 1 and not permutes:
        return dataloader
    options: dict[str, Any] = {
        "num_replicas": topology.batch.size,
        "rank": topology.batch.rank,
        "seed": env.global_seed() or 0,
        "shuffle": permutes,
    }
    if permutes or isinstance(sampler, SequentialSampler):
        share: Any = DistributedSampler(dataloader.dataset, **options)
    else:
        share = DistributedSamplerWrapper(sampler, **options)
    return _update_dataloader(dataloader, share)


def _is_permutation(sampler: Any) -> bool:
    """Whether ``sampler`` is what ``DataLoader(shuffle=True)`` makes: each sample once."""
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    )
