"""Fault injection: a callback that makes a run fail, to try out its recovery.

`ChaosMonkey` injects the faults of `testing.chaos.faults` in the training process, where a real one
would strike: when a batch is fetched, in the forward (when ``training_step`` is called), in the
backward (when a gradient reaches the first module that the step called), before the optimizer's
step, while a checkpoint is put together, in a validation batch. It works under any strategy.

Each fault is recorded before it strikes: in ``RUN_DIR/chaos``, as an event ``injected``, and as a
block on stderr. By default a fault strikes once in a run, and not again in steps that a restart
repeats. A run that begins at step 0 without a restart is another run and deletes older records.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron._lightning import call_before_fetch
from lightning_megatron._torch import tree_flatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.monitoring.events import EventLog
from lightning_megatron.monitoring.sections import CHECKPOINT, VALIDATION
from lightning_megatron.services import events_of, services_if_any
from lightning_megatron.testing.chaos.actions import (
    ACTIONS,
    fill_disk,
    flip_bit,
    flip_bit_of_newest,
    kill_loader_worker,
    make_readonly,
)
from lightning_megatron.testing.chaos.faults import Fault, FaultLog, RunPosition, parse_faults
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.rng import derive_seed

_OF_THE_LOSS = ("nan_loss", "spike")
_POISONS = (*_OF_THE_LOSS, "nan_gradient")


class ChaosMonkey(pl.Callback):
    """Injects faults by rank, step, section, probability and seed.

    Args:
        faults: as text (see `testing.chaos.faults`) or as `Fault` objects; by default those in the
            environment variable ``LIGHTNING_MEGATRON_CHAOS``, and none without it.
        directory: directory of the records; by default ``chaos`` in the Trainer's
            ``default_root_dir``. Restarts must have the same.

    Raises:
        ConfigError: a fault or a rank does not exist.

    Example:
        >>> monkey = ChaosMonkey("kill:rank=1,step=5,section=backward; slow:rank=0,amount=20")
        >>> [fault.kind for fault in monkey.faults]
        ['kill', 'slow']
    """

    def __init__(
        self,
        faults: str | Sequence[str | Fault] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        given = env.chaos_faults() or "" if faults is None else faults
        entries = [given] if isinstance(given, str) else given
        self.faults: tuple[Fault, ...] = tuple(
            fault
            for entry in entries
            for fault in (parse_faults(entry) if isinstance(entry, str) else [entry])
        )
        self._directory = env.chaos_directory() if directory is None else os.fspath(directory)
        self._step_log = EventLog() if env.chaos_directory() else None
        """Events of the steps, for `chaos.runner`; None without it."""
        self._last_batch = 0.0
        self._full_disk = ExitStack()
        self._batches = 0
        self._fault_log: FaultLog | None = None
        self._began = 0.0
        self._until: dict[int, int] = {}
        """First step without the fault, for faults that last; by position in `faults`."""
        self._injected: dict[int, int] = {}
        """Last step in which each fault struck."""
        self._forward_done: dict[int, int] = {}
        """Last step whose forward is done, for faults of the loss: all microbatches of a batch have
        the fault, but a second run of the batch has not."""
        self._filled = -1
        """Position of the fault that filled the disk; -1: none."""
        self._unwrap: Callable[[], None] | None = None

    # Hooks ---------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or not self.faults:
            return
        for fault in self.faults:
            fault.ranks(trainer.world_size)
        self._fault_log = FaultLog(self._log_directory(trainer), trainer.global_rank)
        self._began = self._fault_log.started()
        listed = "; ".join(map(str, self.faults))
        rank_zero_warn(f"CHAOS: faults are injected into this run: {listed}")
        self._inject("start", trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fault_log is None:
            return
        if self._step_log is not None:
            self._open_step_log(self._step_log, trainer)
        elif not env.restart_count() and not trainer.global_step:
            self._fault_log.forget()
        call_before_fetch(trainer, partial(self._before_fetch, trainer))

    def _before_fetch(self, trainer: pl.Trainer) -> None:
        self._inject("data", trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._release()
        if self._due("forward", trainer) or self._due("backward", trainer):
            self._wrap(trainer, pl_module)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        for index, step in self._injected.items():
            if step == trainer.global_step:
                self._forward_done[index] = step

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._inject("backward", trainer)  # if nothing in the step had a gradient to wait for

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._inject("optimizer", trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._release()
        self._batches += 1
        if self._step_log is not None and trainer.global_step > self._step_log.step:
            # The same seconds as in the report of the run: validation and saves are no steps.
            now, before = time.monotonic() - _seconds_apart(trainer), self._last_batch
            self._last_batch, self._step_log.step = now, trainer.global_step
            self._step_log.write("step", seconds=now - before)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._make_room()
        if self._step_log is not None and self._fault_log is not None:
            self._step_log.write("end", status="completed")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._inject("checkpoint", trainer)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._inject("validation", trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._release()
        self._make_room()

    def _make_room(self) -> None:
        self._full_disk.close()
        self._filled = -1

    def _open_step_log(self, steps: EventLog, trainer: pl.Trainer) -> None:
        steps.identify(rank=trainer.global_rank, run="chaos", attempt=env.restart_count())
        steps.step = trainer.global_step
        self._last_batch = time.monotonic() - _seconds_apart(trainer)
        steps.open(self._log_directory(trainer))
        run_dir = events_of(trainer).run_dir
        where = None if run_dir is None else str(run_dir.absolute())
        steps.write("start", run_dir=where)

    # What is due ---------------------------------------------------------------------------------

    def _log_directory(self, trainer: pl.Trainer) -> Path:
        root = self._directory or os.path.join(trainer.default_root_dir, "chaos")
        if "://" in root:
            raise ConfigError(
                f"ChaosMonkey(directory={root!r}): must be a local directory, as processes that "
                "die write to it; nearest valid: directory='chaos'"
            )
        return Path(root)

    def _due(self, section: str, trainer: pl.Trainer) -> list[tuple[int, Fault]]:
        """Faults that may strike now, with their positions in `faults`."""
        if self._fault_log is None or trainer.state.fn != "fit":
            return []
        now, due = self._position(section, trainer), []
        for index, fault in enumerate(self.faults):
            done = self._forward_done if fault.kind in _OF_THE_LOSS else self._injected
            if done.get(index) == now.step:
                continue
            lasting = now.step < self._until.get(index, -1) and section == fault.section
            if lasting or any(
                fault.is_due(position) for position in _positions(fault, now, trainer)
            ):
                due.append((index, fault))
        return due

    def _position(self, section: str, trainer: pl.Trainer) -> RunPosition:
        return RunPosition(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            step=trainer.global_step,
            section=section,
            attempt=env.restart_count(),
            elapsed_s=time.time() - self._began,
            batches=self._batches,
        )

    def _claim(self, index: int, fault: Fault, section: str, trainer: pl.Trainer) -> bool:
        """Record that a fault strikes; False if it may not."""
        assert self._fault_log is not None
        now = self._position(section, trainer)
        lasting = now.step < self._until.get(index, -1)
        if not lasting:
            if not self._fault_log.claim(index, fault, now):
                return False
            self._until[index] = now.step + fault.steps
            _announce(fault, now, trainer)
        self._injected[index] = now.step
        return True

    def _inject(self, section: str, trainer: pl.Trainer) -> None:
        """Run the faults that are due in a section; may not return."""
        if self._filled >= 0 and trainer.global_step >= self._until[self._filled]:
            self._make_room()
        for index, fault in self._due(section, trainer):
            if fault.kind not in _POISONS and self._claim(index, fault, section, trainer):
                self._act(index, fault, trainer)

    def _act(self, index: int, fault: Fault, trainer: pl.Trainer) -> None:
        draw = derive_seed(fault.seed, fault.kind, trainer.global_step)
        if fault.kind == "bitflip":
            done = flip_bit(trainer.lightning_module.parameters(), draw)
        elif fault.kind == "worker_kill":
            done = kill_loader_worker(draw)
        elif fault.kind in ("corrupt", "readonly"):
            found = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
            folders = [folder for folder in found if folder and "://" not in str(folder)]
            corrupt = fault.kind == "corrupt"
            done = (
                flip_bit_of_newest(folders, draw)
                if corrupt
                else make_readonly(folders, fault.amount)
            )
        elif fault.kind == "disk_full":
            if self._filled == index:
                return
            self._make_room()
            self._full_disk = fill_disk()
            self._filled = index
            done = "no space left for checkpoints"
        else:
            ACTIONS[fault.kind](fault)
            return
        announce("CHAOS", [done], rank=trainer.global_rank)

    # Within a step -------------------------------------------------------------------------------

    def _wrap(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replace ``training_step`` by `_step` for this batch."""
        own = module.__dict__.get("training_step")
        original = module.training_step
        module.__dict__["training_step"] = partial(self._step, original, trainer)

        def unwrap() -> None:
            module.__dict__.pop("training_step")
            if own is not None:
                module.__dict__["training_step"] = own

        self._unwrap = unwrap

    def _release(self) -> None:
        unwrap, self._unwrap = self._unwrap, None
        if unwrap is not None:
            unwrap()

    def _step(self, original: Any, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        self._inject("forward", trainer)
        with ExitStack() as watching:
            if self._due("backward", trainer):
                self._watch_backward(watching, trainer)
            output = original(*args, **kwargs)
        return self._poison_loss(output, trainer)

    def _watch_backward(self, watching: ExitStack, trainer: pl.Trainer) -> None:
        """Inject when the gradient of the first module's output is computed."""

        def on_output(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._in_backward, trainer))  # type: ignore[no-untyped-call]
                    watching.close()
                    return

        watching.callback(register_module_forward_hook(on_output).remove)

    def _in_backward(self, trainer: pl.Trainer, gradient: Tensor) -> Tensor | None:
        self._inject("backward", trainer)
        for index, fault in self._due("backward", trainer):
            if fault.kind == "nan_gradient" and self._claim(index, fault, "backward", trainer):
                return gradient * float("nan")
        return None

    def _poison_loss(self, output: Any, trainer: pl.Trainer) -> Any:
        for index, fault in self._due("forward", trainer):
            if fault.kind in _OF_THE_LOSS and self._claim(index, fault, "forward", trainer):
                factor = float("nan") if fault.kind == "nan_loss" else fault.amount
                output = _scaled(output, factor)
        return output


def chaos_from_environment() -> list[pl.Callback]:
    """Return the callback that `lightning-megatron chaos` adds to every Trainer of its command."""
    return [ChaosMonkey()] if env.chaos_faults() else []


def _seconds_apart(trainer: pl.Trainer) -> float:
    """Seconds of validation and saves so far, where the strategy counts them."""
    services = services_if_any(trainer)
    if services is None:
        return 0.0
    return services.clock.seconds_in(CHECKPOINT) + services.clock.seconds_in(VALIDATION)


def _positions(fault: Fault, now: RunPosition, trainer: pl.Trainer) -> list[RunPosition]:
    """Positions of the ranks on whose behalf this rank injects a fault.

    A loss belongs to all ranks that work on the same samples; the rank that computes it injects.
    """
    services = services_if_any(trainer)
    if fault.kind not in _OF_THE_LOSS or services is None:
        return [now]
    groups = groups_along(("pp", "cp", "tp"), services.topology.degrees)
    peers = next(group for group in groups if now.rank in group)
    return [replace(now, rank=rank) for rank in peers]


def _scaled(output: Any, factor: float) -> Any:
    if isinstance(output, Tensor):
        return output * factor
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"] * factor}
    return output


def _announce(fault: Fault, now: RunPosition, trainer: pl.Trainer) -> None:
    where = f"rank {now.rank}, step {now.step}, {now.section}, attempt {now.attempt}"
    announce(f"CHAOS: injecting '{fault}'", [where], rank=now.rank)
    services = services_if_any(trainer)
    doing = now.section if services is None else services.clock.current
    about = {"section": now.section, "doing": doing, "detail": str(fault), "step": now.step}
    events_of(trainer).write("injected", what=fault.kind, **about)
