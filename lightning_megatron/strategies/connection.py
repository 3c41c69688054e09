"""How the processes of a run are started, know each other, connect and end."""

import difflib
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from typing_extensions import override

from lightning_megatron.errors import ConfigError

_GRACE_S = 3.0
"""How long after a failure of rank 0 the other processes of the node may go on."""


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """How the processes find and talk to each other."""

    backend: str | None = None
    """``torch.distributed`` backend; None: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 1800.0
    """Seconds after which a collective that a peer does not join fails."""

    def problems(self, from_host: bool = False) -> list[str]:
        """Faults of the options; ``from_host`` if tensors in host memory will be sent too."""
        problems = []
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
                f"connection.backend={self.backend!r}, sharding.cpu_offload=True: gradients in "
                "host memory are sent by gloo; nearest valid: backend=None, or "
                "backend='cpu:gloo,cuda:nccl'"
            )
        if not self.timeout_s > 0:
            problems.append(
                f"connection.timeout_s={self.timeout_s}: must be positive; nearest valid: "
                "timeout_s=1800"
            )
        return problems


def connect(
    config: ConnectionConfig,
    environment: ClusterEnvironment,
    device: torch.device,
    settings: Any,
    *,
    from_host: bool = False,
) -> None:
    """Form the default process group and compare settings over it.

    Args:
        config: backend and timeout.
        environment: who this process is.
        device: of this process.
        settings: what every rank was given.
        from_host: whether tensors in host memory will be sent too, beside those on the device.

    Raises:
        ConfigError: ranks were given different settings; on all of them.
    """
    reset_seed()
    backend = _get_default_process_group_backend_for_device(device)
    if from_host and device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    _init_dist_connection(
        environment,
        config.backend or backend,
        timeout=timedelta(seconds=config.timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    everyone: list[Any] = [None] * environment.world_size()
    dist.all_gather_object(everyone, settings)
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if differing:
        raise ConfigError(
            f"the ranks were given different configurations: rank 0 has {everyone[0]}, rank "
            f"{differing[0]} has {everyone[differing[0]]}; start all of them with the same"
        )


class Processes(ParallelStrategy):
    """The part of the strategy that starts and ends the processes of this node."""

    num_nodes = 1

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
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (rank_zero_only, utilities_rank_zero_only):
            setattr(function, "rank", self.global_rank)  # noqa: B010 (of a function)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one started, which may wait for it for ever.

        They get a moment to fail by themselves: when this exception is but the echo of theirs, it
        is their traceback that tells the user what went wrong.
        """
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            deadline = time.monotonic() + _GRACE_S
            for process in self._launcher.procs:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
            self._launcher.kill(signal.SIGKILL)
