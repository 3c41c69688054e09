"""Connection of the processes of a run."""

import difflib
import hashlib
import logging
import multiprocessing
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_megatron import env
from lightning_megatron._lightning.launch import default_backend, destroy_group_at_exit
from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron._torch.groups import (
    HashStore,
    PrefixStore,
    Store,
    default_store,
    nccl_options,
)
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, ConnectError
from lightning_megatron.launch import interfaces
from lightning_megatron.launch.attempt import Attempt, Peer, recall, remember
from lightning_megatron.launch.rendezvous import describe_differing, join
from lightning_megatron.launch.rendezvous_store import host_store, reach_store
from lightning_megatron.strategy.processes.checks import (
    unclear_interface,
)
from lightning_megatron.topology.context_layout import ContextConfig

logger = logging.getLogger(__name__)

_OWN_PATIENCE_S = 30.0
"""Seconds that a rank of another node than the first waits for rank 0 on its own machine."""


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """Options of how processes find and talk to each other."""

    backend: str | None = None
    """``torch.distributed`` backend; None: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 1800.0
    """Seconds after which a collective that a peer does not join fails."""
    init_timeout_s: float = 600.0
    """Seconds that the ranks wait for each other at the start, before they name who is missing."""
    bind: str | None = None
    """Network interface ("eth0") that the processes listen on. None: on a single machine only
    loopback; on several the one that the host's name stands for, or, if that is loopback as on
    Debian, the one that leads to MASTER_ADDR. "0.0.0.0": the store of rank 0 listens on all, as it
    has to where MASTER_ADDR is forwarded to it from an address of another machine."""
    high_priority: bool = True
    """Over NCCL, whether transfers go before computation that was asked for later: they then start
    as soon as a multiprocessor is free, and are over when they are needed."""
    max_channels: int | None = None
    """Over NCCL, most channels of each communicator. Each takes a multiprocessor while it sends,
    and some megabytes for as long as the communicator lives. None: NCCL's choice, up to 32."""
    start: Literal["auto", "script", "fork"] = "auto"
    """Way to start the processes of this machine unless torchrun, Slurm or MPI has done so:
    ``"script"`` starts the script again for each rank but the first; ``"fork"`` forks every rank
    from this process, as notebooks need it; ``"auto"`` takes ``"fork"`` in an interactive session
    with several devices. One device needs no further process unless ``"fork"`` asks for one."""

    def problems(
        self,
        from_host: bool = False,
        device: torch.device | None = None,
        cp: ContextConfig | None = None,
    ) -> list[str]:
        """Faults of the options.

        Args:
            from_host: whether tensors in host memory will be sent too.
            device: of this process; a CPU when None.
            cp: context parallelism of the run.
        """
        problems = []
        on_gloo = device is not None and not in_host_memory(device) and self.backend is not None
        if on_gloo and cp is not None and cp.degree > 1 and cp.kind in ("auto", "ring"):
            assert device is not None
            if serves(str(self.backend), device) == "gloo":
                problems.append(
                    f"connection.backend={self.backend!r}, cp={cp.text()}: a ring passes messages "
                    f"from one {device.type} device to the next, which gloo cannot; nearest valid: "
                    "kind='gather' or kind='ulysses', or backend=None"
                )
        known = [b for b in dist.Backend.backend_list if b not in ("undefined", "fake")]
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
                f"connection.backend={self.backend!r}, zero.offload_parameters=True: gradients "
                "in host memory are sent by gloo; nearest valid: backend=None, or "
                "backend='cpu:gloo,cuda:nccl'"
            )
        for name, default in (("timeout_s", 1800), ("init_timeout_s", 600)):
            if not getattr(self, name) > 0:
                problems.append(
                    f"connection.{name}={getattr(self, name)}: must be positive; nearest valid: "
                    f"{name}={default}"
                )
        if self.max_channels is not None and self.max_channels < 1:
            problems.append(
                f"connection.max_channels={self.max_channels}: must be positive; nearest valid: "
                "max_channels=1, or None for NCCL's choice"
            )
        names = interfaces.interface_names()
        if self.bind not in (None, interfaces.EVERY, *names):
            problems.append(
                f"connection.bind={self.bind!r}: this machine has the network interfaces "
                f"{', '.join(names)}; nearest valid: bind=None, or bind='0.0.0.0' for all of them"
            )
        return problems

    def nccl_options(self) -> Any | None:
        """Options of NCCL's communicators; None in a torch without it."""
        return nccl_options(
            timedelta(seconds=self.timeout_s),
            high_priority=self.high_priority,
            max_channels=self.max_channels,
        )

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
    options: Mapping[str, str],
    *,
    single_machine: bool,
    from_host: bool = False,
) -> Attempt:
    """Form the default process group of ranks that were given the same.

    Args:
        config: backend and timeouts.
        environment: who this process is.
        device: of this process.
        options: what every rank was given, by name; compared before the group forms.
        single_machine: whether all processes run on this one.
        from_host: whether tensors in host memory will be sent too, beside those on the device.

    Raises:
        ConfigError: ranks were given different options; on all of them.
        ConnectError: the ranks did not find each other; it says why, or who is missing.
    """
    backend = default_backend(device)
    if from_host and not in_host_memory(device):
        backend = f"cpu:gloo,{device.type}:{backend}"
    if not dist.is_initialized():
        backend = config.backend or backend
        return _form_group(config, environment, device, backend, single_machine, options)
    _compare(options, device)
    return recall(default_store())


def _compare(options: Mapping[str, str], device: torch.device) -> None:
    """Compare options over a group that is there: by a hash, and only if that differs by name."""
    text = repr(sorted(options.items())).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    largest = torch.tensor([number, -number], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if int(largest[0]) == -int(largest[1]):
        return
    everyone = Peers().all_gather((dict(options), Peer.here().host))
    first, host = everyone[0]
    problems = {}
    for other, _ in everyone:
        if other == first or repr(other) in problems:
            continue
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        pairs = {name: (other.get(name, "unset"), first.get(name, "unset")) for name in names}
        there = [(r, where) for r, (given, where) in enumerate(everyone) if given == other]
        problems[repr(other)] = describe_differing(pairs, there, [(0, host)])
    raise ConfigError(list(problems.values()))


def _form_group(
    config: ConnectionConfig,
    environment: ClusterEnvironment,
    device: torch.device,
    backend: str,
    single_machine: bool,
    options: Mapping[str, str],
) -> Attempt:
    rank, world_size = environment.global_rank(), environment.world_size()
    elastic = env.torch_elastic()
    begun = time.monotonic()
    store = open_store(config, environment, single_machine)
    left = max(begun + config.init_timeout_s - time.monotonic(), 1.0)
    run_id = None if elastic is None else elastic.run_id
    fresh = elastic is None or not elastic.agent_store
    try:
        attempt = join(store, rank, world_size, left, run_id, options=options, fresh=fresh)
    except RuntimeError as error:
        if isinstance(error, ConnectError):
            raise
        raise ConnectError(
            f"the store at {environment.main_address}:{environment.main_port} has gone while the "
            f"ranks were connecting ({str(error).splitlines()[0]}): look at the output of rank 0"
        ) from None
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(attempt.prefix(), store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.timeout_s),
            pg_options=config.nccl_options() if "nccl" in backend else None,
            # A bound communicator is split for further groups, which gloo cannot do.
            device_id=device if splits(backend, device) else None,
        )
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise ConnectError(_why_not_connected(rank, error)) from None
    if "nccl" in backend:  # torch warns about a group that still is there at exit
        destroy_group_at_exit()
    rank_zero_info(
        f"{world_size} {'process' if world_size == 1 else 'processes'} connected over {backend}"
        + (f", attempt {attempt.number}" if attempt.number else "")
    )
    if rank == 0:  # the others have read it just now
        remember(default_store(), attempt)
    return attempt


def serves(backend: str, device: torch.device) -> str:
    """The backend for tensors of a device, of which "cpu:gloo,cuda:nccl" names one for each kind.

    >>> serves("cpu:gloo,cuda:nccl", torch.device("cuda")), serves("gloo", torch.device("cuda"))
    ('nccl', 'gloo')
    """
    named = dict(part.split(":") for part in backend.lower().split(",") if ":" in part)
    return named.get(device.type, backend.lower())


def splits(backend: str, device: torch.device) -> bool:
    """Whether groups of a device are made by splitting the communicator of all ranks."""
    return not in_host_memory(device) and serves(backend, device) != "gloo"


def _why_not_connected(rank: int, error: RuntimeError) -> str:
    interface = env.chosen_interface() or "the address of its name"
    return (
        f"the ranks have met at the store, but gloo cannot connect them with each other: rank "
        f"{rank} on {Peer.here().host}, which listens on {interface}: {str(error).splitlines()[0]}."
        " Either a firewall between the machines closes ports, which gloo chooses among those above"
        " 1024, or they reach each other by another interface: ConnectionConfig(bind=...), or "
        "GLOO_SOCKET_IFNAME"
    )


def open_store(
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
    rank, first_node = environment.global_rank(), environment.node_rank() == 0
    local = interfaces.is_local(address)
    if single_machine and not local and not isinstance(environment, SLURMEnvironment):
        raise ConfigError(
            f"MASTER_ADDR={address}: all {environment.world_size()} processes run on this machine, "
            "which has no such name or address; nearest valid: leave MASTER_ADDR unset"
        )
    listen_on = None
    if local or single_machine:  # or somebody else listens
        listen_on = _listening_address(config, address, single_machine)
        address = listen_on or address
    if rank == 0:
        return host_store(address if local else "127.0.0.1", port, listen_on, timeout_s)
    if not local or single_machine or first_node or timeout_s <= _OWN_PATIENCE_S:
        return reach_store(address, port, timeout_s, "rank 0")
    try:
        return reach_store(address, port, _OWN_PATIENCE_S, "rank 0")
    except ConnectError:
        host = Peer.here().host
        raise ConfigError(
            f"MASTER_ADDR={environment.main_address} is {host} itself, which is node "
            f"{environment.node_rank()} of the run, and rank 0 did not answer there within "
            f"{_OWN_PATIENCE_S:g} s: it runs on the first node; nearest valid: MASTER_ADDR=<name "
            "or address of the first node>"
        ) from None


def _listening_address(config: ConnectionConfig, address: str, single_machine: bool) -> str | None:
    """Address that the store of rank 0 listens at, if this is its machine; None for all."""
    if config.bind == interfaces.EVERY:
        return None
    if config.bind is not None or single_machine:
        return interfaces.address_of(config.bind or interfaces.loopback())
    place = interfaces.leading_to(address, env.chosen_interface())
    if place is None:
        raise ConfigError(unclear_interface(address))
    return place.address
