"""Runs the jobs that the selected tests look at, from the start of the session on.

They are commands that mostly import torch in one process after the other, while most tests need one
core; beside each other the two take little longer than one of them.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.launched.jobs import JOBS, ROOT

FOLDER: pytest.StashKey[Path] = pytest.StashKey()


def job_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("launched")


def shared_folder(config: pytest.Config) -> Path:
    """One for all processes of a parallel session."""
    base: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return (base.parent if hasattr(config, "workerinput") else base) / "launched_jobs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Look at what jobs returned at the end, when they are long done."""
    items.sort(key=lambda item: job_of(item) is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    needed = [job_of(item) for item in session.items]
    wanted = [name for name in JOBS if name in needed]
    if not wanted or session.config.option.collectonly:
        return
    folder = session.config.stash[FOLDER] = shared_folder(session.config)
    try:
        folder.mkdir()
    except FileExistsError:
        return  # another process of this session runs them
    command = [sys.executable, "-m", "tests.launched.run", str(folder), "2", *wanted]
    with (folder / "output").open("wb") as output:
        runner = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    (folder / "pid").write_text(str(runner.pid))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that ends last stops what still runs."""
    if hasattr(session.config, "workerinput"):
        return
    file = shared_folder(session.config) / "pid"
    if file.exists():
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGTERM)


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Any:
    """What a job returned; `parametrize("launched", [its name], indirect=True)` chooses it."""
    folder = request.config.stash[FOLDER]
    result = folder / f"{request.param}.pickle"
    while not result.exists():
        if (folder / "ended").exists() and not result.exists():
            pytest.fail((folder / "output").read_text()[-5000:])
        time.sleep(0.1)
    value = pickle.loads(result.read_bytes())
    if isinstance(value, BaseException):
        raise value
    return value
