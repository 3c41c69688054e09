"""A callback that makes a run fail, in drills of its recovery.

`FaultInjector` commits faults in the training process, where a real one would strike: when a batch
is fetched, in the forward (when ``training_step`` is called), in the backward (when a gradient
reaches the first module that the step called), before the optimizer's step, while a checkpoint is
put together, in a validation batch. It works under any strategy.

Before a fault strikes, it is written as an event ``injected``, and as an empty file in a directory
that outlives the process: a fault that kills the run at step 5 would strike at step 5 again after
the restart.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_megatron.services import events_of, services_if_any
from lightning_megatron.topology.coordinates import groups_along
from tests.faults.acts import ACTS, Fault, fill_disk, flip_bit_of_newest, kill_loader_worker

_OF_THE_LOSS = ("nan_loss", "spike")
_POISONS = (*_OF_THE_LOSS, "nan_gradient")
_SETTLED = 5
"""Batches of an attempt before faults with `Fault.after` strike: all that became due between two
attempts would strike together, after each restart."""


class FaultInjector(pl.Callback):
    """Injects faults by rank, step and section.

    Args:
        faults: each strikes once.
        directory: where those that struck are noted; restarts must have the same.
    """

    def __init__(self, faults: list[Fault], directory: str | os.PathLike[str]) -> None:
        self.faults = faults
        self.directory = Path(directory)
        self._full_disk = ExitStack()
        self._room_at = -1
        """Step in which the disk has room again."""
        self._batches = 0
        self._until: dict[int, int] = {}
        """First step without the fault, for faults that last; by position in `faults`."""
        self._injected: dict[int, int] = {}
        """Last step in which each fault struck."""
        self._forward_done: dict[int, int] = {}
        """Last step whose forward is done, for faults of the loss: all microbatches of a batch have
        the fault, but a second run of the batch has not."""
        self._unwrap: Callable[[], None] | None = None

    # Hooks ---------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # No hook runs before a batch is read.
        loop: Any = trainer.fit_loop.epoch_loop
        fetch = loop._on_before_fetch

        def before_fetch() -> None:
            fetch()
            self._inject("data", trainer)

        loop._on_before_fetch = before_fetch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._release()
        if self._due("forward", trainer) or self._due("backward", trainer):
            self._wrap(trainer, pl_module)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        for index, step in self._injected.items():
            if step == trainer.global_step:
                self._forward_done[index] = step

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._inject("backward", trainer)  # if nothing in the step had a gradient to wait for

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._inject("optimizer", trainer)

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

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._full_disk.close()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._inject("checkpoint", trainer)

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

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._release()
        self._full_disk.close()

    # What is due ---------------------------------------------------------------------------------

    def _due(self, section: str, trainer: pl.Trainer) -> list[tuple[int, Fault]]:
        """Faults that may strike now, with their positions in `faults`."""
        if trainer.state.fn != "fit":
            return []
        step, due = trainer.global_step, []
        for index, fault in enumerate(self.faults):
            done = self._forward_done if fault.kind in _OF_THE_LOSS else self._injected
            if section != fault.section or done.get(index) == step:
                continue
            lasting = step < self._until.get(index, -1)
            settled = not fault.after or (self._batches >= _SETTLED and time.time() >= fault.after)
            if lasting or (_strikes_here(fault, trainer) and step >= fault.step and settled):
                due.append((index, fault))
        return due

    def _claim(self, index: int, fault: Fault, trainer: pl.Trainer) -> bool:
        """Note that a fault strikes; False if it has struck before."""
        step = trainer.global_step
        if step >= self._until.get(index, -1):
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                (self.directory / f"{index}-rank{trainer.global_rank}").touch(exist_ok=False)
            except FileExistsError:
                return False
            self._until[index] = step + fault.steps
            _write_event(fault, trainer)
        self._injected[index] = step
        return True

    def _inject(self, section: str, trainer: pl.Trainer) -> None:
        """Run the faults that are due in a section; may not return."""
        if trainer.global_step >= self._room_at:
            self._full_disk.close()
        for index, fault in self._due(section, trainer):
            if fault.kind not in _POISONS and self._claim(index, fault, trainer):
                self._act(index, fault, trainer)

    def _act(self, index: int, fault: Fault, trainer: pl.Trainer) -> None:
        if fault.kind == "worker_kill":
            kill_loader_worker(fault.draw)
        elif fault.kind == "corrupt":
            folders = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
            flip_bit_of_newest(filter(None, folders), fault.draw)
        elif fault.kind == "disk_full":
            self._full_disk.close()
            self._full_disk, self._room_at = fill_disk(), self._until[index]
        else:
            ACTS[fault.kind](fault)

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
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._in_backward, trainer))
                    watching.close()
                    return

        watching.callback(register_module_forward_hook(on_output).remove)

    def _in_backward(self, trainer: pl.Trainer, gradient: Tensor) -> Tensor | None:
        self._inject("backward", trainer)
        for index, fault in self._due("backward", trainer):
            if fault.kind == "nan_gradient" and self._claim(index, fault, trainer):
                return gradient * float("nan")
        return None

    def _poison_loss(self, output: Any, trainer: pl.Trainer) -> Any:
        for index, fault in self._due("forward", trainer):
            if fault.kind in _OF_THE_LOSS and self._claim(index, fault, trainer):
                factor = float("nan") if fault.kind == "nan_loss" else fault.amount
                output = _scaled(output, factor)
        return output


def _strikes_here(fault: Fault, trainer: pl.Trainer) -> bool:
    """Whether a fault is of this rank.

    A loss belongs to all ranks that work on the same samples; the rank that computes it injects.
    """
    services = services_if_any(trainer)
    if fault.kind not in _OF_THE_LOSS or services is None:
        return fault.rank == trainer.global_rank
    groups = groups_along(("pp", "cp", "tp"), services.topology.degrees)
    return any({fault.rank, trainer.global_rank} <= set(group) for group in groups)


def _scaled(output: Any, factor: float) -> Any:
    if isinstance(output, Tensor):
        return output * factor
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"] * factor}
    return output


def _write_event(fault: Fault, trainer: pl.Trainer) -> None:
    services = services_if_any(trainer)
    doing = fault.section if services is None else services.clock.current
    about = {"section": fault.section, "doing": doing, "step": trainer.global_step}
    events_of(trainer).write("injected", what=fault.kind, **about)
