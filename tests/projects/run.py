"""Run one project's quick start under several strategies: the program for the project's own venv.

``python -m tests.projects.run NAME STRATEGY...`` leaves ``STRATEGY.pt`` in the working folder: what
each rank found, or in its place the text of an error that no rank caught. The project is imported
once; the ranks are forked from there, and find each other as those of torchrun do.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.testing import WorkerError, WorkerPool
from tests.projects.quickstarts.quickstart import PLAIN, Quickstart

LIMIT_S = 300.0
"""Of one strategy, on a machine that has much else to do."""


def ranks_job(module: str, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The quick start on this rank: its numbers and errors by part."""
    run = Quickstart(name, folder)
    importlib.import_module(module).main(run)
    return run.numbers, run.errors


def main(project: str, *strategies: str) -> None:
    module = f"tests.projects.quickstarts.{project}"
    importlib.import_module(module)
    with WorkerPool(size=2, timeout=LIMIT_S) as pool:
        for name in strategies:
            folder = Path.cwd() / name
            folder.mkdir()
            found: Any
            try:
                found = pool.run(1 if name == PLAIN else 2, ranks_job, module, name, folder)
            except WorkerError as error:
                found = str(error)
            torch.save(found, f"{name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
