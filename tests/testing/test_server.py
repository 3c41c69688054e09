"""One server's workers, lent to several pools."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.testing import WorkerPool, WorkerServer
from lightning_megatron.testing.server import connect


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    server = WorkerServer(size=4, preload=["colorsys"])
    yield server
    server.close()


def pool_of(server: WorkerServer) -> WorkerPool:
    return WorkerPool(size=4, timeout=200, server=server.address)


def summed() -> tuple[float, int]:
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item(), os.getpid()


def wait_for(path: Path) -> int:
    """Say that this rank is there, and wait until the test has seen it."""
    rank = os.environ["RANK"]
    (path / f"there-{rank}").touch()
    while not (path / "go on").exists():
        time.sleep(0.01)
    return os.getpid()


def imported(name: str) -> bool:
    import sys

    return name in sys.modules


def await_files(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def test_pools_share_the_workers(server: WorkerServer) -> None:
    one, other = (pool_of(server).run(2, summed) for _ in range(2))
    assert [value for value, _ in one] == [2.0, 2.0]
    assert one == other


def test_runs_of_two_pools_go_on_side_by_side_on_other_workers(
    server: WorkerServer, tmp_path: Path
) -> None:
    found: dict[str, list[int]] = {}

    def run(name: str) -> None:
        (tmp_path / name).mkdir()
        found[name] = pool_of(server).run(2, wait_for, tmp_path / name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    await_files(*(tmp_path / name / f"there-{rank}" for name in "ab" for rank in range(2)))
    for name in "ab":
        (tmp_path / name / "go on").touch()
    for thread in threads:
        thread.join()
    assert len({*found["a"], *found["b"]}) == 4


def test_a_run_waits_for_workers_that_others_have(server: WorkerServer, tmp_path: Path) -> None:
    found: dict[str, list[object]] = {}

    def run(name: str, size: int, job: object, *args: object) -> None:
        found[name] = pool_of(server).run(size, job, *args)  # type: ignore[arg-type]

    first = threading.Thread(target=run, args=("first", 3, wait_for, tmp_path))
    first.start()
    await_files(*(tmp_path / f"there-{rank}" for rank in range(3)))
    second = threading.Thread(target=run, args=("second", 4, summed))
    second.start()
    (tmp_path / "go on").touch()
    first.join()
    second.join()
    assert [value for value, _ in found["second"]] == [4.0] * 4  # type: ignore[misc]


def test_workers_have_what_the_server_has_imported(server: WorkerServer) -> None:
    assert pool_of(server).run(1, imported, "colorsys") == [True]


def _hang_up(address: str, path: Path) -> None:
    WorkerPool(size=4, timeout=200, server=address).run(2, wait_for, path)


def test_workers_of_a_process_that_is_gone_end(server: WorkerServer, tmp_path: Path) -> None:
    """Nobody knows what they compute."""
    before = {pid for _, pid in pool_of(server).run(4, summed)}
    client = multiprocessing.get_context("fork").Process(
        target=_hang_up, args=(server.address, tmp_path)
    )
    client.start()
    await_files(*(tmp_path / f"there-{rank}" for rank in range(2)))
    client.kill()
    client.join()
    after = pool_of(server).run(4, summed)
    assert [value for value, _ in after] == [4.0] * 4
    assert len(before & {pid for _, pid in after}) == 2


def test_a_pool_does_not_end_a_server_that_is_not_its_own(server: WorkerServer) -> None:
    with pool_of(server) as pool:
        pool.run(1, summed)
    assert pool_of(server).run(1, summed)[0][0] == 1.0


def test_more_workers_than_there_are_is_refused(server: WorkerServer) -> None:
    with pytest.raises(ValueError, match="world_size=5 is more than the server has"):
        WorkerPool(size=8, server=server.address).run(5, summed)


def test_only_this_user_reaches_the_sockets(server: WorkerServer) -> None:
    assert Path(server.address).parent.stat().st_mode & 0o077 == 0
    connect(server.address).close()
