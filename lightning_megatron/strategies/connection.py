"""How the processes of a run are started, know each other, connect and end."""

import atexit
import difflib
import multiprocessing
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _get_default_process_group_backend_for_device,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron._torch import HashStore, PrefixStore, Store, default_store
from lightning_megatron.comm.tree_group import BACKEND
from lightning_megatron.errors import ConfigError, ConnectError
from lightning_megatron.resilience import interfaces
from lightning_megatron.resilience.attempt import Attempt, Peer, join, recall, remember
from lightning_megatron.resilience.meeting_place import host_store, reach_store
from lightning_megatron.strategies.endings import EndingHooks
from lightning_megatron.strategies.forking import ForkLauncher
from lightning_megatron.strategies.launcher import Launcher, watch_parent


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """How the processes find and talk to each other."""

    backend: str | None = None
    """``torch.distributed`` backend; None: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 1800.0
    """Seconds after which a collective that a peer does not join fails."""
    init_timeout_s: float = 600.0
    """Seconds that the ranks wait for each other at the start, before they name who is missing."""
    bind: str | None = None
    """Network interface ("eth0") that the processes listen on, "0.0.0.0" for all; None: on a single
    machine only loopback, on several what torch chooses."""
    start: Literal["auto", "script", "fork"] = "auto"
    """How the processes of this machine are started unless torchrun, Slurm or MPI has done so:
    ``"script"`` starts the script again for each rank but the first; ``"fork"`` forks every rank
    from this process, as notebooks need it; ``"auto"`` takes ``"fork"`` in an interactive session
    with several devices. One device needs no further process unless ``"fork"`` asks for one."""

    def problems(self, from_host: bool = False) -> list[str]:
        """Faults of the options; ``from_host`` if tensors in host memory will be sent too."""
        problems = []
        known = [b for b in dist.Backend.backend_list if b not in ("undefined", "fake", BACKEND)]
        # "cpu:gloo,cuda:nccl" names one for each kind of device.
        named = [part.rpartition(":")[2] for part in (self.backend or "gloo").split(",")]
        for name in named:
            if name.lower() not in known:
                close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
                problems.append(
                    f"connection.backend={self.backend!r}: torch.distributed has {', '.join(known)}"
                    f"; nearest valid: backend={close[0]!r}"
                )
        if from_host and self.backend is not None and "gloo" not in self.backend.lower():
            problems.append(
                f"connection.backend={self.backend!r}, sharding.offload_parameters=True: gradients "
                "in host memory are sent by gloo; nearest valid: backend=None, or "
                "backend='cpu:gloo,cuda:nccl'"
            )
        for name, default in (("timeout_s", 1800), ("init_timeout_s", 600)):
            if not getattr(self, name) > 0:
                problems.append(
                    f"connection.{name}={getattr(self, name)}: must be positive; nearest valid: "
                    f"{name}={default}"
                )
        names = interfaces.interface_names()
        if self.bind not in (None, interfaces.EVERY, *names):
            problems.append(
                f"connection.bind={self.bind!r}: this machine has the network interfaces "
                f"{', '.join(names)}; nearest valid: bind=None, or bind='0.0.0.0' for all of them"
            )
        return problems

    def forks(self, processes: int, nodes: int, interactive: bool) -> bool:
        """Whether the processes are forked from this one.

        Args:
            processes: of this machine.
            nodes: of the run.
            interactive: whether this is a notebook or a Python prompt.

        Raises:
            ConfigError: they cannot be started in the way that is asked for.
        """
        if self.start not in (known := get_args(type(self).__annotations__["start"])):
            [nearest] = difflib.get_close_matches(str(self.start), known, n=1, cutoff=0.0)
            raise ConfigError(
                f"connection.start={self.start!r}: must be 'auto', 'script' or 'fork'; nearest "
                f"valid: start={nearest!r}"
            )
        several = processes * nodes > 1
        if self.start == "script" and interactive and several:
            raise ConfigError(
                f"connection.start='script', {processes} devices: an interactive session is no "
                "script that could be started again; nearest valid: start='fork', or devices=1"
            )
        if not (self.start == "fork" or (self.start == "auto" and interactive and several)):
            return False
        if nodes > 1:
            raise ConfigError(
                f"connection.start={self.start!r}, num_nodes={nodes}: fork starts processes on "
                "this machine only; nearest valid: num_nodes=1, or a script under torchrun or Slurm"
            )
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError(
                f"connection.start={self.start!r}: {sys.platform} has no fork; nearest valid: "
                "devices=1, or a script with start='script'"
            )
        return True


def connect(
    config: ConnectionConfig,
    environment: ClusterEnvironment,
    device: torch.device,
    settings: Any,
    *,
    single_machine: bool,
    from_host: bool = False,
) -> Attempt:
    """Form the default process group and compare settings over it.

    Args:
        config: backend and timeouts.
        environment: who this process is.
        device: of this process.
        settings: what every rank was given.
        single_machine: whether all processes run on this one.
        from_host: whether tensors in host memory will be sent too, beside those on the device.

    Raises:
        ConfigError: ranks were given different settings; on all of them.
        ConnectError: the ranks did not find each other; it says why, or who is missing.
    """
    backend = _get_default_process_group_backend_for_device(device)
    if from_host and device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    if dist.is_initialized():
        attempt = recall(default_store())
    else:
        attempt = _form_group(
            config, environment, device, config.backend or backend, single_machine
        )
    everyone: list[Any] = [None] * environment.world_size()
    dist.all_gather_object(everyone, settings)
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if differing:
        raise ConfigError(
            f"the ranks were given different configurations: rank 0 has {everyone[0]}, rank "
            f"{differing[0]} has {everyone[differing[0]]}; start all of them with the same"
        )
    return attempt


def _form_group(
    config: ConnectionConfig,
    environment: ClusterEnvironment,
    device: torch.device,
    backend: str,
    single_machine: bool,
) -> Attempt:
    rank, world_size = environment.global_rank(), environment.world_size()
    elastic = env.torch_elastic()
    begun = time.monotonic()
    store = _open_store(config, environment, single_machine)
    left = max(begun + config.init_timeout_s - time.monotonic(), 1.0)
    try:
        attempt = join(store, rank, world_size, left, None if elastic is None else elastic.run_id)
    except RuntimeError as error:
        if isinstance(error, ConnectError):
            raise
        raise ConnectError(
            f"the store at {environment.main_address}:{environment.main_port} has gone while the "
            f"ranks were connecting ({str(error).splitlines()[0]}): look at the output of rank 0"
        ) from None
    dist.init_process_group(
        backend,
        store=PrefixStore(attempt.prefix(), store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    if "nccl" in backend:  # torch warns about a group that still is there at exit
        atexit.register(_destroy_dist_connection)
    rank_zero_info(
        f"{world_size} {'process' if world_size == 1 else 'processes'} connected over {backend}"
        + (f", attempt {attempt.number}" if attempt.number else "")
    )
    return remember(default_store(), attempt)


def _open_store(
    config: ConnectionConfig, environment: ClusterEnvironment, single_machine: bool
) -> Store:
    """The store where the ranks meet, which rank 0 holds unless torchrun does."""
    address, port = environment.main_address, environment.main_port
    env.set_meeting_place(address, port)
    elastic, timeout_s = env.torch_elastic(), config.init_timeout_s
    if elastic is not None and elastic.agent_store:
        return reach_store(address, port, timeout_s, "torchrun")
    if environment.world_size() == 1:
        return HashStore()
    if single_machine and not interfaces.is_local(address):
        raise ConfigError(
            f"MASTER_ADDR={address}: all {environment.world_size()} processes run on this machine, "
            "which has no such name or address; nearest valid: leave MASTER_ADDR unset"
        )
    listen_on = None
    if config.bind != interfaces.EVERY and (single_machine or config.bind is not None):
        listen_on = interfaces.address_of(config.bind or interfaces.loopback())
    if single_machine and listen_on is not None:
        address = listen_on
    if environment.global_rank() != 0:
        return reach_store(address, port, timeout_s, "rank 0")
    return host_store(address, port, listen_on, timeout_s)


class Processes(EndingHooks):
    """The part of the strategy that starts and ends the processes of this node."""

    num_nodes = 1
    _connection: ConnectionConfig
    attempt: Attempt
    """Which start of the processes this is; exists once they are connected."""
    _interface_before: dict[str, str | None] = {}

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @override
    def _configure_launcher(self) -> None:
        environment, processes, nodes = self.cluster_environment, self.num_processes, self.num_nodes
        assert environment is not None
        self._launcher = None
        external = environment.creates_processes_externally
        if self._connection.forks(processes, nodes, _IS_INTERACTIVE and not external):
            self._launcher = None if external else ForkLauncher(self, processes)
        elif processes * nodes > 1 and not external:
            self._launcher = Launcher(environment, processes, nodes)

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the run are on this node."""
        elastic = env.torch_elastic()
        if elastic is not None:
            return elastic.nodes == 1
        return self.num_nodes == 1

    def find_peers(self, config: ConnectionConfig, settings: Any, from_host: bool) -> None:
        """Find the other ranks; see `connect`."""
        assert self.cluster_environment is not None
        watch = watch_parent()
        if self.on_one_machine or config.bind not in (None, interfaces.EVERY):
            name, explicit = config.bind or interfaces.loopback(), config.bind is not None
            self._interface_before = env.use_interface(name, explicit=explicit)
        self.attempt = connect(
            config,
            self.cluster_environment,
            self.root_device,
            settings,
            single_machine=self.on_one_machine,
            from_host=from_host,
        )
        if watch is not None:
            watch.close()
        self.events.identify(run=self.attempt.run_id, attempt=self.attempt.number)
        self.begin_watch(self.attempt)

    def node_names(self) -> list[str]:
        """Name of the node of every rank; collective where somebody else connected the ranks."""
        if len(self.attempt.peers) == dist.get_world_size():
            return [peer.node for peer in self.attempt.peers]
        names: list[Any] = [""] * dist.get_world_size()
        dist.all_gather_object(names, Peer.here().node)
        return names

    def forget_interface(self) -> None:
        """Leave to the environment the choice of an interface that `find_peers` made."""
        env.restore(self._interface_before)
        self._interface_before = {}

    def batch_share(self, global_batch: int) -> int:
        """Batch size of this run's loaders for a batch that all ranks read together.

        For ``train_dataloader`` of a module or data module whose run may go on with fewer or more
        nodes (``torchrun --nnodes 1:2``): the optimizer's steps then stay what they were. With
        ``microbatch_size`` a rank's larger share takes more time and not more memory.

        Raises:
            ConfigError: the data-parallel ranks cannot share it evenly.
        """
        ranks: int = self.topology.batch.size  # type: ignore[attr-defined]
        share, left = divmod(global_batch, ranks)
        if left or share < 1:
            nearest = max(round(global_batch / ranks), 1) * ranks
            raise ConfigError(
                f"batch_share({global_batch}): {ranks} data-parallel ranks read equal parts of a "
                f"batch; nearest valid: {nearest}, or a number of nodes whose ranks divide it"
            )
        return share

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        elastic = env.torch_elastic()
        if elastic is not None:  # nodes may join and leave; Trainer(num_nodes=) says how many can
            self.num_nodes = elastic.nodes
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (rank_zero_only, utilities_rank_zero_only):
            setattr(function, "rank", self.global_rank)  # noqa: B010 (of a function)
