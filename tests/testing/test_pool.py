"""The worker pool: what it promises to the other tests."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerError, WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A pool whose workers nobody else borrows."""
    with WorkerPool(size=4, timeout=200) as workers:
        yield workers


def all_reduce(scale: float) -> tuple[torch.Tensor, int]:
    dist.init_process_group("gloo")
    value = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return value, os.getpid()


def fail_on(bad_rank: int) -> None:
    dist.init_process_group("gloo")
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == bad_rank:
        raise ConfigError(f"rank {bad_rank} is wrong")
    dist.all_reduce(torch.ones(1))


def reset_signals() -> None:
    """As Lightning's Trainer does at its end."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)


def sleep_on(bad_rank: int) -> None:
    dist.init_process_group("gloo")
    reset_signals()
    if dist.get_rank() == bad_rank:
        time.sleep(300)
    dist.all_reduce(torch.ones(1))


def die_on(bad_rank: int) -> None:
    if int(os.environ["RANK"]) == bad_rank:
        os._exit(7)


def leave_traces() -> tuple[float, float, str | None]:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item(), random.random(), None


def look_for_traces() -> tuple[float, float, str | None]:
    assert torch.get_default_dtype() is torch.float32
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item(), random.random(), os.environ.get("LEFT_BEHIND")


def environment() -> dict[str, str]:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    assert TorchElasticEnvironment.detect()
    return dict(os.environ)


def return_lambda() -> object:
    return lambda: None


def backward() -> float:
    x = torch.ones(64, 64, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    return x.grad.sum().item()


def test_runs_collectives_in_workers_that_stay(pool: WorkerPool) -> None:
    first = pool.run(3, all_reduce, 2.0)
    second = pool.run(3, all_reduce, scale=2.0)
    assert [value.tolist() for value, _ in first] == [[12.0] * 3] * 3
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_looks_like_torchrun(pool: WorkerPool) -> None:
    env = pool.run(2, environment, env={"EXTRA": "yes"})[1]
    assert env["RANK"] == env["LOCAL_RANK"] == "1"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
    assert env["EXTRA"] == "yes"
    assert "EXTRA" not in pool.run(1, environment)[0]


def test_a_failure_names_its_rank_and_the_pool_goes_on(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(3, fail_on, 1)
    assert caught.value.rank == 1
    assert "in fail_on" in str(caught.value)
    assert "hello from 1" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert pool.run(3, all_reduce, 1.0)[0][0].tolist() == [6.0] * 3


def test_a_stuck_rank_is_killed_with_its_stack_and_the_pool_goes_on(pool: WorkerPool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no result after 1 s") as caught:
        pool.run(2, sleep_on, 1, timeout=1)
    assert time.monotonic() - start < 60
    stuck = next(f for f in caught.value.failures if f.rank == 1)
    assert "sleep_on" in stuck.output
    assert pool.run(2, all_reduce, 1.0)[0][0].tolist() == [3.0] * 3


def test_a_dead_rank_is_reported_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="exit code 7") as caught:
        pool.run(2, die_on, 1)
    assert caught.value.rank == 1
    assert pool.run(2, all_reduce, 1.0)[1][0].tolist() == [3.0] * 3


def test_runs_do_not_see_each_other(pool: WorkerPool) -> None:
    left = pool.run(1, leave_traces)[0]
    found = pool.run(1, look_for_traces)[0]
    assert found[1] == left[1]
    assert found[2] is None
    assert pool.run(1, look_for_traces)[0] == found


def _send_to_one_that_returned() -> bool:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        return True
    time.sleep(0.5)
    for _ in range(3):
        dist.isend(torch.ones(1), 0)  # an error where the other has left
        time.sleep(0.1)
    return True


def test_a_rank_that_returns_stays_connected_until_all_have(pool: WorkerPool) -> None:
    assert pool.run(2, _send_to_one_that_returned) == [True, True]


def _fail_to_connect(rank: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("connectFullMesh failed")

    if int(os.environ["RANK"]) == rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", refuse)
            dist.init_process_group("gloo")


def test_a_rank_that_could_not_connect_meets_the_others_the_next_time(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="connectFullMesh failed"):
        pool.run(2, _fail_to_connect, 1)
    assert pool.run(2, _send_to_one_that_returned, timeout=20) == [True, True]


def test_a_result_that_cannot_travel_is_a_failure(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="lambda"):
        pool.run(1, return_lambda)


def test_too_large_a_world_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="world_size=5"):
        pool.run(5, environment)


def test_workers_forked_after_the_parent_computed_still_compute() -> None:
    x = torch.ones(512, 512, requires_grad=True)
    (x @ x).sum().backward()
    with WorkerPool(1) as pool:
        assert pool.run(1, backward) == [64.0 * 64 * 128]


def test_a_closed_pool_leaves_no_process() -> None:
    with WorkerPool(2) as pool:
        pids = [pid for _, pid in pool.run(2, all_reduce, 1.0)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


_kept: list[object] = []


def keep_groups() -> int:
    """As what refers to itself through torch's C++, where nobody finds it."""
    dist.init_process_group("gloo")
    _kept.extend(dist.new_group([0, 1]) for _ in range(4))
    return os.getpid()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system lists no threads")
def test_a_worker_that_keeps_the_threads_of_its_jobs_is_replaced() -> None:
    """Each group has one that wakes a hundred times a second, in every later job."""
    with WorkerPool(2) as pool:
        first = pool.run(2, keep_groups)
        for _ in range(20):  # the pool may ask before the worker has looked
            later = {pid for _, pid in pool.run(2, all_reduce, 1.0)}
            if later.isdisjoint(first):
                break
    assert later.isdisjoint(first)


def reduced() -> list[float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).full_tensor()
    dist.all_reduce(whole, group=dist.new_group([0, 1]))
    return whole.tolist()


def test_workers_forget_the_process_groups_of_the_process_they_come_from(tmp_path: Path) -> None:
    """As a Trainer leaves behind in the process in which it has trained."""
    ours = not dist.is_initialized()
    if ours:
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.new_group([0])
    dist.all_reduce(torch.ones(1))
    with WorkerPool(2) as pool:
        for _ in range(2):
            assert pool.run(2, reduced) == [[2.0, 2.0]] * 2
    dist.all_reduce(torch.ones(1))
    if ours:
        dist.destroy_process_group()
