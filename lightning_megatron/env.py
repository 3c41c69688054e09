"""The only file that reads environment variables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def global_seed() -> int | None:
    """Seed given to ``lightning.seed_everything``, if it was called."""
    value = os.environ.get("PL_GLOBAL_SEED")
    return int(value) if value else None


def seed_workers() -> bool:
    """Whether ``seed_everything(workers=True)`` asked for seeded DataLoader workers."""
    return os.environ.get("PL_SEED_WORKERS", "0") == "1"


def rank() -> int:
    """Rank of this process that its launcher set, also before the processes are connected."""
    for variable in ("RANK", "SLURM_PROCID"):
        if os.environ.get(variable):
            return int(os.environ[variable])
    # Lightning tells the processes that it starts; on other nodes than the first none is rank 0.
    return int(os.environ.get("LOCAL_RANK") or 0) or int(os.environ.get("NODE_RANK") or 0)


def has_own_output() -> bool:
    """Whether a user started this process by hand on its node, and reads its output."""
    launched = any(os.environ.get(name) for name in ("RANK", "SLURM_PROCID"))
    return not launched and not int(os.environ.get("LOCAL_RANK") or 0)


def shows_tracebacks() -> bool:
    """Whether errors of this package that end a process show a traceback."""
    return os.environ.get("LIGHTNING_MEGATRON_TRACEBACK", "0") not in ("", "0")


@dataclass(frozen=True, kw_only=True)
class TorchElastic:
    """Settings that torchrun passes to its workers."""

    run_id: str | None
    """Id of the run; None if torchrun got none."""
    restarts: int
    """Number of restarts of this node's workers."""
    max_restarts: int
    agent_store: bool
    """Whether torchrun's own store, which outlives the workers, is at MASTER_ADDR."""
    local_world_size: int
    nodes: int


def torch_elastic() -> TorchElastic | None:
    """Settings from torchrun; None if this process is no worker of it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    return TorchElastic(
        run_id=None if run_id == "none" else run_id,
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        max_restarts=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    )


def use_interface(name: str, *, explicit: bool) -> dict[str, str | None]:
    """Make gloo and NCCL listen on a network interface.

    Args:
        name: name of the interface.
        explicit: whether the user chose it for this run; else variables that are set keep their
            values.

    Returns:
        The variables that were changed, with their earlier values, for `restore`.
    """
    before = {}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if explicit or not os.environ.get(variable):
            before[variable] = os.environ.get(variable)
            os.environ[variable] = name
    return before


def restore(variables: dict[str, str | None]) -> None:
    """Restore earlier values of variables; None: they were not set."""
    for variable, value in variables.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def set_meeting_place(address: str, port: int) -> None:
    """Set MASTER_ADDR and MASTER_PORT, the address where the processes of the run meet."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def missing_meeting_place() -> list[str]:
    """Names of those of MASTER_ADDR and MASTER_PORT that are not set."""
    return [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]


def chosen_interface() -> str | None:
    """Network interface that the user chose for gloo; None if he chose none."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def gpu_queues() -> str | None:
    """Number of hardware queues that the streams of a process share on a GPU; None if unset."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or None


def allocator_settings() -> str:
    """Settings of torch's allocator for GPUs; empty if unset."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def slurm_sizes() -> dict[str, int]:
    """Numbers of nodes and tasks that Slurm started, as far as it sets them."""
    names = ("SLURM_NNODES", "SLURM_NTASKS")
    return {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()}


def slurm_job() -> str | None:
    """Id of this process' Slurm job, as ``scontrol`` names it; None outside Slurm."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return os.environ.get("SLURM_JOB_ID") or None


_PARENT = "LIGHTNING_MEGATRON_PARENT"


def started_by() -> int | None:
    """Id of the rank 0 process that started this one; None if none did."""
    value = os.environ.get(_PARENT)
    return int(value) if value and int(value) != os.getpid() else None


def announce_parent() -> None:
    """Pass the id of this process to the processes that it starts."""
    os.environ[_PARENT] = str(os.getpid())


def become_rank(local_rank: int) -> None:
    """Set LOCAL_RANK of this process."""
    os.environ["LOCAL_RANK"] = str(local_rank)


def error_file() -> str | None:
    """File from which torchrun reads the error of a worker; None without torchrun."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def expanded(path: str) -> str:
    """Return a path in which variables of this process' environment have their values."""
    return os.path.expandvars(path)


_TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"


@contextmanager
def sequential_tokenizers() -> Iterator[None]:
    """Let the tokenizers library use one thread, here and in processes that are started within."""
    before = os.environ.get(_TOKENIZERS_PARALLELISM)
    os.environ[_TOKENIZERS_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TOKENIZERS_PARALLELISM]
        else:
            os.environ[_TOKENIZERS_PARALLELISM] = before
