"""Strategy hooks for the user's loaders; mixed into the strategy.

Each data-parallel rank reads its share of every batch. Which, and what of it a checkpoint keeps, is
decided in `data_position` (the training loader) and `data_sampling` (the others); what its samples
draw at random in `data_seeding`.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_megatron import env
from lightning_megatron._lightning import divide_data, divides_data, makes_training_loader
from lightning_megatron.errors import raise_if_any
from lightning_megatron.strategy.data.position import DataPosition
from lightning_megatron.strategy.data.seeding import seed_dataloader
from lightning_megatron.strategy.data.sharding import share_of
from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.mesh import Topology


class LoaderHooks:
    """Dividing and seeding what loaders read."""

    lightning_module: LightningModule | None
    options: LayoutOptions
    world_size: int
    global_rank: int
    _topology: Topology | None
    _data_position: DataPosition
    _splits_data = False
    """Whether the Trainer was told to divide the samples (``use_distributed_sampler``)."""

    @property
    def topology(self) -> Topology:
        """Groups and coordinates of this run; the strategy's."""
        raise NotImplementedError

    def take_over_samplers(self, trainer: Trainer) -> None:
        """Divide data here, but for predictions.

        Lightning would shuffle what is trained on, and repeat samples that are evaluated.
        """
        self._splits_data |= divides_data(trainer)
        predicting = trainer.state.fn == TrainerFn.PREDICTING
        divide_data(trainer, divide=self._splits_data and predicting)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Who reads what share, for the samplers that Lightning makes itself.

        Raises:
            ConfigError: the layout does not fit the number of processes.
        """
        if self._topology is not None:
            return {"num_replicas": self.topology.batch.size, "rank": self.topology.batch.rank}
        raise_if_any(self.options.problems(self.world_size))
        groups = groups_along("batch", self.options.degrees(self.world_size))
        ranks = next(group for group in groups if self.global_rank in group)
        return {"num_replicas": len(ranks), "rank": ranks.index(self.global_rank)}

    def process_dataloader(self, dataloader: object) -> object:
        """The loader with this rank's share of the samples, and its random streams."""
        if not isinstance(dataloader, DataLoader) or self._topology is None:
            return dataloader  # the second: a loop that is called by hand, before any run
        assert self.lightning_module is not None
        trainer, seed = self.lightning_module.trainer, env.global_seed() or 0
        fitting = trainer.state.fn == TrainerFn.FITTING
        # The training loader comes first.
        if fitting and trainer.training and makes_training_loader(trainer):
            return self._data_position.prepare(
                dataloader, trainer, self.topology, seed, divide=self._splits_data
            )
        if self._splits_data and trainer.state.fn != TrainerFn.PREDICTING:
            dataloader = share_of(dataloader, self.topology, seed, evaluates=True).loader
        seed_dataloader(dataloader, self.topology)
        return dataloader
