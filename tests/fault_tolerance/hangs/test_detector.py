"""Who hangs, where, and no alarm when nobody does."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest

from lightning_megatron import ConfigError, HangDetector
from lightning_megatron.callbacks import hang_detector as hang_detector
from lightning_megatron.fault_tolerance.hangs.watchdog import EXIT_CODE
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.fault_tolerance.hangs.device_recorder import HangingOnDevice, nccls
from tests.fault_tolerance.hangs.hanging import (
    LONGEST_S,
    Counted,
    Fault,
    Hanging,
    SaveAt,
    Skipping,
    Slow,
    wait_for_report,
)
from tests.strategy.small import Small, loader, make_trainer, samples

LIMIT = 1.5
# At each batch another way to hang; the first three are not counted.
FAULTS: dict[int, Fault] = {
    3: ("data", "sleep"),
    4: ("forward", "sleep"),
    5: ("backward", "sleep"),
    6: ("optimizer", "sleep"),
    7: ("checkpoint", "sleep"),
    8: ("backward", "lock"),
    9: ("forward", "stop"),
}


def trainer_with(
    run_dir: str, devices: int, *more: pl.Callback, limit: Any = LIMIT, action: Any = "report"
) -> pl.Trainer:
    detector = HangDetector(limit=limit, action=action, check_s=0.1, run_dir=run_dir)
    return make_trainer({}, devices, callbacks=[detector, *more])


def train_with_faults(faults: Mapping[int, Fault], run_dir: str, batches: int) -> int:
    trainer = trainer_with(run_dir, 2, SaveAt(f"{run_dir}/at.ckpt", 7))
    trainer.fit(Hanging(faults, run_dir), loader(samples(8 * batches), dp=2))
    return int(trainer.global_step)


def train_skipping(run_dir: str) -> int:
    trainer = trainer_with(run_dir, 2)
    trainer.fit(Skipping(4, run_dir), loader(samples(8 * 6), dp=2))
    return int(trainer.global_step)


def train_unevenly(run_dir: str) -> str:
    trainer = trainer_with(run_dir, 2)
    count = 8 * (4 if trainer.global_rank == 1 else 6)
    try:
        trainer.fit(Small(), loader(Counted(count), dp=2))
    except RuntimeError as error:
        return str(error)
    wait_for_report(run_dir, "*")  # or rank 0 would see at once that its peer is gone
    return ""


def train_slowly(run_dir: str) -> int:
    step = dict.fromkeys(("data", "forward", "backward", "optimizer"), LIMIT)
    trainer = trainer_with(run_dir, 2, SaveAt(f"{run_dir}/at.ckpt", 4), limit=step)
    trainer.limit_val_batches = 2
    module = Slow(1.25 * LIMIT)
    trainer.fit(module, loader(samples(8 * 6), dp=2), loader(dp=2))
    return int(trainer.global_step)


def train_alone(run_dir: str) -> int:
    trainer = trainer_with(run_dir, 1)
    trainer.fit(Hanging({4: ("backward", "lock")}, run_dir, rank=0), loader(samples(8 * 6)))
    return int(trainer.global_step)


def train_until_raised(run_dir: str) -> int:
    trainer = trainer_with(run_dir, 2, action="raise")
    trainer.fit(Hanging({4: ("forward", "loop")}, run_dir), loader(samples(8 * 6), dp=2))
    return int(trainer.global_step)


def train_until_aborted(run_dir: str) -> None:
    trainer = trainer_with(run_dir, 2, action="abort")
    trainer.fit(Hanging({4: ("forward", "for ever")}, run_dir), loader(samples(8 * 6), dp=2))


def train_on_two_nodes(run_dir: str, rank: int) -> int:
    trainer = trainer_with(run_dir, 3)
    node = str(min(trainer.global_rank, 1))
    with mock.patch.object(hang_detector, "_node_key", return_value=(node,)):
        trainer.fit(Hanging({4: ("forward", "sleep")}, run_dir, rank), loader(samples(36), dp=3))
    return int(trainer.global_step)


def train_on_devices(run_dir: str, p2p: bool) -> int:
    with nccls(p2p=p2p):
        trainer = trainer_with(run_dir, 2)
        trainer.fit(
            HangingOnDevice({4: ("forward", "sleep")}, run_dir), loader(samples(8 * 6), dp=2)
        )
    return int(trainer.global_step)


def reports(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (run_dir / "hangs").glob("*.json")]


def test_every_hang_names_rank_section_and_stacks(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, train_with_faults, FAULTS, str(tmp_path), 11) == [11, 11]
    found = reports(tmp_path)
    seen = {r["culprits"][0]["step"]: r["culprits"][0]["section"] for r in found}
    assert seen == {step: section for step, (section, _) in FAULTS.items()}
    assert len(found) == len(FAULTS)
    for report in found:
        (culprit,) = report["culprits"]
        _, kind = FAULTS[culprit["step"]]
        assert culprit["rank"] == 1, report
        assert culprit["seconds"] > LIMIT
        assert report["waiting"] in ([0], [])
        if kind == "stop":
            assert "stopped" in report["reason"]
            assert culprit["stack"] == []
        else:
            assert ("holds the GIL" in report["reason"]) == (kind == "lock")
            assert any("hanging.py" in frame for frame in culprit["stack"])
        assert culprit["collectives"]
    assert any("number" in (report["waiting_in"] or "") for report in found)
    texts = [path.read_text() for path in (tmp_path / "hangs").glob("*.txt")]
    assert all("--- rank 0" in text and "--- rank 1" in text for text in texts)
    assert all("all_" in text for text in texts)


def test_a_skipped_collective_is_laid_to_the_rank_that_skipped_it(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(2, train_skipping, str(tmp_path)) == [6, 6]
    (report,) = reports(tmp_path)
    assert [c["rank"] for c in report["culprits"]] == [1]
    assert report["waiting_in"].startswith("all_reduce 5x3, number 5 of group")


@pytest.mark.parametrize("p2p", [False, True])
def test_a_rank_that_waits_on_its_device_is_not_blamed(
    pool: WorkerPool, tmp_path: Path, p2p: bool
) -> None:
    """Nothing but NCCL's recorder tells that rank 0 waits, and in messages not for whom."""
    assert pool.run(2, train_on_devices, str(tmp_path), p2p) == [6, 6]
    (report,) = reports(tmp_path)
    assert [c["rank"] for c in report["culprits"]] == [1]
    assert report["waiting"] == [0]
    assert ("number" in (report["waiting_in"] or "")) != p2p


def test_a_rank_with_fewer_batches_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    errors = pool.run(2, train_unevenly, str(tmp_path))
    assert errors[0]
    report = reports(tmp_path)[0]
    assert [c["rank"] for c in report["culprits"]] == [1]
    assert report["waiting"] == [0]


def test_slow_starts_saves_and_validations_raise_no_alarm(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, train_slowly, str(tmp_path)) == [6, 6]
    assert reports(tmp_path) == []


def test_a_single_rank_that_locks_python_is_seen(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(1, train_alone, str(tmp_path)) == [6]
    (report,) = reports(tmp_path)
    assert (report["culprits"][0]["rank"], report["culprits"][0]["section"]) == (0, "backward")


def test_the_error_is_raised_in_the_rank_that_hangs(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="HangError.*rank 1 hangs in forward at step 4"):
        pool.run(2, train_until_raised, str(tmp_path))


def test_all_ranks_end_with_a_code_of_their_own(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=str(EXIT_CODE)):
        pool.run(2, train_until_aborted, str(tmp_path))
    (report,) = reports(tmp_path)
    assert report["culprits"][0]["rank"] == 1


def test_all_nodes_report_what_one_has_found(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(3, train_on_two_nodes, str(tmp_path), 2) == [6] * 3
    paths = [tmp_path / "hangs" / f"attempt_0-node_of_rank_{r}-step_4.json" for r in (0, 1)]
    until = time.monotonic() + LONGEST_S
    while not all(path.exists() for path in paths) and time.monotonic() < until:
        time.sleep(0.05)  # the run went on with the first of them
    assert sorted((tmp_path / "hangs").glob("*.json")) == paths
    for path, ranks in zip(paths, ([0, 2], [1, 2]), strict=True):
        report = json.loads(path.read_text())
        assert [c["rank"] for c in report["culprits"]] == [2]
        assert sorted(r["rank"] for r in report["ranks"]) == ranks
        assert "hanging.py" in path.with_suffix(".txt").read_text() or ranks[0] == 0


@pytest.mark.parametrize(
    ("limit", "node_limit", "seconds"),
    [
        ("auto", "auto", 120),
        ({"data": 3}, "auto", 120),
        (15, "auto", 15),
        (1.5, "auto", 10),
        (900, "auto", 120),
        (15, 60, 60),
    ],
)
def test_how_long_a_node_may_be_silent(limit: Any, node_limit: Any, seconds: float) -> None:
    assert HangDetector(limit=limit, node_limit=node_limit)._node_limit == seconds


def test_pages_go_elsewhere_when_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into a page that has no memory behind it would end the process."""
    full = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert hang_detector._in_memory() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": "automatic"}, "nearest valid: 'auto'"),
        ({"limit": -1.0}, "seconds must be positive"),
        ({"limit": {"foreward": 3.0}}, "there is no section 'foreward'"),
        ({"action": "stop"}, "nearest valid: 'abort'"),
        ({"check_s": 0}, "nearest valid: check_s=0.5"),
        ({"node_limit": "never"}, "nearest valid: node_limit='auto'"),
        ({"node_limit": -3}, "nearest valid: node_limit='auto'"),
        ({"node_limit": 2}, "nearest valid: node_limit=5"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HangDetector(**options)


def test_other_strategies_are_refused() -> None:
    trainer = make_trainer(None, callbacks=[HangDetector()], max_steps=1)
    with pytest.raises(ConfigError, match="HangDetector under SingleDeviceStrategy"):
        trainer.fit(Small(), loader())
