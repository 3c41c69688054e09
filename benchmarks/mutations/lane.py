"""Tests of a copy of a checkout, run by pytest in a forked child until one fails."""

import ast
import collections
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from benchmarks.mutations.choice import CORE, Step, path_of
from benchmarks.mutations.draw import PACKAGE

_TREE = {".git", ".venv", ".whl", "build", "dist", "runs", "shared", "__pycache__"}
_START = 5
"""Imports and the collection of several files may take that many times as long as one test."""
_MEMORY = 8 * 2**30
"""Bytes of data that one process may have, lest a loop without an end takes the machine's."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""``PR_SET_PDEATHSIG`` and ``PR_SET_CHILD_SUBREAPER`` of ``prctl``."""


class _Recorder:
    """A plugin of pytest: chooses, orders and limits cases, and writes down what happens.

    Args:
        step: what to run.
        skip: ids of cases that have run.
        budget: processor seconds of this process and those below it.
        events: file for lines of JSON.
    """

    def __init__(self, step: Step, skip: Set[str], budget: float, events: Path) -> None:
        self._step, self._skip, self._budget = step, skip, budget
        self._events = events.open("a", buffering=1)
        self._left: list[str] = []
        self._end: dict[str, float] = {}

    def write(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(event="fail", test=report.nodeid, how=_short(report), when="collect")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        order = {path: index for index, path in enumerate(self._step.files)}
        chosen = []
        for item in items:
            path = path_of(item.nodeid)
            function = str(getattr(item, "originalname", None) or item.name)
            alone = (self._step.only,) if self._step.only else CORE.get(path)
            if item.nodeid in self._skip or (alone and not {item.nodeid, function} & {*alone}):
                continue
            seen[path, function] += 1
            place = (item.nodeid != self._step.first, order.get(path, -1), seen[path, function])
            chosen.append((place, item))
        kept = sorted(chosen, key=lambda one: one[0])  # of every function one case first
        dropped = {id(item) for item in items} - {id(item) for *_, item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
        items[:] = [item for *_, item in kept]
        cases = collections.Counter(path_of(item.nodeid) for item in items)
        self._left = list(cases)
        self.write(event="chosen", of=cases)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
        """Leave a case out, whose file has used up its share."""
        path = path_of(item.nodeid)
        used = processor_seconds(os.getpid())
        if path not in self._end:
            self._left.remove(path)
            self._end[path] = used + (self._budget - used) / (len(self._left) + 1)
        elif used > self._end[path]:
            item.session._setupstate.teardown_exact(nextitem)  # what cases before have left to this
            return True
        self.write(event="start", test=item.nodeid)
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.write(event="fail", test=report.nodeid, how=_short(report), when=report.when)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(event="end", test=nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(event="last", used=processor_seconds(os.getpid()))


def _short(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines() or [""]
    return str(lines[0 if crash else -1][:200])


def _family(process: int) -> dict[int, float]:
    """A process and those below it: processor seconds of each and of its children that ended."""
    parents, used = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parts = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                parents[int(name)] = int(parts[1])
                used[int(name)] = sum(map(int, parts[11:15])) / os.sysconf("SC_CLK_TCK")
    found, ahead = {}, [process]
    while ahead:
        above = ahead.pop()
        found[above] = used.get(above, 0.0)
        ahead += [one for one, parent in parents.items() if parent == above and one not in found]
    return found


def processor_seconds(process: int) -> float:
    """Processor seconds of a process and all below it."""
    return sum(_family(process).values())


@dataclass
class Outcome:
    """What one run of pytest came to."""

    failed: str = ""
    """Id of the test that failed, hung or was running when its process died."""
    how: str = ""
    kind: str = "killed"
    passed: list[str] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)
    used: float = 0.0


class Lane:
    """A copy of a checkout, in which tests run.

    Args:
        folder: where it is made.
        root: the checkout.
        hang: seconds without the end of a test that mean a hang.
    """

    def __init__(self, folder: Path, root: Path, hang: float) -> None:
        self.root, self.tree = root, folder / "tree"
        self._folder, self._hang = folder, hang
        shutil.copytree(root, self.tree, ignore=lambda _, names: _TREE & set(names), symlinks=True)
        # A mutated path may lead up from where a test writes: there is nothing of others above it.
        self._scratch = folder / "a" / "b"
        self._log = folder / "log"

    def put(self, path: str, source: str | None = None) -> None:
        """Write a file of the copy, or write it as it is in the checkout."""
        file = self.tree / path
        file.write_text((self.root / path).read_text() if source is None else source)
        # Bytecode of another version, if written in the same second, would be taken for this one's.
        for stale in Path(cache_from_source(str(file))).parent.glob(f"{file.stem}.*"):
            stale.unlink()

    def run(
        self, step: Step, budget: float, skip: Set[str] = frozenset(), patience: float = 1
    ) -> Outcome:
        """Run tests until one fails or the budget is used up; nothing of it stays behind."""
        events = self._folder / "events"
        events.write_text("")
        child = in_a_fork(partial(self._pytest, step, skip, budget, events))
        try:
            found = self._watch(child, events, self._hang * patience)
            found.used = found.used or processor_seconds(child)
            return found
        finally:
            _end_all_below()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _watch(self, child: int, events: Path, hang: float) -> Outcome:
        found, running, last = Outcome(), "", time.monotonic()
        with events.open() as lines:
            while True:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.1 if not ended else 0)
                while line := lines.readline():
                    last = time.monotonic()
                    event = json.loads(line)
                    if event["event"] == "chosen":
                        found.of = event["of"]
                    elif event["event"] == "start":
                        running = event["test"]
                    elif event["event"] == "end":
                        found.passed.append(event["test"])
                        running = ""
                    elif event["event"] == "last":
                        found.used = event["used"]
                    elif event["event"] == "fail":
                        found.failed, found.how = event["test"], event["how"]
                        return found
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    if code not in (0, 1, 5):
                        found.kind, found.how = "killed (crashed)", self._last_line(code)
                        found.failed = running or f"exit code {code}"
                    return found
                begun = running or found.passed
                if time.monotonic() - last > (hang if begun else _START * hang):
                    found.kind, found.failed = "killed (hung)", running or "collection"
                    found.how = f"no end within {hang:g} s"
                    return found

    def _last_line(self, code: int) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1][:200] if lines else ''}"

    def _pytest(self, step: Step, skip: Set[str], budget: float, events: Path) -> int:
        """Exit code of pytest, run in this process."""
        self._enter()
        import pytest

        recorder = _Recorder(step, skip, budget, events)
        files = [str(self.tree / path) for path in step.files]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0", "--tb=short"]
        options += ["--doctest-modules"]  # of files of the package
        options += [f"--rootdir={self.tree}", f"--basetemp={self._scratch / 'tests'}"]
        return int(pytest.main([*options, *files], plugins=[recorder]))

    def _enter(self) -> None:
        os.setsid()
        _control(_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs detached ignores both
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        (self._scratch / "tmp").mkdir(parents=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._scratch / "tmp")
        os.environ["PYTHONPATH"] = str(self.tree)
        os.environ.pop("PYTEST_ADDOPTS", None)
        os.chdir(self.tree)
        ours = {"", str(self.root), str(Path(__file__).parents[2])}
        sys.path[:] = [str(self.tree), *(path for path in sys.path if path not in ours)]
        for name in list(sys.modules):
            if name.partition(".")[0] in (PACKAGE, "tests", "benchmarks"):
                del sys.modules[name]
        importlib.invalidate_caches()


def in_a_fork(work: Callable[[], int]) -> int:
    """Id of a forked process that does some work, and whose exit code is what it returns."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch_over_children() -> None:
    """End with the parent, and adopt what children leave behind."""
    _control(_DEATH_SIGNAL, signal.SIGKILL)
    _control(_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_all_below() -> None:
    """Kill and collect whatever descends from this process, orphans that it adopted included."""
    while below := _family(os.getpid()).keys() - {os.getpid()}:
        for one in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def preload(root: Path) -> None:
    """Import what the package and its tests import of others, to be forked with it."""
    names: dict[str, set[str]] = collections.defaultdict(set)
    for folder in (PACKAGE, "tests"):
        for file in sorted((root / folder).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        names[alias.name] |= set()
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names[node.module or ""] |= {alias.name for alias in node.names}
    if "torch" in names:
        names["torch._dynamo"] |= set()  # seconds in every worker that first needs it
    for name, members in sorted(names.items()):
        if name.partition(".")[0] in (PACKAGE, "tests", "benchmarks", "__future__"):
            continue
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for member in members:  # some packages load what is asked for only
                getattr(module, member, None)
    gc.collect()
    gc.freeze()
