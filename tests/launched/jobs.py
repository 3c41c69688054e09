"""Commands as a user starts them, each in fresh interpreters: the longest jobs of the suite.

Most of their time is the import of torch and Lightning in every process. One job therefore serves
several tests.
"""

import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.cli.tiny import TINY

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
"""Of a command, on a machine that has much else to do."""

RUNNING: "set[subprocess.Popen[str]]" = set()
"""Commands in sessions of their own that have not ended."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left behind."""

    code: int
    text: str
    """Standard output and standard error, as they came."""
    overdue: bool
    """Whether a process of it was there at the limit, and was killed."""


def command(arguments: list[str], folder: Path, limit_s: float = LIMIT_S) -> Finished:
    """Run a command to its end, and to that of every process that it started."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    overdue = threading.Event()

    def end() -> None:
        overdue.set()
        os.killpg(process.pid, signal.SIGKILL)

    with subprocess.Popen(
        arguments,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        RUNNING.add(process)
        watchdog = threading.Timer(limit_s, end)
        watchdog.start()
        # The output ends when the last process has closed its end of the pipe.
        text = process.stdout.read()
        code = process.wait()
        watchdog.cancel()
        RUNNING.discard(process)
    return Finished(code=code, text=text, overdue=overdue.is_set())


def succeed(arguments: list[str], folder: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def python(text: str, folder: Path, *launcher: str) -> Finished:
    """Run a Python script."""
    script = folder / "script.py"
    script.write_text(text)
    return command([sys.executable, *launcher, str(script)], folder)


# The README --------------------------------------------------------------------------------------


def readme_example(folder: Path) -> str:
    """The Python example, word for word."""
    [program, _] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "example.py").write_text(program)
    return succeed([sys.executable, "example.py"], folder)


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """What the recipe and its continuation left behind."""

    printed: str
    resumed: str
    """Printed by the continuation."""
    command: list[str]
    """The last line of `printed`."""
    events: int
    """Number of event files for TensorBoard."""


def quickstart(folder: Path) -> Quickstart:
    """The recipe, shortened, and then the last line that it prints.

    Once through the console script, once through `python -m`: both must relaunch themselves.
    """
    script = Path(sys.executable).with_name("lightning-megatron")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    recipe = ["fit", "--config", "recipes/quickstart.yaml", "--data.max_bytes=400000"]
    short = ("max_steps=4", "limit_train_batches=2", "limit_val_batches=1")
    recipe += [f"--trainer.{option}" for option in short]
    printed = succeed([str(script), *recipe], folder)
    log = re.search(r"log +(\S+)", printed)
    assert log is not None, printed
    last = shlex.split(printed.strip().splitlines()[-1])
    return Quickstart(
        printed=printed,
        command=last,
        resumed=succeed([sys.executable, "-m", "lightning_megatron", *last[1:]], folder),
        events=len(list((folder / log[1]).glob("events.out.tfevents*"))),
    )


def missing_checkpoint(folder: Path) -> Finished:
    """A mistake that shows when the processes of the command are connected."""
    options = ["--trainer.devices=2", "--ckpt_path=nowhere.ckpt"]
    return command([sys.executable, "-m", "lightning_megatron", "fit", *TINY, *options], folder)


# The launchers -----------------------------------------------------------------------------------

_FAILURE = """
from tests.strategy.test_errors import explode
explode(%r, 2, "forward", %r, %r)
print("finished")
"""

_TWO_TRAINERS = """
import os, sys, torch
import lightning.pytorch as pl
import lightning_megatron
if "LOCAL_RANK" not in os.environ:
    before = "lightning_megatron.strategy.megatron" in sys.modules
    trainer = pl.Trainer(strategy="megatron", accelerator="cpu", devices=1, logger=False)
    print("by name:", type(trainer.strategy).__name__, before)

from tests.strategy.small import Small, loader, make_trainer, weights
trainer = make_trainer({"pp": 2}, 2)
module = Small()
trainer.fit(module, loader())
own = list(weights(module))
second = Small()  # another Trainer, with another layout, in the same processes
trainer = make_trainer({"zero": 3}, 2)
trainer.fit(second, loader(dp=2))
names = sorted(weights(second))
torch.save((len(own), names), f"done{trainer.global_rank}.pt")
"""


def two_trainers_then_a_failure(folder: Path) -> tuple[Finished, dict[str, Any]]:
    """The output, and what each rank wrote before the failure of the last."""
    done = python(_TWO_TRAINERS + _FAILURE % ({"pp": 2}, 1, False), folder)
    return done, {path.name: torch.load(path) for path in folder.glob("done*.pt")}


def failure_of_the_first_rank(folder: Path) -> Finished:
    """Its peer is busy and does not notice."""
    return python(_FAILURE % ({"zero": 1}, 0, True), folder)


def failure_under_torchrun(folder: Path) -> Finished:
    """The same under another launcher."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    return python(_FAILURE % ({"zero": 1}, 0, True), folder, *torchrun)


def smokes(folder: Path) -> dict[str, Any]:
    """The scenarios of `tests.launched.forked` that the default selection looks at."""
    return forked(folder, "undisturbed", "shrunk", "killed, static", "Lightning, killed first rank")


def scenarios(folder: Path) -> dict[str, Any]:
    """All scenarios of `tests.launched.forked`."""
    return forked(folder)


def forked(folder: Path, *names: str) -> dict[str, Any]:
    """What scenarios return that one process, which imports for all of them, runs."""
    call = [sys.executable, "-m", "tests.launched.forked", str(folder), *names]
    done = command(call, folder, 1500.0)
    assert done.code == 0, done.text[-5000:]
    found: dict[str, Any] = pickle.loads((folder / "scenarios.pickle").read_bytes())
    return found


def notebook(folder: Path) -> Any:
    """Cells in a Jupyter kernel."""
    from tests.launched.notebook import run  # late: the tests of other jobs need no Jupyter

    return run(folder)


JOBS: dict[str, Callable[[Path], Any]] = {
    job.__name__: job
    for job in (
        scenarios,
        smokes,
        quickstart,
        notebook,
        readme_example,
        missing_checkpoint,
        two_trainers_then_a_failure,
        failure_of_the_first_rank,
        failure_under_torchrun,
    )
}
"""By name, the longest first."""
