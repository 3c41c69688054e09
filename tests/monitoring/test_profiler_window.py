"""A few steps of chosen ranks leave traces that tools can read."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import ProfilerWindow
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, loader, make_trainer


def traced(directory: str, ranks: Any) -> None:
    window = ProfilerWindow(start=1, steps=2, ranks=ranks, directory=directory)
    make_trainer({"pp": 2}, 2, callbacks=[window]).fit(Small(), loader())


def names(file: Path) -> list[str]:
    with gzip.open(file) as content:
        return [event.get("name", "") for event in json.load(content)["traceEvents"]]


def test_chosen_ranks_trace_chosen_steps(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, traced, str(tmp_path), [1])
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "rank_00001-steps_1-2.json.gz"
    # One update a step.
    assert sum("Optimizer.step#" in name for name in names(file)) == 2


def test_a_failure_inside_the_window_keeps_the_trace(tmp_path: Path) -> None:
    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("bad sample")
            return super().training_step(batch, batch_idx)

    window = ProfilerWindow(start=1, steps=9, ranks=None, directory=str(tmp_path))
    with pytest.raises(ValueError, match="bad sample"):
        make_trainer({}, callbacks=[window]).fit(Failing(), loader())
    assert [f.name for f in (tmp_path / "profile").iterdir()] == ["rank_00000-steps_1-1.json.gz"]


def test_a_trace_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("in the way")
    trainer = make_trainer({}, callbacks=[ProfilerWindow(1, 1, directory=str(tmp_path))])
    trainer.fit(Small(), loader())
    assert trainer.global_step == 4
    assert "rank 0: the trace could not be written to" in caplog.text


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"start=-1[\s\S]*steps=0"):
        ProfilerWindow(start=-1, steps=0)
    with pytest.raises(ConfigError, match=r"ranks=\[4\]: there are 1 processes"):
        make_trainer({}, callbacks=[ProfilerWindow(ranks=[0, 4])]).fit(Small(), loader())
