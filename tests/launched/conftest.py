"""Runs the jobs that the selected tests look at, from the start of the session on.

They are commands that mostly import torch in one process after the other, while most tests need one
core; beside each other the two take little longer than one of them.
"""

import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launched.jobs import JOBS, ROOT

RUNNER: pytest.StashKey[tuple["subprocess.Popen[bytes]", Path]] = pytest.StashKey()


def job_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("launched")


def pytest_collection_finish(session: pytest.Session) -> None:
    needed = [job_of(item) for item in session.items]
    wanted = [name for name in JOBS if name in needed]
    if not wanted or session.config.option.collectonly:
        return
    folder = session.config._tmp_path_factory.mktemp("launched")  # type: ignore[attr-defined]
    parallel = 1 if None in needed else 2
    command = [sys.executable, "-m", "tests.launched.run", str(folder), str(parallel), *wanted]
    with (folder / "output").open("wb") as output:
        runner = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    session.config.stash[RUNNER] = runner, folder


def pytest_sessionfinish(session: pytest.Session) -> None:
    runner, _ = session.config.stash.get(RUNNER, (None, None))
    if runner is not None:
        runner.terminate()
        runner.wait()


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Any:
    """What a job returned; `parametrize("launched", [its name], indirect=True)` chooses it."""
    runner, folder = request.config.stash[RUNNER]
    result = folder / f"{request.param}.pickle"
    while not result.exists():
        if runner.poll() is not None and not result.exists():
            pytest.fail((folder / "output").read_text()[-5000:])
        time.sleep(0.1)
    value = pickle.loads(result.read_bytes())
    if isinstance(value, BaseException):
        raise value
    return value
