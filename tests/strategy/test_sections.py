"""The strategy tells its section clock what it is at."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, run


class Recorded(SectionClock):
    """Keeps the sections entered, without repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = ["start"]

    def enter(self, name: str) -> None:
        super().enter(name)
        if self.trace[-1] != name:
            self.trace.append(name)


class WithValidation(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def trace_of(trainer: pl.Trainer) -> Recorded:
    assert isinstance(trainer.strategy, MegatronStrategy)
    trainer.strategy.clock = clock = Recorded()
    return clock


def sections_of_two_steps(layout: Any, devices: int) -> tuple[list[str], int]:
    trainer = make_trainer(layout, devices, max_steps=2)
    clock = trace_of(trainer)
    trainer.fit(Small(), loader(dp=dp_of(devices, layout)))
    return clock.trace, clock.step


STEP = ["forward", "backward", "optimizer", "data"]


def test_a_step_goes_through_its_sections() -> None:
    trace, step = sections_of_two_steps({}, 1)
    assert trace[:9] == ["start", *STEP, *STEP]
    assert "other" in trace[9:]
    assert step == 1


@pytest.mark.parametrize("layout", ["pp=2", "dp=2, 2 microbatches"])
def test_microbatches_go_forward_and_backward_in_turn(pool: WorkerPool, layout: str) -> None:
    for trace, _ in run(pool, layout, sections_of_two_steps):
        middle = trace[1 : trace.index("optimizer")]
        assert middle[:4] == ["forward", "backward"] * 2
        assert set(middle) == {"forward", "backward"}


def test_accumulated_batches_return_to_data() -> None:
    trainer = make_trainer({}, max_steps=1, accumulate_grad_batches=2)
    clock = trace_of(trainer)
    trainer.fit(Small(), loader())
    without = ["forward", "backward", "optimizer", "data"]
    assert clock.trace[:9] == ["start", *without, *STEP]


def test_manual_optimization_has_the_same_sections() -> None:
    trainer = make_trainer({}, max_steps=1)
    clock = trace_of(trainer)
    trainer.fit(Manual(), loader())
    ended = ["forward", "backward", "forward", "optimizer", "forward", "data"]
    assert clock.trace[:7] == ["start", *ended]


def test_validation_and_saving_return_to_where_they_were_called(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        {},
        max_steps=2,
        val_check_interval=1,
        enable_checkpointing=True,
        callbacks=[callback],
    )
    clock = trace_of(trainer)
    trainer.fit(WithValidation(), loader(), loader())
    trace = clock.trace
    assert trace[1:3] == ["validation", "start"]  # the sanity check
    assert trace.count("validation") == 3
    saved = trace[: trace.index("other")]
    assert saved.count("checkpoint") >= 2
    assert all(saved[i + 1] == "data" for i, name in enumerate(saved) if name == "checkpoint")


def test_evaluation_alone_is_validation() -> None:
    trainer = make_trainer({})
    clock = trace_of(trainer)
    trainer.validate(WithValidation(), loader(), verbose=False)
    assert clock.trace[:2] == ["start", "validation"]
    assert torch.is_grad_enabled()
