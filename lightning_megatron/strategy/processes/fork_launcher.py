"""Starts the processes of a run by fork, where there is no script to be started again: notebooks.

Each rank is a child of the interactive process and begins with a copy of what that has in memory,
so that modules and data may be defined in cells. The interactive process only waits. When all ranks
have ended, global rank 0 hands over what a user looks at afterwards: the weights, gathered whole
from whatever layout they are on, the metrics, the progress of the loops and the state of callbacks.
What else the ranks changed, attributes of the module or of the data, has gone with them.

A fork has no threads but its own. Those of torch's CPU kernels are ended before, and process groups
of an earlier run in the interactive process are forgotten in the fork. CUDA cannot be used in a
fork once it was used before.
"""

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron._lightning.launch import (
    LauncherBase,
    callback_states,
    forget_launcher,
    run_as_entry_point,
)
from lightning_megatron._lightning.loaders import forget_loader_states
from lightning_megatron._torch.devices import cuda_is_initialized
from lightning_megatron._torch.dtensor import forget_meshes
from lightning_megatron._torch.groups import abandon_process_groups
from lightning_megatron._torch.kernels import end_kernel_threads
from lightning_megatron.checkpoint.gather_state import gather
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.failures.root_cause import describe_exit, is_echo
from lightning_megatron.fault_tolerance.signals import interrupt_once

_PATIENCE_S = 20.0
"""Seconds in which ranks may end once one of them has ended with an error."""
_PERIOD_S = 0.25
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
"""Signals to the interactive process that are meant for the run."""


class ForkLauncher(LauncherBase):
    """Runs every rank in a fork of this process.

    The first interrupt of the interactive process (Ctrl-C, "interrupt the kernel") goes to all
    ranks, which end as they would in a script; a second one kills them.

    Args:
        strategy: whose processes these are.
        processes: how many.
    """

    def __init__(self, strategy: ParallelStrategy, processes: int) -> None:
        self._strategy = strategy
        self._count = processes
        self._processes: list[BaseProcess] = []
        self._killed = False

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        assert trainer is not None
        self._prepare(trainer)
        folder = Path(tempfile.mkdtemp(prefix="lightning_megatron-"))
        try:
            self._start(folder, trainer, lambda: function(*args, **kwargs))
            with self._signals_passed_on():
                interrupted = self._wait()
            if interrupted or any(process.exitcode for process in self._processes):
                raise self._failure(folder)
            return _take_over(trainer, folder)
        finally:
            self.kill(signal.SIGKILL)
            self._processes = []
            shutil.rmtree(folder, ignore_errors=True)

    @override
    def kill(self, signum: Any) -> None:
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signum)  # not reaped yet, so it is no other process
                if signum == signal.SIGKILL:
                    self._killed = True
                    process.join()

    # Before --------------------------------------------------------------------------------------

    def _prepare(self, trainer: pl.Trainer) -> None:
        used = cuda_is_initialized()
        if used and isinstance(self._strategy.accelerator, CUDAAccelerator):
            raise ConfigError(
                "connection.start='fork': this process has used CUDA already (a tensor on a GPU, a "
                "fit with devices=1), and processes forked from it cannot use it any more; nearest "
                "valid: restart the kernel and begin with this fit, or devices=1"
            )
        environment = self._strategy.cluster_environment
        assert environment is not None
        environment.validate_settings(num_devices=self._count, num_nodes=1)
        _ = environment.main_port  # which each fork would choose for itself
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                _ = logger.version  # likewise; the interactive process then has it, too
        end_kernel_threads()
        forget_meshes()

    def _start(self, folder: Path, trainer: pl.Trainer, job: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._killed = False
        self._processes = []
        for rank in range(self._count):
            process = context.Process(
                target=_be_rank, args=(rank, os.getpid(), folder, trainer, job), name=f"rank {rank}"
            )
            self._processes.append(process)
            process.start()

    # Meanwhile -----------------------------------------------------------------------------------

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        mine = [n for n in _PASSED_ON if signal.getsignal(n) == signal.SIG_DFL]
        for number in mine:
            signal.signal(number, lambda number, _: self.kill(number))
        try:
            yield
        finally:
            for number in mine:
                signal.signal(number, signal.SIG_DFL)

    def _wait(self) -> bool:
        """Return when all ranks have ended, and whether that was asked for by an interrupt."""
        try:
            self._until_they_end()
            return False
        except KeyboardInterrupt:
            self.kill(signal.SIGINT)
        try:
            self._until_they_end()
        except KeyboardInterrupt:
            self.kill(signal.SIGKILL)
        return True

    def _until_they_end(self) -> None:
        failed_at: float | None = None
        while running := [p for p in self._processes if p.exitcode is None]:
            wait([process.sentinel for process in running], _PERIOD_S)
            if failed_at is None and any(process.exitcode for process in self._processes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + _PATIENCE_S:
                self.kill(signal.SIGKILL)

    # Afterwards ----------------------------------------------------------------------------------

    def _failure(self, folder: Path) -> BaseException:
        """The exception of the rank that failed first, or how the ranks have left."""
        told = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("error*"))]
        told.sort(key=lambda error: (error["echo"], error["at"]))
        spoken = {error["rank"] for error in told}
        codes = {rank: process.exitcode or 0 for rank, process in enumerate(self._processes)}
        silent = {r: c for r, c in codes.items() if r not in spoken and c}
        left = [code for rank, code in silent.items() if (folder / f"left{rank}").exists()]
        dead = [rank for rank, code in silent.items() if code < 0 and not self._killed]
        if dead and (not told or told[0]["echo"]):
            what = describe_exit(codes[dead[0]])
            return RuntimeError(f"rank {dead[0]} (process {self._processes[dead[0]].pid}) {what}")
        if told:
            first = told[0]
            error: BaseException = first["error"] or RuntimeError(
                f"rank {first['rank']} failed with {first['summary']}"
            )
            error.__cause__ = _RankTraceback(first["rank"], first["text"])
            return error
        return SystemExit(left[0] if left else 1)


class _RankTraceback(Exception):
    """Shows where in a rank an exception was raised."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"in the process of rank {rank}:\n\n{text}")


# In the ranks ------------------------------------------------------------------------------------


def _be_rank(
    local_rank: int, parent: int, folder: Path, trainer: pl.Trainer, job: Callable[[], Any]
) -> None:
    """Do what a process of a script does, and end the process."""
    _until_exit = abandon_process_groups()
    gc.freeze()  # what knows threads of the interactive process must not be collected here
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="parent").start()
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt_once)
    env.become_rank(local_rank)
    strategy: Any = trainer.strategy
    forget_launcher(strategy)
    strategy.set_world_ranks()
    code: Any = 0
    try:
        _hand_over(trainer, run_as_entry_point(trainer, job), folder)
    except SystemExit as end:
        (folder / f"left{local_rank}").touch()
        code = end.code
    except BaseException as error:
        _tell(error, local_rank, folder)
        code = 1
    for child in multiprocessing.active_children():  # workers of loaders
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
    os._exit(1)


def _tell(error: BaseException, rank: int, folder: Path) -> None:
    told = {
        "rank": rank,
        "at": time.time(),
        "echo": is_echo(error),
        "summary": traceback.format_exception_only(error)[-1].strip(),
        "text": "".join(traceback.format_exception(error)),
        "error": error,
    }
    try:
        data = pickle.dumps(told)
        pickle.loads(data)
    except Exception:  # whatever a foreign exception does when it is copied
        data = pickle.dumps({**told, "error": None})
    (folder / f"error{rank}").write_bytes(data)


def _hand_over(trainer: pl.Trainer, results: Any, folder: Path) -> None:
    """Leave what the interactive process is to have, on global rank 0; collective."""
    weights = None
    if trainer.state.fn == TrainerFn.FITTING:
        weights = gather(trainer.lightning_module, rank=0, device=torch.device("cpu"))
    if not trainer.is_global_zero:
        return
    found = {
        "results": results,
        "weights": weights,
        "state": trainer.state,
        "loops": trainer.fit_loop.state_dict(),
        "callbacks": callback_states(trainer),
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "progress_bar_metrics": dict(trainer.progress_bar_metrics),
    }
    torch.save(move_data_to_device(found, "cpu"), folder / "results")


# In the interactive process ----------------------------------------------------------------------


def _take_over(trainer: pl.Trainer, folder: Path) -> Any:
    """Bring the Trainer and its module to where they would be after a run in this process."""
    found = torch.load(folder / "results", weights_only=False)  # our own file, in our own folder
    trainer.state = found["state"]
    trainer.callback_metrics.update(found["callback_metrics"])
    trainer.logged_metrics.update(found["logged_metrics"])
    trainer.progress_bar_metrics.update(found["progress_bar_metrics"])
    if found["weights"] is not None:
        _load_weights(trainer.lightning_module, found["weights"])
        loop = trainer.fit_loop
        loop.load_state_dict(found["loops"])
        loop.restarting = False  # it has come to its end
        forget_loader_states(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = deepcopy(found["callbacks"].get(callback.state_key))
        if not state:
            continue
        if isinstance(callback, ModelCheckpoint):  # it takes its state for that of its own folder
            callback.dirpath = state.get("dirpath", callback.dirpath)
        callback.load_state_dict(state)
    return found["results"]


def _load_weights(module: pl.LightningModule, weights: dict[str, Any]) -> None:
    if not weights.keys() <= module.state_dict().keys() and is_overridden(
        "configure_model", module
    ):
        module.configure_model()
    for name, parameter in module.named_parameters():
        trained = weights.get(name)
        if isinstance(trained, torch.Tensor) and trained.dtype != parameter.dtype:
            parameter.data = parameter.data.to(trained.dtype)  # as `precision=` has it
    # As Lightning: a rank may have added layers, or taken some away.
    module.load_state_dict(weights, strict=False)
