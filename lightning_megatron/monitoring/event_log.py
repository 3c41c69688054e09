"""Event log of a run, and goodput by its events.

`EventLogWriter` opens the log of `run_log.events` and writes the ordinary events: start,
resumed, step, window, validation and end. A window is written when all callbacks have logged:
before the next batch or validation, or when training ends. Faults are written by those who find
them, and saves by `MegatronStrategy`. From the same events follow, by `monitoring.goodput`,

=========================  =========================================================================
``ft/goodput``             time of the steps that were kept over time since the first start
``ft/restarts_total``      how often processes were started again
``ft/steps_lost_total``    steps that had to be done again, or were undone
``ft/hangs_total``         hangs that `HangDetector` reported
``ft/rollbacks_total``     how often `NumberGuard` went back to older weights
``ft/detect_s``            of the last restart: from standing still until somebody noticed
``ft/recover_s``           of the last restart: from there until the first new step
=========================  =========================================================================

over all attempts whose events are in the directory, where the steps of a batch count from the end
of the one before, waiting for data included, validation and (under `MegatronStrategy`) saving
excluded. They are logged every ``trainer.log_every_n_steps`` steps.
"""

import os
import platform
import resource
import secrets
import socket
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron._torch.devices import device_module, is_cuda
from lightning_megatron.callback_group import members_of
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.flops import count_tokens
from lightning_megatron.monitoring.goodput import Ledger, ledger_of
from lightning_megatron.monitoring.window import logging_interval, loss_of, metrics_of
from lightning_megatron.run_log.events import EventLog
from lightning_megatron.run_log.sections import CHECKPOINT, DATA, VALIDATION
from lightning_megatron.services import events_of, services_if_any


class EventLogWriter(pl.Callback):
    """Writes the events of a run to ``run_dir/events`` and logs goodput; under any strategy.

    Neither hyper-parameters nor the environment are written, and texts lose what looks like a
    secret.

    Args:
        run_dir: where to write; by default the Trainer's ``default_root_dir``. Attempts of a run
            must have the same one.
        every_n_steps: optimizer steps that share a line.

    Attributes:
        ledger: what the events say about the run's time, on every rank by its own; while training.

    Raises:
        ConfigError: ``every_n_steps`` is smaller than one, or ``run_dir`` a URL.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str] | None = None, every_n_steps: int = 1
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(
                f"every_n_steps={every_n_steps}: must be at least 1; nearest valid: 1"
            )
        self._run_dir = run_dir
        self._every = every_n_steps
        self.ledger = Ledger()
        self._log = EventLog()
        self._formula: str | None = None
        self._window_due = False
        self._clear(0, 0.0, {})

    def _clear(self, step: int, now: float, sections: dict[str, float]) -> None:
        """Begin to count what the next line is to tell."""
        self._from_step = step
        self._begin = now
        self._sections = sections
        self._batch_end = now
        self._data_s = self._apart = 0.0
        self._tokens = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        strategy = trainer.strategy
        self._log = log = events_of(trainer)
        if not log.run:
            log.identify(run=strategy.broadcast(secrets.token_hex(8)))
        log.step = trainer.global_step
        log.open(self.directory_of_files(trainer))
        log.write(
            "start",
            world=trainer.world_size,
            layout=_layout(trainer),
            strategy=type(strategy).__name__,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(strategy.root_device),
            max_steps=trainer.max_steps,
            torch=torch.__version__,
            python=platform.python_version(),
        )

    def directory_of_files(self, trainer: pl.Trainer) -> str | os.PathLike[str]:
        """Directory that the ranks write into, each files of its own."""
        return self._run_dir or trainer.default_root_dir

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log = self._log
        if trainer.global_step or trainer.ckpt_path:
            log.write(
                "resumed", checkpoint=str(trainer.ckpt_path or ""), from_step=trainer.global_step
            )
        self._formula = None
        self._window_due = False
        # By now a checkpoint has told which run this is.
        if log.run_dir is not None:
            self.ledger = ledger_of(log.run_dir, log.run, log.rank)
        else:
            self.ledger = Ledger(log.rank)
        log.subscribe(self.ledger.add)
        self._clear(trainer.global_step, time.perf_counter(), _section_seconds(trainer))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._write_window(trainer)
        self._data_s += time.perf_counter() - self._batch_end

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Both clocks at once, so that the sections of a line add up to its seconds.
        self._batch_end, sections = time.perf_counter(), _section_seconds(trainer)
        step = trainer.global_step
        self._tokens += count_tokens(batch)
        self._log.step = step
        count = step - self._from_step
        window = count > 0 and step % logging_interval(trainer) == 0
        if count >= self._every or window:
            # A loss on a device is only waited for where Lightning does so as well.
            self._write_step(trainer, loss_of(outputs, wait=window), count, sections)
        if window:
            pl_module.log_dict(self.ledger.metrics(time.time()), batch_size=1)
            self._window_due = True

    def _write_window(self, trainer: pl.Trainer) -> None:
        """Write the metrics of a window; called once all callbacks have logged theirs."""
        if not self._window_due:
            return
        self._window_due = False
        memory, formula = _peaks_gib(trainer), _formula(trainer)
        if formula != self._formula:
            self._formula = formula
            self._log.write("formula", text=formula)
        self._log.write("window", metrics=metrics_of(trainer), memory=memory)

    def _write_step(
        self, trainer: pl.Trainer, loss: float | None, count: int, sections: dict[str, float]
    ) -> None:
        now = self._batch_end
        passed = {n: s - self._sections.get(n, 0.0) for n, s in sections.items()}
        if passed:
            self._apart = passed[CHECKPOINT] + passed[VALIDATION]
        else:
            passed = {DATA: self._data_s - self._apart}
        fields: dict[str, Any] = {} if loss is None else {"loss": loss}
        if count > 1:
            fields["steps"] = count
        self._log.write(
            "step",
            seconds=round(max(now - self._begin - self._apart, 0.0), 6),
            tokens=self._tokens,
            sections={name: round(s, 6) for name, s in passed.items() if s > 0},
            **fields,
        )
        self._clear(trainer.global_step, now, sections)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_window(trainer)
        self._validation_began = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        seconds = time.perf_counter() - self._validation_began
        self._apart += seconds
        sanity = {"sanity": True} if trainer.sanity_checking else {}
        found = {n: v for n, v in metrics_of(trainer).items() if n.startswith("val")}
        self._log.write("validation", seconds=round(seconds, 6), metrics=found, **sanity)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_window(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also a run that was stopped early has ended as it should."""
        self._log.write("end", status="completed", exit_code=0)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        name = type(exception).__name__
        if isinstance(exception, KeyboardInterrupt):
            status, code = "interrupted", 130
        elif isinstance(exception, SystemExit):
            code = exception.code if isinstance(exception.code, int) else 1
            status = "stopped"
        else:
            status, code = "failed", 1
        self._log.write("end", status=status, exit_code=code, error=f"{name}: {exception}")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._log.unsubscribe(self.ledger.add)
        self._log.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run": self._log.run}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._log.identify(run=state_dict["run"])


def _layout(trainer: pl.Trainer) -> dict[str, int] | None:
    """The degrees of parallelism; None under another strategy than ours."""
    services = services_if_any(trainer)
    if services is None:
        return None
    return {k: v for k, v in vars(services.topology.degrees).items() if type(v) is int}


def _section_seconds(trainer: pl.Trainer) -> dict[str, float]:
    services = services_if_any(trainer)
    return {} if services is None else dict(services.clock.seconds())


def _peaks_gib(trainer: pl.Trainer) -> dict[str, float]:
    """The most memory that this process has had so far; on a device, since it was last reset."""
    unit = 1024 if sys.platform == "darwin" else 1  # the others count in KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit / 2**20
    peaks = {"peak_rss_gib": round(peak, 4)}
    device = trainer.strategy.root_device
    if is_cuda(device):
        allocated = device_module(device).max_memory_allocated(device)
        peaks["peak_allocated_gib"] = round(allocated / 2**30, 4)
    return peaks


def _formula(trainer: pl.Trainer) -> str | None:
    """Formula of the FLOPs of the `ThroughputMonitor`, alone or in a group."""
    for member in members_of(trainer):
        if isinstance(formula := getattr(member, "formula", None), str):
            return formula
    return None
