"""Fixtures of the whole suite."""

import os
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings
from lightning.fabric.utilities import registry

from lightning_megatron.testing import WorkerPool

# A loaded machine is no defect, and the same examples every time make a failure repeatable.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# Every Trainer looks for callbacks in the metadata of all installed packages, which takes 8 ms: a
# third of the shortest runs, of which there are thousands. Nobody installs anything meanwhile.
registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight warm workers; `pool.run(n, fn, *args)` runs a module-level function on `n` ranks."""
    with WorkerPool(size=8, timeout=200) as workers:  # on a machine that does much else
        yield workers


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo changes of the environment: Lightning keeps its seed there, and workers inherit it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
