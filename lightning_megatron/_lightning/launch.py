"""Base classes of launchers, and the way in which a strategy gets its launcher."""

import atexit
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _get_default_process_group_backend_for_device,
    _set_num_threads_if_needed,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from typing_extensions import override

LauncherBase = _Launcher
"""Base of all launchers. Private: `lightning.pytorch.strategies.launchers.launcher._Launcher`.
Every strategy of Lightning's has one, and none is public."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which starts the script again for each further rank of a machine.

    Private: `_SubprocessScriptLauncher`. Of it are used ``procs``, ``cluster_environment``,
    ``num_processes``, ``num_nodes`` and ``kill``.
    """

    def start_children(self) -> None:
        """Start the processes but the first.

        Private: `_call_children_scripts`.
        """
        self._call_children_scripts()


class LaunchingStrategy(ParallelStrategy):
    """A strategy that makes its launcher itself.

    Private: `Strategy._configure_launcher`, which Lightning's strategies override.
    """

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self.make_launcher()

    def make_launcher(self) -> _Launcher | None:
        """Return what starts the processes of this machine; None where nothing has to."""
        raise NotImplementedError


def forget_launcher(strategy: Strategy) -> None:
    """Have a strategy start no process, as its process was started by a launcher.

    Private: `Strategy._launcher`; the property ``launcher`` cannot be set.
    """
    strategy._launcher = None


def take_children(launcher: Any) -> list["subprocess.Popen[Any]"]:
    """Take the processes that a launcher has started away from it; none if it starts no scripts.

    Changed: ``procs`` of `_SubprocessScriptLauncher`. Its observer kills this process as soon as
    one of them leaves.
    """
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return []
    children = list(launcher.procs)
    launcher.procs.clear()
    return children


def limit_threads(processes: int) -> None:
    """Give this process its share of the machine's cores, unless ``OMP_NUM_THREADS`` is set.

    Private: `lightning.fabric.utilities.distributed._set_num_threads_if_needed`. Needed because
    Lightning calls it in the first process of a machine only.

    Args:
        processes: of this machine.
    """
    _set_num_threads_if_needed(num_processes=processes)


def is_interactive() -> bool:
    """Whether this process is a notebook or a Python prompt.

    Private: `lightning.fabric.utilities.imports._IS_INTERACTIVE`.
    """
    return _IS_INTERACTIVE


def default_backend(device: torch.device) -> str:
    """The backend of ``torch.distributed`` for a device.

    Private: `lightning.fabric.utilities.distributed._get_default_process_group_backend_for_device`.
    """
    return _get_default_process_group_backend_for_device(device)


def destroy_group_at_exit() -> None:
    """Destroy the default process group when this process ends, of which torch warns otherwise.

    Private: `lightning.fabric.utilities.distributed._destroy_dist_connection`, as Lightning's own
    ``init_dist_connection`` registers it.
    """
    atexit.register(_destroy_dist_connection)


def abort_group_at_exit(abort: Callable[[], None], patience_s: float) -> None:
    """Have this process, whose run has failed, end without its peers.

    In the place of `destroy_group_at_exit`, whose ``destroy_process_group`` waits for collectives
    that are under way on a device. A peer that never joins one would keep this process, and by that
    all others, which wait for it to end.

    Args:
        abort: ends the groups at once.
        patience_s: the process ends by ``os._exit`` if the end of its groups takes longer.
    """
    atexit.unregister(_destroy_dist_connection)
    atexit.unregister(_abort)
    atexit.register(_abort, abort, patience_s)


def _abort(abort: Callable[[], None], patience_s: float) -> None:
    timer = threading.Timer(patience_s, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        abort()
    finally:
        timer.cancel()


def run_as_entry_point(trainer: Trainer, job: Callable[[], Any]) -> Any:
    """Run what ``fit`` and the like run, with their handling of errors and interrupts.

    Private: `lightning.pytorch.trainer.call._call_and_handle_interrupt`. Needed in a process that
    was forked, which begins after Lightning's call of it.
    """
    return call._call_and_handle_interrupt(trainer, job)


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """The states of a Trainer's callbacks, as a checkpoint has them.

    Private: `lightning.pytorch.trainer.call._call_callbacks_state_dict`.
    """
    return call._call_callbacks_state_dict(trainer)
