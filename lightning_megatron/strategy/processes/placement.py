"""Protocol of the strategy for its parts that deal with processes."""

from collections.abc import Callable
from typing import Protocol

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_megatron._lightning.launch import LauncherBase
from lightning_megatron.run_log.events import EventLog


class Placement(Protocol):
    """Place of this process among those of the run; the strategy has all of it.

    Attributes:
        num_nodes: nodes of the run as the Trainer was told.
        cluster_environment: Lightning's names of ranks and of the address where they meet.
        events: log of this rank.
        held: whether a hang was found for which all ranks are about to be ended: then no rank is
            to say of others why they died. A detector of hangs sets it.
    """

    num_nodes: int
    cluster_environment: ClusterEnvironment | None
    events: EventLog
    held: Callable[[], bool] | None

    @property
    def global_rank(self) -> int:
        """Rank of this process in the run."""

    @property
    def num_processes(self) -> int:
        """Processes on this node."""

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""

    @property
    def launcher(self) -> LauncherBase | None:
        """Launcher of the other processes of this node; None where it is not one of ours."""
