"""The strategy's hooks keep `SectionClock` up to date: what this rank is doing.

This class stands in front of those that do the work, and each hook of it enters a section around
theirs. Between the hooks the loop belongs to Lightning: from the end of a batch to the start of the
next it runs callbacks and fetches data, all of which counts as ``data``. Where a step runs on
microbatches, the executor switches between forward and backward itself.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.checkpoint.save.saver import Saver
from lightning_megatron.monitoring import sections as names
from lightning_megatron.monitoring.sections import SectionClock


class SectionHooks(ParallelStrategy):
    """Enters a section in every hook; the hooks themselves come after it in the order of bases."""

    _saver: Saver | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = SectionClock()
        self._section_outside = names.OTHER
        """Where an evaluation returns to."""
        self._section_before_save: str | None = None

    @override
    def setup_environment(self) -> None:
        self.clock.enter(names.START)  # once more for each run
        super().setup_environment()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        clock = self.clock
        assert self.lightning_module is not None
        clock.step = self.lightning_module.trainer.global_step
        clock.enter(names.FORWARD)
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if not self._optimizes_automatically():  # then this is the whole batch
            self.clock.enter(names.DATA)
        return output

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.clock.enter(names.BACKWARD)
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        automatic = self._optimizes_automatically()
        self.clock.enter(names.OPTIMIZER if automatic else names.FORWARD)
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        automatic = self._optimizes_automatically()
        if not automatic:
            self.clock.enter(names.OPTIMIZER)  # else its closure runs forward and backward first
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.clock.enter(names.DATA if automatic else names.FORWARD)
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync():
            yield
        self.clock.enter(names.DATA)  # a batch without an optimizer step has ended

    @override
    def on_train_end(self) -> None:
        with self.clock.section(names.CHECKPOINT):  # waits for the last save
            super().on_train_end()
        self.clock.enter(names.OTHER)

    # Evaluation ----------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._enter_evaluation()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self._enter_evaluation()
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self._enter_evaluation()
        super().on_predict_start()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter(names.VALIDATION)  # once more: each batch is progress
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter(names.VALIDATION)
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter(names.VALIDATION)
        return super().predict_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.clock.enter(self._section_outside)

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self.clock.enter(names.OTHER)

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self.clock.enter(names.OTHER)

    def _enter_evaluation(self) -> None:
        self._section_outside = self.clock.current
        self.clock.enter(names.VALIDATION)

    # Checkpoints ---------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # What Lightning collects after it, from callbacks and the module, is part of the save. If
        # none follows, the next batch ends the section.
        if self.clock.current != names.CHECKPOINT:
            self._section_before_save = self.clock.current
        self.clock.enter(names.CHECKPOINT)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        before, self._section_before_save = self._section_before_save, None
        with self.clock.section(names.CHECKPOINT):
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[arg-type]
        if before is not None:
            self.clock.enter(before)

    def save_local(self) -> None:
        """Begin to make a local checkpoint, see `CheckpointHooks`."""
        with self.clock.section(names.CHECKPOINT):
            super().save_local()  # type: ignore[misc]

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        with self.clock.section(names.CHECKPOINT):
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[arg-type]

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        with self.clock.section(names.CHECKPOINT):
            super().remove_checkpoint(filepath)  # type: ignore[arg-type]

    def stop_saver(self, timeout_s: float | None = None) -> None:
        """Wait for what is in flight, see `CheckpointHooks`."""
        if self._saver is None:
            return
        with self.clock.section(names.CHECKPOINT):
            super().stop_saver(timeout_s)  # type: ignore[misc]

    def _optimizes_automatically(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization
