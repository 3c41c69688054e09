"""A disk that fails under a training run: one warning, and training goes on as if nothing were."""

import os
import re

import pytest
from torch import nn

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.save.saver import Saver
from lightning_megatron.comm.peers import Peers
from tests.checkpoint.faults import (
    FAILS_AT,
    FAULTS,
    SAVES,
    STEPS,
    can_mount,
    ends_job,
    full_disk_job,
    goes_on_job,
)


@pytest.mark.parametrize("pairs", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", FAULTS)
def test_training_goes_on_with_one_warning_a_failure(pool, tmp_path, kind, pairs):
    if kind == "read-only" and not can_mount():
        pytest.skip("the system does not let us mount")
    secret = "hunter2-xyzzy"
    saves = SAVES
    if pairs:  # every kind meets both modes, and every way is met by a kind
        begin = 2 * [*FAULTS].index(kind)
        saves = [SAVES[begin % 6], SAVES[(begin + 1) % 6]]
    first, second = pool.run(2, goes_on_job, tmp_path, kind, saves, env={"API_TOKEN": secret})
    assert len(first) == len(saves)
    assert not any(second.values())
    gone = range(1, FAILS_AT + 1) if kind == "deleted" else (FAILS_AT,)
    for name, seen in first.items():
        directory = tmp_path / name
        (message,) = seen
        assert f"{directory}/step={FAILS_AT}.ckpt: rank " in message
        room = r"\([\d,]+ bytes needed here, [\d,]+ free\)"
        assert re.search(f"{directory}.*: {re.escape(FAULTS[kind][1])} {room}", message), message
        left = [f"step={n}.ckpt" for n in range(1, STEPS + 1) if n not in gone]
        assert sorted(os.listdir(directory)) == left
        files = [file for file in directory.rglob("*") if file.is_file()]
        assert not any(secret.encode() in file.read_bytes() for file in files)
        assert secret not in message
        assert all(load_full_state_dict(directory / one) for one in left)


@pytest.mark.parametrize(
    "kind", ["too large", pytest.param("forbidden", marks=pytest.mark.thorough)]
)
def test_training_ends_on_all_ranks_with_the_same_error(pool, tmp_path, kind):
    first, second = pool.run(2, ends_job, tmp_path, kind)
    assert first == second
    assert len(first) == 4
    for error in first:
        assert "rank 1: " in error
        assert FAULTS[kind][1] in error


def test_full_disk(pool, tmp_path):
    if not can_mount():
        pytest.skip("the system does not let us mount")
    (errors,) = pool.run(1, full_disk_job, tmp_path)
    assert len(errors) == 8
    for error in errors:
        assert re.search(r"\[Errno 28\] No space left.*\([\d,]+ bytes needed", error), error


def test_old_checkpoint_that_cannot_be_deleted_costs_space_only(tmp_path, monkeypatch, caplog):
    saver = Saver(CheckpointConfig(), Peers(alone=True))
    for step in (1, 2):
        saver.save(tmp_path / f"{step}.ckpt", model_chunks(nn.Linear(1, 1)), {})
    rename = os.rename

    def refuse(source, target):
        if ".old-" in str(target):
            raise OSError(30, "Read-only file system")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    saver.remove(tmp_path / "1.ckpt")
    assert "Read-only file system" in caplog.text
    monkeypatch.undo()
    saver.save(tmp_path / "3.ckpt", model_chunks(nn.Linear(1, 1)), {})
    assert sorted(os.listdir(tmp_path)) == ["2.ckpt", "3.ckpt"]
