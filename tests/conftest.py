"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

from lightning_megatron.testing import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight warm workers; `pool.run(n, fn, *args)` runs a module-level function on `n` ranks."""
    with WorkerPool(size=8) as workers:
        yield workers
