"""What local checkpoints are made of."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_megatron import CheckpointConfig, LocalCheckpointConfig
from lightning_megatron.checkpoint.directory.hashed_files import entry_of
from lightning_megatron.checkpoint.local import directory as local_directory
from lightning_megatron.checkpoint.local.directory import (
    RunLock,
    bases,
    check_room,
    remove_abandoned,
    roomiest,
)
from lightning_megatron.checkpoint.local.nodes import Nodes
from lightning_megatron.checkpoint.local.transfer import BLOCK_BYTES, Transfer, exchange
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError
from lightning_megatron.testing import WorkerPool


def test_options() -> None:
    assert CheckpointConfig(local=True).problems() == []
    assert CheckpointConfig(local=True).local_options == LocalCheckpointConfig()
    assert CheckpointConfig().local_options is None
    wrong = LocalCheckpointConfig(
        every_n_steps=0, replicas=-1, keep=0, directory="s3://bucket/checkpoints"
    )
    problems = CheckpointConfig(local=wrong).problems()
    assert [problem.partition("=")[0] for problem in problems] == [
        f"checkpoint.local.{name}" for name in ("replicas", "keep", "every_n_steps", "directory")
    ]
    [problem] = CheckpointConfig(local="yes").problems()  # type: ignore[arg-type]
    assert problem.endswith("nearest valid: local=True")


@pytest.mark.parametrize(
    ("of_rank", "replicas", "keepers"),
    [
        ((0, 0, 1, 1), 1, [[2], [3], [0], [1]]),
        ((0, 1, 0, 1), 1, [[1], [0], [3], [2]]),
        ((0, 1, 2), 2, [[1, 2], [2, 0], [0, 1]]),
        ((0, 0, 0, 1), 1, [[3], [3], [3], [0]]),
        ((0, 0), 1, [[], []]),
        ((0, 1), 0, [[], []]),
        ((0, 1), 5, [[1], [0]]),
    ],
)
def test_who_keeps_whose(of_rank: tuple[int, ...], replicas: int, keepers: list[list[int]]) -> None:
    nodes = Nodes(of_rank)
    assert [nodes.keepers(rank, replicas) for rank in range(len(of_rank))] == keepers


def send_around(root: Path) -> tuple[list[str], list[str]]:
    """Rank r sends three files to the next one; those of rank 1 are not what they were."""
    dist.init_process_group("gloo")
    peers = Peers()
    directory = root / str(peers.rank)
    directory.mkdir()
    sizes = {"empty": 0, "short": 1000, "long": 2 * BLOCK_BYTES + 7}
    contents = {
        f"{rank}-{n}": bytes([rank]) * size for rank in range(3) for n, size in sizes.items()
    }
    for name, content in contents.items():
        if name.startswith(str(peers.rank)):
            (directory / name).write_bytes(content)
    if peers.rank == 1:
        (directory / "1-short").unlink()
        with (directory / "1-long").open("r+b") as file:
            file.truncate(BLOCK_BYTES + 1)
    dist.barrier()
    transfers = [
        Transfer(name=name, source=int(name[0]), target=(int(name[0]) + 1) % 3) for name in contents
    ]
    entries = {name: entry_of(content) for name, content in contents.items()}
    faults = exchange(transfers, entries, directory, peers)
    arrived = [
        path.name
        for path in sorted(directory.iterdir())
        if not path.name.startswith(str(peers.rank)) and path.read_bytes() == contents[path.name]
    ]
    return arrived, [fault.partition(":")[0] for fault in faults]


def test_files_travel_and_what_is_spoiled_is_not_there(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(3, send_around, tmp_path) == [
        (["2-empty", "2-long", "2-short"], []),
        (["0-empty", "0-long", "0-short"], ["1-short", "1-long"]),
        (["1-empty"], ["1-short", "1-long"]),
    ]


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    [base] = bases("$SCRATCH/here")
    assert base == tmp_path / "scratch" / "here"
    assert base.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"nearest valid: LocalCheckpointConfig\(directory="):
        bases(str(tmp_path / "file"))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="is not a directory of this user"):
        bases(str(base))


def test_room(tmp_path: Path) -> None:
    check_room(tmp_path, 1000)
    with pytest.raises(
        CheckpointError, match=r"no room for a local checkpoint: 1,152,921,504,606,846,976 bytes"
    ):
        check_room(tmp_path, 1 << 60)
    full, empty = tmp_path / "full", tmp_path / "empty"
    (full / "0-1").mkdir(parents=True)
    empty.mkdir()
    with (full / "0-1" / "old").open("wb") as file:
        file.truncate(1 << 42)
    free = local_directory.free_bytes(full)
    assert roomiest([empty, full], free // 2, "0") == empty
    assert roomiest([empty, full], 2 * free, "0") == full  # what gives way counts as room
    assert roomiest([empty, full], 2 * free, "1") in (empty, full)
    shm = Path("/dev/shm")
    if local_directory._is_in_memory(shm):
        assert min(local_directory.memory_left()) >= local_directory.free_bytes(shm) > 0


def test_what_the_dead_have_left_is_deleted_after_a_day(tmp_path: Path) -> None:
    key, other = "0" * 16, "1" * 16
    names = [f"{key}-{'a' * 12}", f"{other}-{'b' * 12}", f"{other}-{'c' * 12}", "somebody's"]
    for name in names:
        (tmp_path / name / "step=00000001.ckpt").mkdir(parents=True)
        (tmp_path / name / "lock").touch()
    day = time.time() - 25 * 3600
    for name in names[:2] + names[3:]:
        for path in (*(tmp_path / name).iterdir(), tmp_path / name):
            os.utime(path, (day, day))
    remove_abandoned([tmp_path], key)
    assert sorted(os.listdir(tmp_path)) == sorted([names[0], names[2], names[3]])


def hold(run: Path, held: Path, enough: Path) -> bool:
    lock = RunLock(run)
    if os.environ["RANK"] == "0":
        taken = lock.take()
        held.touch()
        while not enough.exists():
            time.sleep(0.01)
        lock.release()
        return taken
    while not held.exists():
        time.sleep(0.01)
    taken = lock.take()
    enough.touch()
    return taken


def test_a_lock_is_one_process_s(pool: WorkerPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert pool.run(2, hold, run, tmp_path / "held", tmp_path / "enough") == [True, False]
    assert RunLock(run).take()
