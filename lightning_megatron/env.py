"""The only file that reads environment variables."""

import os
from dataclasses import dataclass


def global_seed() -> int | None:
    """Seed given to ``lightning.seed_everything``, if it was called."""
    value = os.environ.get("PL_GLOBAL_SEED")
    return int(value) if value else None


def seed_workers() -> bool:
    """Whether ``seed_everything(workers=True)`` asked for seeded DataLoader workers."""
    return os.environ.get("PL_SEED_WORKERS", "0") == "1"


def rank() -> int:
    """Rank of this process as its launcher says it, also before the processes are connected."""
    for variable in ("RANK", "SLURM_PROCID"):
        if os.environ.get(variable):
            return int(os.environ[variable])
    # Lightning tells the processes that it starts; on other nodes than the first none is rank 0.
    return int(os.environ.get("LOCAL_RANK") or 0) or int(os.environ.get("NODE_RANK") or 0)


def has_own_output() -> bool:
    """Whether a user started this process, by hand on each node, and reads what it says."""
    launched = any(os.environ.get(name) for name in ("RANK", "SLURM_PROCID"))
    return not launched and not int(os.environ.get("LOCAL_RANK") or 0)


def shows_tracebacks() -> bool:
    """Whether errors of this package that end a process are to show where they come from."""
    return os.environ.get("LIGHTNING_MEGATRON_TRACEBACK", "0") not in ("", "0")


def chaos_faults() -> str | None:
    """Faults that `ChaosMonkey` is to inject, as text, if a rehearsal was asked for."""
    return os.environ.get("LIGHTNING_MEGATRON_CHAOS") or None


def chaos_directory() -> str | None:
    """Where a rehearsal keeps what it did, if whoever started it said so."""
    return os.environ.get("LIGHTNING_MEGATRON_CHAOS_DIR") or None


def with_chaos(faults: str, directory: str, python_path: str) -> dict[str, str]:
    """The environment of a command that is to be made to fail.

    Args:
        faults: as text.
        directory: where the rehearsal is kept.
        python_path: found by its Python before everything else.
    """
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "LIGHTNING_MEGATRON_CHAOS": faults,
        "LIGHTNING_MEGATRON_CHAOS_DIR": directory,
        "PYTHONPATH": os.pathsep.join([python_path, *([before] if before else [])]),
    }


def restart_count() -> int:
    """How often torchrun has restarted this node's processes; 0 under other launchers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


@dataclass(frozen=True, kw_only=True)
class TorchElastic:
    """What torchrun tells its workers."""

    run_id: str | None
    """None where torchrun was given none."""
    restarts: int
    """Failures after which this node's workers were started again."""
    max_restarts: int
    agent_store: bool
    """Whether torchrun's own store, which outlives the workers, is at MASTER_ADDR."""
    local_world_size: int
    nodes: int


def torch_elastic() -> TorchElastic | None:
    """What torchrun says, if this process is a worker of it."""
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
    """Have gloo and NCCL listen on a network interface.

    Args:
        name: of the interface.
        explicit: whether the user chose it for this run; else variables that are set count more.

    Returns:
        The variables that were changed, with what they were before, for `restore`.
    """
    before = {}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if explicit or not os.environ.get(variable):
            before[variable] = os.environ.get(variable)
            os.environ[variable] = name
    return before


def restore(variables: dict[str, str | None]) -> None:
    """Give variables the values that they had; None: they had none."""
    for variable, value in variables.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def set_meeting_place(address: str, port: int) -> None:
    """Tell whoever asks the environment where the processes of the run meet."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def missing_meeting_place() -> list[str]:
    """Which of the variables that tell where the processes meet have no value."""
    return [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]


def chosen_interface() -> str | None:
    """Network interface that the user wants gloo to listen on, if he says so."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def slurm_sizes() -> dict[str, int]:
    """How many nodes and tasks Slurm has started, of those numbers that it tells."""
    names = ("SLURM_NNODES", "SLURM_NTASKS")
    return {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()}


def slurm_job() -> str | None:
    """The Slurm job, as ``scontrol`` names it, that this process belongs to."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return os.environ.get("SLURM_JOB_ID") or None


_PARENT = "LIGHTNING_MEGATRON_PARENT"


def started_by() -> int | None:
    """Process of rank 0 that started this one, if it did."""
    value = os.environ.get(_PARENT)
    return int(value) if value and int(value) != os.getpid() else None


def announce_parent() -> None:
    """Let processes that this one starts know who did."""
    os.environ[_PARENT] = str(os.getpid())


def become_rank(local_rank: int) -> None:
    """Let whoever asks the environment of this process know which rank of the machine it is."""
    os.environ["LOCAL_RANK"] = str(local_rank)


def error_file() -> str | None:
    """Where torchrun reads how a worker of it failed."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def expanded(path: str) -> str:
    """Return a path in which variables of this process' environment have their values."""
    return os.path.expandvars(path)
