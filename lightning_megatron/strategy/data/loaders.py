"""The part of the strategy that divides and seeds what the user's loaders read.

Each data-parallel rank reads its share of every batch. Which, and what of it a checkpoint keeps, is
decided in `data.position` (the training loader) and `data.sharding` (the others); what its samples
draw at random in `data.seeding`.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_megatron import env
from lightning_megatron._lightning import divide_data, divides_data, makes_training_loader
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.strategy.data.batch_shares import BatchShares
from lightning_megatron.strategy.data.first_batches import compare_batches
from lightning_megatron.strategy.data.position import DataPosition
from lightning_megatron.strategy.data.seeding import seed_dataloader
from lightning_megatron.strategy.data.sharding import divide_predictions, share_of
from lightning_megatron.strategy.data.streams import tell_rank
from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.mesh import Topology


class DataLoading:
    """Shares and random streams of the loaders of a run.

    Args:
        shares: parts of the ranks.

    Attributes:
        position: of this run in its training data; a new one for each run.
        shares: parts of the ranks.
    """

    def __init__(self, shares: BatchShares | None = None) -> None:
        self.shares = shares or BatchShares()
        self.position = DataPosition(self.shares)
        self._checked = False
        """Whether the first batches of this run were compared."""
        self._divides = False
        """Whether the Trainer was told to divide the samples (``use_distributed_sampler``)."""

    def begin(self, trainer: Trainer) -> None:
        """Begin a run: divide data here, but for predictions.

        Lightning would shuffle what is trained on, and repeat samples that are evaluated.
        """
        self.position = DataPosition(self.shares)
        self._checked = False
        self._divides |= divides_data(trainer)
        predicting = trainer.state.fn == TrainerFn.PREDICTING
        divide_data(trainer, divide=self._divides and predicting)

    def check(self, batch: Any, trainer: Trainer, topology: Topology, group: Any) -> None:
        """Compare the first batches of data that the user divides himself; collective."""
        if self._checked:
            return
        self._checked = True
        names = self.position.left_to_the_user(trainer)
        if names and topology.world_size > 1:
            compare_batches(batch, names, topology, group)

    def share_problems(
        self,
        module: LightningModule,
        options: LayoutOptions,
        world_size: int,
        device: torch.device,
    ) -> list[str]:
        """Faults of ``batch_shares``, before there are processes."""
        legal = not options.problems(world_size)
        readers = groups_along("batch", options.degrees(world_size))[0] if legal else None
        return self.shares.problems(
            None if readers is None else len(readers),
            module,
            divides=divides_data(module.trainer) or self._divides,
            on_host=device.type == "cpu",
        )

    def prepare(self, dataloader: object, trainer: Trainer, topology: Topology) -> object:
        """The loader with this rank's share of the samples, and its random streams."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not isinstance(dataloader, DataLoader):
            if fitting and trainer.training and makes_training_loader(trainer):
                self.position.follow(dataloader, trainer, topology)
            return dataloader
        tell_rank(dataloader.dataset, topology)
        seed = env.global_seed() or 0
        # The training loader comes first.
        if fitting and trainer.training and makes_training_loader(trainer):
            return self.position.prepare(dataloader, trainer, topology, seed, divide=self._divides)
        if self._divides and trainer.state.fn != TrainerFn.PREDICTING:
            dataloader = share_of(dataloader, topology, seed, evaluates=True).loader
        elif self._divides:
            divide_predictions(dataloader, topology)
        seed_dataloader(dataloader, topology)
        return dataloader


def sampler_kwargs(options: LayoutOptions, world_size: int, rank: int) -> dict[str, Any]:
    """Number and rank of the readers, before there is a topology.

    Raises:
        ConfigError: the layout does not fit the number of processes.
    """
    raise_if_any(options.problems(world_size))
    groups = groups_along("batch", options.degrees(world_size))
    ranks = next(group for group in groups if rank in group)
    return {"num_replicas": len(ranks), "rank": ranks.index(rank)}


def batch_share(global_batch: int, ranks: int) -> int:
    """Batch size of each of some ranks for a batch that they read together.

    Raises:
        ConfigError: they cannot share it evenly.
    """
    share, left = divmod(global_batch, ranks)
    if left or share < 1:
        nearest = max(round(global_batch / ranks), 1) * ranks
        raise ConfigError(
            f"batch_share({global_batch}): {ranks} data-parallel ranks read equal parts of a "
            f"batch; nearest valid: {nearest}, or a number of nodes whose ranks divide it"
        )
    return share
