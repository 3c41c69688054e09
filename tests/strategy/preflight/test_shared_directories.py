"""Directories that the ranks do not see alike; here each rank is given another."""

import os
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import ConfigError, EventLogWriter, FaultTolerance, Preemption
from lightning_megatron.comm.peers import Peers
from lightning_megatron.strategy.preflight import shared_directories as shared_places
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import make_trainer


def look(directories: list[str], kind: str) -> tuple[str, str, list[str]]:
    """The error, and the warning, and what is left in this rank's directory."""
    own = directories[int(os.environ["RANK"])]
    callback: Any = {
        "ModelCheckpoint": lambda: ModelCheckpoint(dirpath=own),
        "Preemption": lambda: FaultTolerance(own, preemption=Preemption(dirpath=own)),
        "EventLogWriter": lambda: EventLogWriter(own),
    }[kind]()
    trainer = make_trainer({}, 2, callbacks=[callback], enable_checkpointing=kind[0] == "M")
    said: list[str] = []
    error = ""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_places, "_PATIENCE_S", 0.5)
        patch.setattr(shared_places, "rank_zero_warn", said.append)
        try:
            shared_places.check_shared(trainer, Peers())
        except ConfigError as caught:
            error = str(caught)
    return error, "".join(said), os.listdir(own) if Path(own).is_dir() else []


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "Preemption"])
def test_a_directory_for_checkpoints_has_to_be_shared(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    directories = [str(tmp_path / name) for name in "ab"]
    found = pool.run(2, look, directories, kind)
    for error, _, left in found:
        assert f"{kind} saves to {tmp_path / 'a'}: rank 1 (" in error
        assert ") do not see there what rank 0" in error
        assert left == []


def test_files_of_each_rank_need_no_sharing(pool: WorkerPool, tmp_path: Path) -> None:
    directories = [str(tmp_path / name) for name in "ab"]
    for error, said, _ in pool.run(2, look, directories, "EventLogWriter"):
        assert error == ""
        assert f"EventLogWriter writes to {tmp_path / 'a'}, which rank 1" in said


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "Preemption", "EventLogWriter"])
def test_a_shared_directory(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(2, look, [str(tmp_path / "a")] * 2, kind) == [("", "", [])] * 2


def test_a_store_is_not_looked_at(pool: WorkerPool, tmp_path: Path) -> None:
    urls = ["memory://a", "memory://b"]
    assert pool.run(2, look, urls, "ModelCheckpoint") == [("", "", [])] * 2


def test_rank_0_cannot_write(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for error, _, _ in pool.run(2, look, [str(tmp_path / "file" / "a")] * 2, "ModelCheckpoint"):
        assert "rank 0 (" in error
        assert "cannot write there (Not a directory)" in error


def test_who_saves_is_asked() -> None:
    """A callback of any name."""
    saves: Any = types.SimpleNamespace(directory_of_checkpoints=lambda trainer: Path("/a"))
    trainer: Any = types.SimpleNamespace(callbacks=[saves, pl.Callback()], checkpoint_callbacks=[])
    [place] = shared_places._places(trainer)
    assert (place.path, place.is_required) == (Path("/a"), True)
