"""The part of the strategy that divides and seeds what the user's loaders read.

Each data-parallel rank reads its share of every batch. Which, and what of it a checkpoint keeps, is
decided in `data.position` (the training loader) and `data.sharding` (the others); what its samples
draw at random in `data.seeding`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_megatron import env
from lightning_megatron._lightning.connectors import divide_data, divides_data
from lightning_megatron._lightning.loaders import makes_training_loader
from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.data.reading.batch_sizes import BatchSizes
from lightning_megatron.data.reading.first_batches import compare_batches
from lightning_megatron.data.reading.global_batch import schedule_of, sized
from lightning_megatron.data.reading.seeding import seed_dataloader
from lightning_megatron.data.reading.sharding import divide_predictions, share_of
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.strategy.data.batch_shares import BatchShares
from lightning_megatron.strategy.data.position import DataPosition
from lightning_megatron.strategy.preflight.batch_sizes import AUTO_SIZE
from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.strategy.run import Run
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.mesh import Topology


class DataLoading:
    """Shares and random streams of the loaders of a run.

    Args:
        global_batch_size: samples of an optimizer step over all ranks; None leaves the sizes of
            batches to the user's loaders.
        shares: parts of the ranks.

    Attributes:
        position: of this run in its training data; a new one for each run.
        shares: parts of the ranks.
    """

    def __init__(
        self, shares: BatchShares | None = None, global_batch_size: int | None = None
    ) -> None:
        self.shares = shares or BatchShares()
        self.position = DataPosition(self.shares)
        self._checked = False
        """Whether the first batches of this run were compared."""
        self._global_batch_size = global_batch_size
        self._schedule: BatchSizes | None = None
        self._divides = False
        """Whether the Trainer was told to divide the samples (``use_distributed_sampler``)."""

    def begin(self, trainer: Trainer) -> None:
        """Begin a run: divide data here, but for predictions.

        Lightning would shuffle what is trained on, and repeat samples that are evaluated.
        """
        self.position = DataPosition(self.shares)
        self._checked = False
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._schedule = schedule_of(trainer) if fitting else None
        if self._schedule is not None:
            self._schedule.begin(self._global_batch_size)
        self._divides |= divides_data(trainer)
        predicting = trainer.state.fn == TrainerFn.PREDICTING
        divide_data(trainer, divide=self._divides and predicting)

    def check(self, batch: Any, run: Run) -> None:
        """Compare the first batches of data that the user divides himself; collective."""
        if self._checked:
            return
        self._checked = True
        names = self.position.left_to_the_user(run.trainer)
        if names and run.world_size > 1:
            compare_batches(batch, names, run.topology, run.host_group)

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
        sized_by_trial = options.microbatch_size == AUTO_SIZE
        changed = schedule_of(module.trainer) is not None
        if self.shares.text != "None" and (sized_by_trial or changed):
            what = "microbatch_size='auto'" if sized_by_trial else "BatchSchedule"
            return [
                f"batch_shares={self.shares.text}, {what}: only one of them may size what a rank "
                f"runs at once; nearest valid: no batch_shares, or no {what}"
            ]
        return self.shares.problems(
            None if readers is None else len(readers),
            module,
            divides=divides_data(module.trainer) or self._divides,
            on_host=in_host_memory(device),
        )

    def prepare(self, dataloader: object, trainer: Trainer, topology: Topology) -> object:
        """The loader with this rank's share of the samples, and its random streams."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not isinstance(dataloader, DataLoader):
            if fitting and trainer.training and makes_training_loader(trainer):
                self.position.follow(dataloader, trainer, topology)
            return dataloader
        seed = env.global_seed() or 0
        # The training loader comes first.
        if fitting and trainer.training and makes_training_loader(trainer):
            dataloader = self._sized(dataloader, topology)
            return self.position.prepare(
                dataloader,
                trainer,
                topology,
                seed,
                divide=self._divides,
                sizes=self._schedule,
            )
        if self._divides and trainer.state.fn != TrainerFn.PREDICTING:
            share = share_of(dataloader, topology, seed, evaluates=True)
            if share.untouched:
                return dataloader
            dataloader = share.loader
        elif self._divides:
            divide_predictions(dataloader, topology)
        seed_dataloader(dataloader, topology)
        return dataloader

    def _sized(self, dataloader: DataLoader[Any], topology: Topology) -> DataLoader[Any]:
        """The loader with this rank's share of the global batch, if the user has given its size."""
        schedule, size = self._schedule, self._global_batch_size
        name = f"global_batch_size={size}"
        if schedule is not None:
            name, size = "BatchSchedule", schedule.first
        if size is None:
            return dataloader
        if self.position.schedule is not None:
            raise ConfigError(
                "BatchSchedule, several training loaders: the samples of one loader are counted; "
                "nearest valid: one loader, or MegatronStrategy(global_batch_size=...)"
            )
        return sized(dataloader, size // topology.batch.size, name)

    def begin_batch(self, number: int) -> None:
        """Training has begun the batch of this number in the epoch."""
        if self.position.schedule is not None:
            self.position.schedule.begin_batch(number)

    @property
    def batch_size(self) -> int:
        """Samples of the present optimizer step, as a `BatchSchedule` gives them."""
        assert self.position.schedule is not None
        return self.position.schedule.size

    @property
    def consumed_samples(self) -> int:
        """Samples that the run has read up to the end of the present step."""
        assert self.position.schedule is not None
        return self.position.schedule.total_consumed

    def scaled_rates(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context of an optimizer step, whose learning rates follow the size of the batch."""
        if self._schedule is None or self.position.schedule is None:
            return nullcontext()
        return self._schedule.scaled(optimizer.param_groups, self.batch_size)


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
