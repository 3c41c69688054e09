"""Protocol of a run for the parts of the strategy."""

from typing import Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_megatron._lightning.launch import LauncherBase
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.run_log.events import EventLog
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.strategy.rng_state import RandomState
from lightning_megatron.strategy.step.steps import Steps
from lightning_megatron.topology.mesh import Topology


class Run(Protocol):
    """A run, as its parts see it; the strategy is one.

    Attributes:
        optimizers: those that Lightning steps.
        lr_scheduler_configs: schedules of the learning rate, as Lightning keeps them.
        clock: tells what this rank is doing.
        events: log of this rank.
        votes: what ranks tell each other in every batch.
    """

    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]
    clock: SectionClock
    events: EventLog
    votes: PerBatchVotes

    @property
    def lightning_module(self) -> LightningModule | None:
        """The user's module; None until a run begins."""

    @property
    def module(self) -> LightningModule:
        """The user's module."""

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs it."""

    @property
    def topology(self) -> Topology:
        """Groups and coordinates; exists once the processes are connected."""

    @property
    def parallel(self) -> ParallelModule:
        """The module on its layout."""

    @property
    def precision(self) -> ShardedPrecision:
        """The precision plugin."""

    @property
    def random_state(self) -> RandomState:
        """Generators of this process; exists once the run is set up."""

    @property
    def steps(self) -> Steps:
        """Steps on the layout; exist once the module is on it."""

    @property
    def shows_gradients(self) -> bool:
        """Whether hooks or steps of the user's are there to see gradients."""

    @property
    def launcher(self) -> LauncherBase | None:
        """Launcher of the other processes of this node; None where it is not one of ours."""

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All processes, for objects and tensors on the host; None for the default group."""
