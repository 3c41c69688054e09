"""Launches of `tests.launched.training` that are forked from a process with all imports done.

``python -m tests.launched.forked FOLDER [NAME...]`` runs `SCENARIOS`, or those that are named after
the folder, and leaves ``scenarios.pickle`` there. The launchers are the real ones: torchrun's
command with ``--start-method fork --run-path``, by which it forks its workers as well, and
Lightning's, whose children are new interpreters whatever one does. So a restart takes the time that
it takes without the imports.

A scenario is a generator that yields the processes whose end it waits for.
"""

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun

from tests.faults.acts import Fault
from tests.launched import training

LIMIT_S = 600.0
PARALLEL = 2
SCRIPT = str(Path(training.__file__))
NOISY = {"layout": {"zero": 1}, "world": 2, "steps": 8, "noisy": True, "preemption": True}


@dataclass(kw_only=True)
class Launch:
    """A launcher, and the processes in its session."""

    pid: int
    folder: Path
    log: Path
    begun: float = field(default_factory=time.monotonic)
    code: int | None = None
    left_over: bool = False
    """Whether a process of the session has outlived the launcher."""

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def poll(self) -> bool:
        """Whether it has ended; it is killed at its limit."""
        if self.code is not None:
            return True
        if time.monotonic() - self.begun > LIMIT_S:
            self.end()
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            self.code = os.waitstatus_to_exitcode(status)
            self.left_over = not self._others_end()
        return bool(ended)

    def _others_end(self) -> bool:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        self.end()
        return False

    def end(self) -> None:
        """The whole session, as when a machine goes down."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


Scenario = Generator[Launch, None, Any]


def start(folder: Path, options: dict[str, Any], *launcher: str) -> Launch:
    """Begin a launch, by torchrun with these arguments, or by Lightning without any."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log{len(list(folder.glob('log*')))}"
    arguments = [SCRIPT, json.dumps(options)]
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _be_launcher(folder, log, arguments, launcher)
    return Launch(pid=pid, folder=folder, log=log)


def _be_launcher(folder: Path, log: Path, arguments: list[str], launcher: tuple[str, ...]) -> None:
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not without the test
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(folder)
        torch.set_num_threads(1)
        sys.argv, sys.modules["__main__"] = arguments, training  # what Lightning starts again
        if launcher:
            torchrun.main([*launcher, "--start-method=fork", "--run-path", *arguments])
        else:
            training.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# What is left behind -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Left:
    """What a training left behind."""

    launches: list[Launch]
    texts: list[str]
    """Output, by launch."""
    curves: list[list[Any]]
    """By rank: attempt, step, loss, samples."""
    codes: list[list[int]]
    """By rank: how its processes left, of those that left by themselves and not at the end."""
    kills: list[Any]
    runs: list[str]
    """Ids of the run, as rank 0 and its events have them, of all attempts."""
    saved: list[str]
    """Names of the checkpoints that a signal brought about."""
    losses: list[Any]
    """Attempt, step and loss, as rank 0 has them."""
    listening: list[str]
    """Addresses at which the ranks listened; of all ranks that came to a step."""


def look(folder: Path, *launches: Launch) -> Left:
    def lines(name: str) -> list[Any]:
        path = folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return Left(
        launches=list(launches),
        texts=[launch.text for launch in launches],
        curves=[lines(f"curve{rank}.jsonl") for rank in range(2)],
        codes=[[code for [code] in lines(f"codes{rank}.jsonl")] for rank in range(2)],
        kills=lines("kills.jsonl"),
        runs=[name for names in lines("runs.jsonl") for name in names],
        saved=sorted(path.name for path in folder.rglob("preempted-*")),
        losses=[line[:3] for line in lines("losses.jsonl")],
        listening=[
            address
            for path in folder.glob("listening*.json")
            for address, _ in json.loads(path.read_text())
        ],
    )


# The scenarios -----------------------------------------------------------------------------------

TORCHRUN = ("--nproc-per-node=2",)
STANDALONE = (*TORCHRUN, "--standalone")


def undisturbed(folder: Path) -> Scenario:
    """What the others are held against."""
    launch = start(folder, NOISY, *STANDALONE)
    yield launch
    return look(folder, launch)


def struck(strike: list[Any], workers: int, *launcher: str) -> Callable[[Path], Scenario]:
    """A signal, and the run that goes on from what it left."""

    def scenario(folder: Path) -> Scenario:
        options = {**NOISY, "workers": workers}
        first = start(folder, {**options, "strike": strike}, *launcher)
        yield first
        rest = start(folder, {**options, "seed": 8}, *STANDALONE)
        yield rest
        return look(folder, first, rest)

    return scenario


def killed(rendezvous: Callable[[], list[str]]) -> Callable[[Path], Scenario]:
    """A rank is killed in the sixth step, and torchrun starts all of them again."""

    def scenario(folder: Path) -> Scenario:
        options = {**NOISY, "kills": [[1, 5]]}
        launch = start(folder, options, *TORCHRUN, "--max-restarts=2", *rendezvous())
        yield launch
        return look(folder, launch)

    return scenario


def static() -> list[str]:
    return ["--nnodes=1", f"--master-port={free_port()}"]


def c10d() -> list[str]:
    return ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]


def killed_in_a_pipeline(folder: Path) -> Scenario:
    """One rank in a step, and one of the next attempt while it loads."""
    options = {"layout": {"pp": 2}, "world": 2, "kills": [[1, 5], [0, -1]]}
    launch = start(folder, options, *STANDALONE, "--max-restarts=3")
    yield launch
    return look(folder, launch)


def killed_first_rank(folder: Path) -> Scenario:
    """The process that the user started, of those that Lightning started."""
    launch = start(folder, {**NOISY, "kills": [[0, 3]]})
    yield launch
    return look(folder, launch)


def killed_without_progress(folder: Path) -> Scenario:
    """In a step, while it loads, before the ranks have met, and in a step that was done before."""
    options = {**NOISY, "kills": [[1, 5], [0, -1], [], [1, 4], [0, -1]], "falls": [2]}
    launch = start(folder, options, *STANDALONE, "--max-restarts=20")
    yield launch
    return look(folder, launch)


def ended(fault: Fault) -> Callable[[Path], Scenario]:
    """A rank ends in a way of its own, and that is all."""

    def scenario(folder: Path) -> Scenario:
        launch = start(folder, {**NOISY, "faults": [asdict(fault)]}, *STANDALONE)
        yield launch
        return look(folder, launch)

    return scenario


ENDS = {
    "exception": (
        Fault(kind="exception", rank=1, step=2, section="backward"),
        "failed with InjectedFaultError: injected in backward",
    ),
    "segfault": (
        Fault(kind="segfault", rank=0, step=2, section="forward"),
        "was killed by SIGSEGV",
    ),
    "abort": (
        Fault(kind="abort", rank=1, step=2, section="optimizer"),
        "was killed by SIGABRT",
    ),
    "exit": (
        Fault(kind="exit", rank=0, step=2, section="data", amount=7),
        "ended with exit code 7",
    ),
}
"""Faults, and what the report says of them."""


def shrunk(folder: Path) -> Scenario:
    """Two nodes, one of which goes down in the sixth step."""
    port = free_port()
    elastic = (
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=elastic",
        "--rdzv-conf=keep_alive_interval=2,last_call_timeout=6",
    )
    options = {**NOISY, "world": 1}
    stays = start(folder, options, *elastic)
    while not _listens(port) and not stays.poll():
        time.sleep(0.05)
    goes = start(folder, {**options, "strike": [None, 5, "group", signal.SIGKILL]}, *elastic)
    yield goes
    yield stays
    return look(folder, stays, goes)


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


TERM, USR1, INT = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGINT)
SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "undisturbed": undisturbed,
    "shrunk": shrunk,
    "Lightning, SIGTERM to the main process": struck([0, 3, "self", TERM], 0),
    "Lightning, SIGTERM to a child": struck([1, 3, "self", TERM], 0),
    "Lightning, Ctrl-C": struck([1, 3, "group", INT], 2),
    "torchrun, SIGTERM to the launcher": struck([1, 3, "launcher", TERM], 0, *STANDALONE),
    "torchrun, SIGTERM to the group": struck([0, 3, "group", TERM], 2, *STANDALONE),
    "torchrun, SIGUSR1 to the last rank": struck([1, 3, "self", USR1], 0, *STANDALONE),
    "killed, static": killed(static),
    "killed, c10d": killed(c10d),
    "killed in a pipeline": killed_in_a_pipeline,
    "Lightning, killed first rank": killed_first_rank,
    "killed without progress": killed_without_progress,
    **{name: ended(fault) for name, (fault, _) in ENDS.items()},
}
"""By name, the longest first."""


def run_all(folder: Path, names: list[str]) -> dict[str, Any]:
    """What each scenario returned, or the text of its exception."""
    waiting, running, found = list(names), {}, {}
    try:
        while waiting or running:
            while waiting and len(running) < PARALLEL:
                name = waiting.pop(0)
                steps = SCENARIOS[name](folder / f"{len(waiting)}")
                running[name] = steps, next(steps)
            for name, (steps, launch) in list(running.items()):
                if not launch.poll():
                    continue
                try:
                    running[name] = steps, next(steps)
                except StopIteration as end:
                    found[name] = end.value
                    del running[name]
            time.sleep(0.02)
    finally:
        for _, launch in running.values():
            launch.end()
    return found


def main() -> None:
    folder, *names = sys.argv[1:]
    found = run_all(Path(folder), names or list(SCENARIOS))
    Path(folder, "scenarios.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    from tests.launched import forked  # whose classes can be unpickled elsewhere

    forked.main()
