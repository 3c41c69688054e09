"""Runs jobs beside the tests: ``python -m tests.launched.run FOLDER PARALLEL NAME...``.

A process of its own, because threads of the tests' process would be alive while that forks workers.
It leaves ``NAME.pickle`` in the folder: what the job returned, or the exception that it ended with.
"""

import os
import pickle
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.launched.jobs import JOBS, RUNNING


def run(folder: Path, name: str) -> None:
    own = folder / name
    own.mkdir()
    try:
        result: Any = JOBS[name](own)
    except BaseException as error:
        result = error
    unfinished = folder / f"{name}.tmp"
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(folder / f"{name}.pickle")


def end(*_: Any) -> None:
    """End the commands as well, which are in sessions of their own or in ours."""
    for process in list(RUNNING):
        os.killpg(process.pid, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    folder, parallel, *names = sys.argv[1:]
    try:
        with ThreadPoolExecutor(max_workers=int(parallel)) as executor:
            for name in names:
                executor.submit(run, Path(folder), name)
    finally:
        (Path(folder) / "ended").touch()


if __name__ == "__main__":
    main()
