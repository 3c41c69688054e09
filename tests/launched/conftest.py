"""Runs the jobs that the selected tests look at."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.launched.jobs import JOBS


def job_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("launched")


@pytest.fixture(scope="session")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    wanted = {job_of(item) for item in request.session.items}
    with ThreadPoolExecutor(max_workers=2) as executor:
        yield {
            name: executor.submit(job, tmp_path_factory.mktemp(name))
            for name, job in JOBS.items()
            if name in wanted
        }


@pytest.fixture
def launched(request: pytest.FixtureRequest, jobs: dict[str, Future[Any]]) -> Any:
    """What a job returned; `parametrize("launched", [its name], indirect=True)` chooses it."""
    return jobs[request.param].result()
