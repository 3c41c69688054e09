"""The way from Lightning to the user's step is short: a traceback of his shows little of ours."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lightning_megatron
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, samples

MOST_FRAMES = 7
PACKAGE = Path(lightning_megatron.__file__).parent


def frames_of_package() -> list[str]:
    """Functions of the package that are being run, the outermost first."""
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None)][::-1]
    package, testing = f"{PACKAGE}/", f"{PACKAGE}/testing/"
    return [
        f"{code.co_filename.removeprefix(package)}:{code.co_name}"
        for code in codes
        if code.co_filename.startswith(package) and not code.co_filename.startswith(testing)
    ]


class Deep(Small):
    """Notes on its way into a step by whom it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.frames.append(frames_of_package())
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.frames.append(frames_of_package())
        self.loss(batch)


def frames_above_steps(layout: Mapping[str, Any], devices: int) -> list[list[str]]:
    module = Deep()
    trainer = make_trainer(
        layout, devices, max_steps=2, accumulate_grad_batches=2, limit_val_batches=1
    )
    data = loader(samples(), dp=dp_of(devices, layout))
    trainer.fit(module, data, data)
    return module.frames


LAYOUTS = {
    "one process, 4 microbatches": (1, {"num_microbatches": 4}),
    "pp=2": (2, {"pp": 2}),
    "dp=2": (2, {"zero": 1}),
    "dp=2, zero=3, 2 microbatches": (2, {"zero": 3, "num_microbatches": 2}),
    "tp=2": (2, {"tp": 2}),
}
"""Processes and options."""


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_few_frames_stand_above_the_step_of_the_user(pool: WorkerPool, layout: str) -> None:
    devices, options = LAYOUTS[layout]
    for frames in pool.run(devices, frames_above_steps, options, devices):
        longest = max(frames, key=len)
        assert 0 < len(longest) <= MOST_FRAMES, longest
