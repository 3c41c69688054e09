"""Fixtures of the whole suite."""

import gc
import os
import resource
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from lightning.fabric.utilities import registry

from lightning_megatron.testing import WorkerPool, WorkerServer

# torch asks for the name of every client of a store, also of this machine's. Where no name server
# answers, or loses one question in fifty, the connection waits for it: five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# A loaded machine is no defect, and the same examples every time make a failure repeatable.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# Every Trainer looks for callbacks in the metadata of all installed packages, which takes 8 ms: a
# third of the shortest runs, of which there are thousands. Nobody installs anything meanwhile.
registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


BEGUN = pytest.StashKey[float]()
POOL = pytest.StashKey[WorkerPool]()
SERVER = pytest.StashKey[WorkerServer]()
WORKERS = 8
IMPORTED = (
    "datasets",
    "lightning_megatron.strategy.megatron",
    "peft",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
)
"""Modules that jobs of many tests use."""


def pytest_configure(config: pytest.Config) -> None:
    """Begin one server of workers for all processes that run tests."""
    distributes = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if distributes and not config.option.collectonly:
        config.stash[SERVER] = WorkerServer(WORKERS, preload=IMPORTED)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process that runs tests where the server is."""
    node.workerinput["worker_server"] = node.config.stash[SERVER].address


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server."""
    if SERVER in config.stash:
        config.stash[SERVER].close()


def pytest_collection_finish() -> None:
    """Leave what was imported out of every search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Eight warm workers; `pool.run(n, fn, *args)` runs a module-level function on `n` ranks."""
    address = getattr(request.config, "workerinput", {}).get("worker_server")
    # The limit is for a machine that does much else.
    with WorkerPool(size=WORKERS, timeout=200, server=address) as workers:
        request.config.stash[POOL] = workers
        yield workers


def processor_seconds(config: pytest.Config) -> float:
    """Processor seconds of this process so far, of its ended children and its pool's jobs."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    jobs = config.stash[POOL].processor_s if POOL in config.stash else 0.0
    return time.process_time() + children.ru_utime + children.ru_stime + jobs


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Begin to count the processor seconds of a case."""
    item.stash[BEGUN] = processor_seconds(item.config)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Record the processor seconds of a case, for `benchmarks.durations`."""
    result = yield
    spent = processor_seconds(item.config) - item.stash[BEGUN]
    item.user_properties.append(("processor_s", round(spent, 3)))
    return result


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo changes of the environment: Lightning keeps its seed there, and workers inherit it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
