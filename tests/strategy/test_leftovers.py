"""What a Trainer held is gone when it is: its model, its process groups and their threads."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

from lightning_megatron import ShardingConfig
from lightning_megatron._torch import dtensor
from lightning_megatron.fault_tolerance.signals import StopFlag
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 3": (2, {"zero": 3}),
    "hybrid zero 2": (4, {"zero": ShardingConfig(stage=2, dp_replicate=2)}),
    "pipeline": (2, {"pp": 2}),
    "pipeline x tp": (4, {"pp": 2, "tp": 2}),
    "zero 3 x tp": (4, {"zero": 3, "tp": 2}),
}
THOROUGH = {"zero 0", "zero 1", "hybrid zero 2", "pipeline x tp", "zero 3 x tp"}


def fit_job(layout: Mapping[str, Any], devices: int) -> None:
    trainer = make_trainer(layout, devices, max_steps=2)
    trainer.fit(Small(), loader(dp=dp_of(devices, layout)))


def model_job(layout: Mapping[str, Any], devices: int) -> bool:
    module = Small()
    trainer = make_trainer(layout, devices)
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    parameters = [weakref.ref(module), *(weakref.ref(p) for p in module.parameters())]
    del trainer, module
    gc.collect()
    return not any(reference() is not None for reference in parameters)


def gloo_threads() -> list[str]:
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def counts() -> tuple[int, int, int]:
    """Process groups, threads and open files of this process."""
    gc.collect()
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    return groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def fits_job(layout: Mapping[str, Any], devices: int, runs: int) -> list[tuple[int, int, int]]:
    found = []
    for _ in range(runs):
        fit_job(layout, devices)
        found.append(counts())
    return found


@pytest.fixture(scope="module")
def own_pool() -> Iterator[WorkerPool]:
    """Workers in which no other test leaves anything."""
    with WorkerPool(4, timeout=200) as workers:
        yield workers


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in THOROUGH else name
        for name in LAYOUTS
    ],
)
def test_several_runs_leave_no_more_than_one(own_pool: WorkerPool, layout: str) -> None:
    """Each group that stays would keep two threads that wake a hundred times a second."""
    world, options = LAYOUTS[layout]
    own_pool.run(world, fits_job, options, world, 1)
    for found in own_pool.run(world, fits_job, options, world, 4):
        assert len({groups for groups, _, _ in found}) == 1, found
        for place in (1, 2):  # a thread of the last run may be about to end
            counted = [numbers[place] for numbers in found]
            assert max(counted[-2:]) <= max(counted[:2]) + 1, found
    assert own_pool.run(world, gloo_threads) == [[]] * world


def struck_job() -> tuple[int, list[int]]:
    """A run after one that was never torn down; then a signal."""
    stale, seen = StopFlag(), list[int]()
    handlers: Any = [stale, lambda number, frame: seen.append(number)]
    former = signal.signal(signal.SIGTERM, _HandlersCompose([_HandlersCompose(handlers)]))
    try:
        fit_job({}, 1)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    return stale.number, seen


def test_handlers_of_a_run_that_was_never_torn_down_are_dismissed(pool: WorkerPool) -> None:
    """The second signal to reach it would end the process; the user's own handlers stay."""
    assert pool.run(1, struck_job) == [(0, [signal.SIGTERM])]


def test_keys_of_operations_tell_arguments_apart_and_let_go_of_them() -> None:
    """As the keys of torch 2.11 are made, which hold on to arguments by themselves."""
    make = dtensor._with_keywords(OpSchema.__post_init__)

    def schema(value: Any, info: RuntimeSchemaInfo | None = None) -> OpSchema:
        made = OpSchema(torch.ops.aten.detach.default, (value,), {"k": 1}, info)
        make(made)
        assert made.schema_info is info
        return made

    hashed = RuntimeSchemaInfo(static_argnum=0)
    assert schema(1, hashed) == schema(1, hashed) != schema(2, hashed)
    assert hash(schema(1, hashed)) == hash(schema(1, hashed))
    assert schema(1) == schema(2)
    named = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=["k"])
    assert schema(1, named) == schema(1, named) != schema(2, named)
    dtensor.mend_operation_keys()
    assert not dtensor._keys_are_kept()


class Failing(Callback):
    """Fails in a step, and once more when it is told of that, so that nothing is torn down."""

    def on_train_batch_start(self, *args: Any) -> None:
        raise ValueError("first")

    def on_exception(self, *args: Any) -> None:
        raise ValueError("second")


def failing_job() -> str:
    try:
        make_trainer({}, 2, callbacks=[Failing()]).fit(Small(), loader(dp=2))
    except ValueError as error:
        return str(error)
    return ""


def watches(seconds: float) -> list[str]:
    """The threads that wait to end this process, when there was time for them to end themselves."""
    deadline = time.monotonic() + seconds
    while (found := [t.name for t in threading.enumerate() if t.name == "peer-watch"]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return found


def test_nobody_is_watched_for_a_run_that_was_never_torn_down(pool: WorkerPool) -> None:
    """Its peers may end in another run, which the watch of this one would end."""
    assert pool.run(2, failing_job) == ["second", "second"]
    assert pool.run(2, watches, 120.0) == [[], []]


def test_the_model_of_a_trainer_is_freed(pool: WorkerPool) -> None:
    assert all(pool.run(2, model_job, {"zero": 0}, 2))


def test_the_environment_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    trainer = make_trainer({}, max_steps=1)
    trainer.fit(Small(), loader())
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
