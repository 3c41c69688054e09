"""Random streams of data loading: equal for ranks that read the same samples.

tp peers and pipeline stages each load their own copy of the batch, so that nothing is sent.
Lightning seeds DataLoader workers by the global rank, which would give those copies different
augmentations; and an iterator of a DataLoader draws its workers' seed from PyTorch's default
generator, whose position may differ between pipeline stages. Both are made functions of the batch
rank here, before Lightning looks.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_megatron import env
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import derive_seed


def seed_dataloader(dataloader: DataLoader[object], topology: Topology) -> None:
    """Give ``dataloader`` generators of its own, where the user gave none."""
    if dataloader.generator is None:
        dataloader.generator = _generator(topology, "workers", topology.batch.rank)
    for sampler in _samplers(dataloader):
        if getattr(sampler, "generator", ...) is None:
            sampler.generator = _generator(topology, "order")
    if env.seed_workers() and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=topology.batch.rank)


def _samplers(dataloader: DataLoader[object]) -> Iterator[Any]:
    """Every sampler in which a random order may be drawn, down to the user's own."""
    yield dataloader.sampler
    sampler: Any = getattr(dataloader.batch_sampler, "sampler", None)
    yield sampler
    if isinstance(sampler, DistributedSamplerWrapper):
        yield getattr(sampler.dataset, "_sampler", None)


def _generator(topology: Topology, *names: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(topology.seed, "data", *names))
