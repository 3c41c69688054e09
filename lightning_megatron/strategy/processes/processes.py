"""The part of the strategy that starts, connects, numbers and ends the processes of a run."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

from lightning_megatron import env
from lightning_megatron._lightning.launch import LauncherBase, is_interactive
from lightning_megatron._torch.groups import make_group
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, ConnectError
from lightning_megatron.fault_tolerance.signals import StopFlag
from lightning_megatron.launch import interfaces
from lightning_megatron.launch.attempt import Attempt, Peer
from lightning_megatron.launch.rendezvous import dismiss
from lightning_megatron.strategy.failure import PeerFailures
from lightning_megatron.strategy.processes.checks import (
    REACH_S,
    start_problems,
    tell_others,
    unclear_interface,
)
from lightning_megatron.strategy.processes.connection import ConnectionConfig, connect, open_store
from lightning_megatron.strategy.processes.fork_launcher import ForkLauncher
from lightning_megatron.strategy.processes.launcher import Launcher, watch_parent
from lightning_megatron.strategy.processes.placement import Placement
from lightning_megatron.topology.mesh import Topology

logger = logging.getLogger(__name__)


class Processes:
    """Processes of a run, from their start to their end.

    Args:
        placement: where this process stands; the strategy.
        config: how the processes find each other.
        flag: tells that a signal asks this process to end.

    Attributes:
        attempt: which start of the processes this is; exists once they are connected.
        failures: what this rank does when a rank fails.
    """

    attempt: Attempt

    def __init__(self, placement: Placement, config: ConnectionConfig, flag: StopFlag) -> None:
        self._placement = placement
        self._config = config
        self.failures = PeerFailures(placement, flag)
        self._interface_before: dict[str, str | None] = {}
        self._host_group: dist.ProcessGroup | None = None

    @property
    def _environment(self) -> ClusterEnvironment:
        environment = self._placement.cluster_environment
        assert environment is not None
        return environment

    def launcher(self, strategy: ParallelStrategy) -> LauncherBase | None:
        """Return what starts the other processes of this node; None where nobody has to.

        Args:
            strategy: the placement as Lightning's class, for a launcher that forks it.
        """
        processes, nodes = self._placement.num_processes, self._placement.num_nodes
        external = self._environment.creates_processes_externally
        if self._config.forks(processes, nodes, is_interactive() and not external):
            return None if external else ForkLauncher(strategy, processes)
        if processes * nodes > 1 and not external:
            return Launcher(self._environment, processes, nodes, self.check_start)
        return None

    @property
    def nodes(self) -> int:
        """Number of nodes of the run, also before the ranks are numbered."""
        elastic = env.torch_elastic()
        return self._placement.num_nodes if elastic is None else elastic.nodes

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the run are on this node."""
        return self.nodes == 1

    def check_start(self) -> None:
        """Raise if this process was started with numbers or names that cannot be right.

        Raises:
            ConfigError: they cannot; the other nodes are told so, where they can be reached.
        """
        environment, nodes = self._environment, self.nodes
        processes = self._placement.num_processes
        problems = start_problems(environment, nodes, processes, self._config.bind)
        if problems:
            error = ConfigError(problems)
            tell_others(environment, nodes, processes, error)
            raise error

    @contextmanager
    def told_to_others(self) -> Iterator[None]:
        """Within the block a `ConfigError` of this process ends the other nodes as well."""
        try:
            yield
        except ConfigError as error:
            if self.nodes > 1 and not dist.is_initialized():
                self._tell_others(error)
            raise

    def _tell_others(self, error: ConfigError) -> None:
        environment = self._environment
        elastic = env.torch_elastic()
        if environment.global_rank() or (elastic is not None and elastic.agent_store):
            tell_others(environment, self.nodes, self._placement.num_processes, error)
            return
        known = (interfaces.EVERY, *interfaces.interface_names())
        bind = self._config.bind if self._config.bind in known else None
        right = ConnectionConfig(bind=bind)  # the mistake may be one of these options
        with suppress(ConfigError, ConnectError, OSError, RuntimeError):  # one error is enough
            store = open_store(right, environment, single_machine=False)
            dismiss(store, environment.world_size(), error.problems, REACH_S)

    def find_peers(self, options: Mapping[str, str], from_host: bool) -> None:
        """Find the other ranks; see `connect`."""
        config, placement = self._config, self._placement
        watch = watch_parent()
        interface = self._interface(config)
        if interface is not None:
            explicit = config.bind is not None
            self._interface_before = env.use_interface(interface, explicit=explicit)
        self.attempt = connect(
            config,
            self._environment,
            placement.root_device,
            {"num_nodes": str(self.nodes), "devices": str(placement.num_processes), **options},
            single_machine=self.on_one_machine,
            from_host=from_host,
        )
        if watch is not None:
            watch.close()
        placement.events.identify(run=self.attempt.run_id, attempt=self.attempt.number)
        self.failures.begin_watch(self.attempt)

    def rename_run(self, run_id: str) -> None:
        """Go by the id of the run that is resumed, whatever the launcher calls it now."""
        self.attempt = replace(self.attempt, run_id=run_id)
        self._placement.events.identify(run=run_id)

    def _interface(self, config: ConnectionConfig) -> str | None:
        """Network interface that gloo and NCCL are to listen on; None: what they choose."""
        if config.bind not in (None, interfaces.EVERY):
            return config.bind
        if self.on_one_machine:
            return None if config.bind is not None else interfaces.loopback()
        if env.chosen_interface() is not None or interfaces.is_reached_by_name():
            return None
        address = self._environment.main_address
        place = interfaces.leading_to(address)
        if place is None:
            raise ConfigError(unclear_interface(address))
        logger.info(
            "no other machine reaches this one by its name, %s: gloo and NCCL listen on %s (%s), "
            "which leads to MASTER_ADDR=%s",
            Peer.here().host,
            place.interface,
            place.address,
            address,
        )
        return place.interface

    def node_names(self) -> list[str]:
        """Name of the node of every rank; collective where somebody else connected the ranks."""
        if len(self.attempt.peers) == dist.get_world_size():
            return [peer.node for peer in self.attempt.peers]
        return Peers().all_gather(Peer.here().node)

    def forget_interface(self) -> None:
        """Leave to the environment the choice of an interface that `find_peers` made."""
        env.restore(self._interface_before)
        self._interface_before = {}

    def number_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        environment = self._placement.cluster_environment
        if environment is not None:
            processes = self._placement.num_processes
            rank = environment.node_rank() * processes + environment.local_rank()
            environment.set_global_rank(rank)
            environment.set_world_size(self._placement.num_nodes * processes)
        for function in (rank_zero_only, utilities_rank_zero_only):
            setattr(function, "rank", self._placement.global_rank)  # noqa: B010 (of a function)

    # Groups on the host --------------------------------------------------------------------------

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All processes over gloo; None for the default group where that is gloo's."""
        if dist.get_backend() == "gloo":
            return None
        if self._host_group is None:
            self._host_group = self.new_host_group()
        return self._host_group

    def new_host_group(self) -> dist.ProcessGroup | None:
        """Another gloo group of all processes, for a thread of its own; None for one process."""
        if dist.get_world_size() == 1:
            return None
        timeout = timedelta(seconds=self._config.timeout_s)
        everyone = range(dist.get_world_size())
        return make_group([everyone], timeout, backend="gloo", name="host")

    def leave_groups_to(self, topology: Topology) -> None:
        """Have the group that was made here destroyed with those of a topology."""
        if self._host_group is not None:
            topology.keep(self._host_group)
        self._host_group = None
