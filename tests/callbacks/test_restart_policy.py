"""A run that fails again and again ends for good; attempts are Trainers of one process here.

Killed processes under torchrun are in `tests/launched`.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron import ConfigError, RestartPolicy
from lightning_megatron.errors import RestartLimitError
from lightning_megatron.fault_tolerance.attempt_log import (
    AttemptLog,
    AttemptRecord,
    cycles_without_progress,
    read_attempts,
)
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, loader, make_trainer


class Boom(Exception):
    pass


class Fails(pl.Callback):
    """In the batch that begins after so many steps."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            raise Boom(f"at {self.at}")


def attempts(layout: Any, devices: int, folder: str, at: list[int | None], **policy: Any) -> Any:
    """How each attempt ended; all of them resume from the newest checkpoint."""
    ends = []
    for place in at:
        saver = pl.callbacks.ModelCheckpoint(
            dirpath=f"{folder}/ck", every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )
        trainer = make_trainer(
            layout,
            devices,
            max_epochs=-1,
            max_steps=6,
            enable_checkpointing=True,
            default_root_dir=folder,
            callbacks=[RestartPolicy(**policy), saver, Fails(place)],
        )
        try:
            trainer.fit(Small(), loader(dp=devices), ckpt_path="auto")
            ends.append(f"finished {trainer.global_step}")
        except (Boom, RestartLimitError) as error:
            ends.append(f"{type(error).__name__} {error}".strip())
    return ends


def test_three_attempts_without_a_new_step_end_the_run(pool: WorkerPool, tmp_path: Path) -> None:
    """On all ranks, with the reason; an attempt that came further begins a new count."""
    places = [2, 2, 2, 3, 3, 3, 3, None]
    for ends in pool.run(2, attempts, {}, 2, str(tmp_path), places):
        assert ends[:7] == [f"Boom at {place}" for place in places[:7]]
        assert ends[7].startswith("RestartLimitError 3 attempts in a row ended without a step")
        assert "beyond step 3" in ends[7]
    assert [a.step for a in read_attempts(tmp_path)] == [2, -1, -1, 3, -1, -1, -1, -1]
    assert [a.why for a in read_attempts(tmp_path)][2:4] == ["Boom: at 2", "Boom: at 3"]


def test_the_budget_of_restarts(pool: WorkerPool, tmp_path: Path) -> None:
    places = [1, 2, 3, None]
    [ends] = pool.run(1, attempts, {}, 1, str(tmp_path), places, max_restarts=2)
    assert ends[:3] == ["Boom at 1", "Boom at 2", "Boom at 3"]
    assert "failed 3 times, and RestartPolicy(max_restarts=2)" in ends[3]


def test_the_last_attempt_tells_what_the_others_died_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also what was found out after the callbacks had heard of the exception."""

    class Finds(Fails):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            events: Any = trainer.strategy.events  # type: ignore[attr-defined]
            events.write("hang", rank_of_fault=3, section="data", detail="")

    for found in ({"what": "peer lost", "detail": "rank 1 was killed"}, None):
        policy, ends = RestartPolicy(cycles=0, run_dir=tmp_path), Fails(1) if found else Finds(1)
        trainer = make_trainer({}, callbacks=[policy, ends])
        with contextlib.suppress(Boom):
            trainer.fit(Small(), loader())
        if found is not None:
            trainer.strategy.events.write("fault", **found)
    reasons = [a.why for a in read_attempts(tmp_path)]
    assert reasons == ["rank 1 was killed", "rank 3 hung in data"]
    trainer = make_trainer({}, callbacks=[RestartPolicy(0, run_dir=tmp_path)])
    with pytest.raises(RestartLimitError):
        trainer.fit(Small(), loader())
    assert "came to step 1, failed: rank 1 was killed" in capfd.readouterr().err


def test_without_limits_a_run_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    places = [1, 1, 1, 1, 1, None]
    [ends] = pool.run(1, attempts, {}, 1, str(tmp_path), places, cycles=0)
    assert ends[-1] == "finished 6"


def test_a_launch_that_resumes_continues_the_count(tmp_path: Path) -> None:
    """A scheduler that starts the command again gives the run another id."""
    for number in range(3):
        log = AttemptLog(tmp_path, "first", number)
        log.reached(5)
        log.close()
    other = AttemptLog(tmp_path, "experiment of another day", 0)
    assert other.chain() == []
    later = AttemptLog(tmp_path, "second", 0)
    later.update(continues="first")
    assert [a.run for a in later.chain()] == ["first"] * 3
    assert cycles_without_progress(later.chain()) == 2
    again = AttemptLog(tmp_path, "second", 1)
    assert [a.run for a in again.chain()] == ["first"] * 3 + ["second"]


def test_attempts_that_were_stopped_in_order_do_not_count() -> None:
    def record(step: int, end: str) -> AttemptRecord:
        return AttemptRecord(run="r", number=0, step=step, end=end)

    assert cycles_without_progress([record(3, ""), record(-1, ""), record(2, "")]) == 2
    assert cycles_without_progress([record(-1, ""), record(-1, "stopped"), record(-1, "")]) == 1
    assert cycles_without_progress([record(-1, "")] * 3) == 3


def test_a_record_survives_a_kill_and_rubbish_beside_it(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, "r", 0)
    log.reached(123456)
    log.reached(7)  # resumed from further back
    os.close(log._file)  # what a kill does
    (tmp_path / "attempts" / "00001_x.json").write_text("{")
    assert [a.step for a in read_attempts(tmp_path)] == [123456]


@pytest.mark.parametrize("options", [{"max_restarts": -1}, {"cycles": -2}])
def test_bad_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="nearest valid"):
        RestartPolicy(**options)  # type: ignore[arg-type]
