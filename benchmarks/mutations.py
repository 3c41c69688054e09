"""Mutations of the package, and which tests find them: ``python -m benchmarks.mutations``.

A mutation is one small defect: a comparison flipped, a number or a slice off by one, a wait
dropped, operands swapped, a statement removed, a condition negated, ``and`` for ``or``. A seed
draws them; the kinds take turns, and within a kind every place of the package is equally likely.
One after the other is put into a copy of the checkout, and tests run until one fails. Which tests,
and in what order:

1. the tests of the mutated file: its doctests, those named after it, those that import it, and the
   same of the files that import it; those whose names have a word of its name;
2. the other tests of its folder;
3. those that train whole models (`CORE`).

A budget of processor time is divided between the three, and between the files of each: of a file
that uses up its share, the next cases are left out. A survivor has survived these tests and no
others; the record says which of their cases ran.

One process imports what tests need, but not the package, and forks a child for every run of pytest.
A failure counts if the test passes without the mutation and fails with it once more. A test hangs
if it does not end within ``--hang`` seconds, nor in twice the time when it is tried again, although
it does so without the mutation. A process that adopts orphans watches each child, and kills
whatever the child has left behind.

The record is written after every mutation. ``--resume RECORD`` goes on with a series that was cut
off. ``--again RECORD`` applies the mutations of a record to this checkout, whose lines may have
moved, tries the test that killed each first, and ends with those that were killed and survive now.
"""

import argparse
import ast
import collections
import contextlib
import copy
import ctypes
import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

PACKAGE = "lightning_megatron"
FOLDERS = ("parallel", "layers", "pipeline", "strategy", "checkpoint", "data")
KINDS = ("comparison", "off by one", "wait", "operands", "removed", "negated", "and/or")
CORE = {
    "tests/parity/test_matrix.py": None,
    "tests/parity/test_strangers.py": None,
    "tests/lightning/test_cases.py": "test_one_process_is_as_plain_lightning",
    "tests/parity/test_habits.py": None,
    "tests/parity/test_resume.py": None,
}
"""Tests that train whole models: all cases of a file, or those of one function."""

KILLED = ("killed", "killed (hung)", "killed (crashed)")
SURVIVED, GONE = "survived", "no longer there"

_SHARES = (0.45, 0.5, 1.0)
"""Share of what is left of the budget, by step of the choice of tests."""
_MOST_FILES = 10
"""Most test files of a step."""
_FEW, _FAR = 4, 6
"""Files that import a mutated one, up to which theirs count as well; a distance beyond all."""
_NEVER = ("tests/gpu/", "tests/machines/", "tests/launched/", "tests/docs/")
"""Tests that cost too much for what they find of one defect."""
_TREE = {".git", ".venv", ".whl", "build", "dist", "runs", "shared", "__pycache__"}
_NO_LIMIT = 1e9
_START = 5
"""Imports and the collection of several files may take that many times as long as one test."""
_MEMORY = 8 * 2**30
"""Bytes of data that one process may have, lest a loop without an end takes the machine's."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""``PR_SET_PDEATHSIG`` and ``PR_SET_CHILD_SUBREAPER`` of ``prctl``."""

_FLIPPED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult)
_WAITS = re.compile(r"(^|_)(wait|synchronize|barrier)(_|$)")
_SAYS = re.compile(r"^(_?log(ger)?\.\w+|logging\.\w+|\w*warn\w*|.*\.warn|rank_zero_\w+|print)$")
_UNHEARD = ("__repr__", "__str__", "extra_repr")
_HEADS = (ast.If, ast.While, ast.For, ast.With)
_PLAIN = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Delete)


@dataclass(frozen=True)
class Mutation:
    """One defect: a statement of a function, and what stands there instead."""

    path: str
    function: str
    """Qualified name, empty for statements of the module itself."""
    kind: str
    before: str
    """Source of the statement as `ast.unparse` writes it; of a compound one, its head."""
    after: str
    occurrence: int
    """Number of equal statements before it in the function."""
    line: int
    """In the checkout that it was drawn from."""


# Drawing


@dataclass(frozen=True)
class _Site:
    """A place that can be mutated, and how."""

    path: str
    function: str
    statement: ast.stmt
    node: ast.AST
    kind: str
    variant: int


def statements(body: Sequence[ast.stmt], function: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """All statements in their order, with the qualified name of the function that they are in."""
    for statement in body:
        yield function, statement
        inner = function
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{statement.name}".lstrip(".")
        for owner in (
            statement,
            *getattr(statement, "handlers", ()),
            *getattr(statement, "cases", ()),
        ):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(owner, name, ()), inner)


def head(statement: ast.stmt) -> str:
    """Source of a statement without what is indented under it."""
    if not isinstance(statement, _HEADS):
        return ast.unparse(statement)
    bare = copy.copy(statement)
    bare.body = [ast.Pass()]
    if not isinstance(bare, ast.With):
        bare.orelse = []
    return ast.unparse(bare).removesuffix("\n    pass")


def _name_of(call: ast.AST) -> str:
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _is_heard(function: str, statement: ast.stmt) -> bool:
    """Whether a mutation there may change what the package does, and not only what it says."""
    if function.rpartition(".")[2] in _UNHEARD:
        return False
    if isinstance(statement, ast.If):
        return not re.match(r"TYPE_CHECKING|__name__", ast.unparse(statement.test))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call | ast.Await) and not _SAYS.match(
            _name_of(statement.value)
        )
    if isinstance(statement, ast.Assign) and _is_text(statement.value):
        return False
    return isinstance(statement, _PLAIN + _HEADS + (ast.Raise, ast.Break, ast.Continue))


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement computes, without annotations and what only makes up messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "body", "orelse") and isinstance(node, ast.stmt):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            named = _name_of(child)
            if named.endswith(("Error", "Warning")) or _SAYS.match(named):
                continue
            yield child
            yield from _expressions(child)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _ways(node: ast.AST) -> list[tuple[str, int]]:
    """Kinds of mutations that an expression, or the head of a statement, admits, with a variant."""
    if isinstance(node, ast.Compare):
        return [("comparison", index) for index in range(len(_FLIPPED[type(node.ops[0])]))]
    if isinstance(node, ast.Constant):
        return [("off by one", 0)] if type(node.value) is int else []
    if isinstance(node, ast.Slice):
        ends = (node.lower, node.upper)
        computed = [end is not None and not isinstance(end, ast.Constant) for end in ends]
        return [("off by one", index) for index in (0, 1) if computed[index]]
    if isinstance(node, ast.BinOp):
        text = _is_text(node.left) or _is_text(node.right)  # a format or a path
        return [("operands", 0)] if isinstance(node.op, _SWAPPED) and not text else []
    if isinstance(node, ast.BoolOp):
        return [("and/or", 0)]
    if isinstance(node, ast.comprehension):
        return [("negated", index) for index in range(len(node.ifs))]
    return [("negated", 0)] if isinstance(node, ast.If | ast.While | ast.IfExp) else []


def _removal(statement: ast.stmt, bound: collections.Counter[str]) -> str | None:
    """Kind of mutation that its removal is; a name that nobody binds elsewhere stays."""
    if isinstance(statement, ast.Expr):
        name = _name_of(statement.value).rpartition(".")[2]
        return "wait" if _WAITS.search(name) else "removed"
    if isinstance(statement, ast.Assign):
        names = [name for target in statement.targets for name in _stored(target)]
        return "removed" if all(bound[name] > 1 for name in names) else None
    if isinstance(statement, ast.Return):
        return "removed" if statement.value is None else None
    kinds = (ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Delete)
    return "removed" if isinstance(statement, kinds) else None


def _stored(node: ast.AST) -> list[str]:
    """Names that it binds."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    return [one.id for one in names if isinstance(one.ctx, ast.Store)]


def _bound(tree: ast.Module) -> dict[str, collections.Counter[str]]:
    """How many times each function binds its names, arguments included."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for function, statement in statements(tree.body):
        if isinstance(statement, ast.FunctionDef):
            inner = f"{function}.{statement.name}".lstrip(".")
            found[inner].update(a.arg for a in ast.walk(statement.args) if isinstance(a, ast.arg))
        parts = [statement] if not isinstance(statement, _HEADS) else list(_expressions(statement))
        if not hasattr(statement, "body") or isinstance(statement, _HEADS):
            names = {name for part in parts for name in _stored(part)}
            found[function].update(names)
    return found


def sites(path: str, source: str) -> Iterator[_Site]:
    """All places of a file that can be mutated."""
    tree = ast.parse(source)
    bound = _bound(tree)
    for function, statement in statements(tree.body):
        if not _is_heard(function, statement):
            continue
        if kind := _removal(statement, bound[function]):
            yield _Site(path, function, statement, statement, kind, -1)
        if isinstance(statement, ast.Raise):
            continue
        for node in (statement, *_expressions(statement)):
            for kind, variant in _ways(node):
                yield _Site(path, function, statement, node, kind, variant)


def _mutate(node: Any, kind: str, variant: int) -> None:
    """Change a node of a copy of the tree."""
    one = ast.Constant(1)
    if kind == "comparison":
        node.ops[0] = _FLIPPED[type(node.ops[0])][variant]()
    elif kind == "operands":
        node.left, node.right = node.right, node.left
    elif kind == "and/or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant):
        node.value += 1
    elif isinstance(node, ast.Slice) and variant:
        node.upper = ast.BinOp(node.upper, ast.Sub(), one)
    elif isinstance(node, ast.Slice):
        node.lower = ast.BinOp(node.lower, ast.Add(), one)
    elif isinstance(node, ast.comprehension):
        node.ifs[variant] = _opposite(node.ifs[variant])
    else:
        node.test = _opposite(node.test)


def _opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def mutation_of(site: _Site, source: str) -> Mutation | None:
    """The mutation of a place, unless the file would be the same or not compile with it."""
    copies: dict[int, Any] = {}
    changed = copy.deepcopy(site.statement, copies)
    if site.variant >= 0:
        _mutate(copies[id(site.node)], site.kind, site.variant)
    with contextlib.suppress(ValueError, SyntaxError):
        before = head(site.statement)
        equal = [
            statement.lineno
            for function, statement in statements(ast.parse(source).body)
            if function == site.function and _is_like(statement, before)
        ]
        found = Mutation(
            site.path,
            site.function,
            site.kind,
            before,
            head(changed) if site.variant >= 0 else "pass",
            equal.index(site.statement.lineno),
            getattr(site.node, "lineno", site.statement.lineno),
        )
        if apply(source, found) is not None:
            return found
    return None


def _is_like(statement: ast.stmt, text: str) -> bool:
    try:
        return isinstance(statement, _PLAIN + _HEADS + (ast.Raise, ast.Break, ast.Continue)) and (
            head(statement) == text
        )
    except ValueError:  # an f-string that cannot be written back
        return False


def apply(source: str, mutation: Mutation) -> str | None:
    """The source with a mutation, or None where the statement is gone."""
    found = [
        statement
        for function, statement in statements(ast.parse(source).body)
        if function == mutation.function and _is_like(statement, mutation.before)
    ]
    if not found:
        return None
    statement = found[min(mutation.occurrence, len(found) - 1)]
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: statement.lineno - 1])) + statement.col_offset
    text, after = source.encode(), mutation.after.encode()
    if isinstance(statement, _HEADS):
        if text[begin:].startswith(b"elif"):
            after = b"el" + after
        first = statement.body[0]
        line = min(n.lineno for n in (first, *getattr(first, "decorator_list", ())))
        end = sum(map(len, lines[: line - 1])) + first.col_offset
        after += b"\n" + b" " * (statement.col_offset + 4)
    else:
        assert statement.end_lineno is not None
        assert statement.end_col_offset is not None
        end = sum(map(len, lines[: statement.end_lineno - 1])) + statement.end_col_offset
    changed = (text[:begin] + after + text[end:]).decode()
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        compile(changed, mutation.path, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return None if same else changed


def draw(root: Path, number: int, seed: int, folders: Sequence[str] = FOLDERS) -> list[Mutation]:
    """Draw mutations of a checkout: the kinds take turns, and every folder has one at least."""
    chance = random.Random(seed)
    sources: dict[str, str] = {}
    places: dict[str, list[_Site]] = {kind: [] for kind in KINDS}
    for folder in folders:
        for file in sorted((root / PACKAGE / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            sources[path] = file.read_text()
            for site in sites(path, sources[path]):
                places[site.kind].append(site)
    found: dict[tuple[str, str, str, str, int], Mutation] = {}
    turn = 0
    while len(found) < number:
        kind = KINDS[turn % len(KINDS)]
        if not any(places.values()):
            raise ValueError(f"no more than {len(found)} mutations can be drawn from {root}")
        wanted = folders[turn] if turn < len(folders) else ""
        among = [s for s in places[kind] if s.path.startswith(f"{PACKAGE}/{wanted}")]
        turn += 1
        if among or places[kind]:
            site = chance.choice(among or places[kind])
            places[kind].remove(site)
            if mutation := mutation_of(site, sources[site.path]):
                key = (mutation.path, mutation.function, mutation.before, mutation.after)
                found.setdefault((*key, mutation.occurrence), mutation)
    return list(found.values())


# Choosing tests


@dataclass(frozen=True)
class Step:
    """Tests that one run of pytest tries."""

    files: tuple[str, ...]
    share: float = 1.0
    """Share of what is left of the budget."""
    only: str = ""
    """Name of a function, or the id of a test, that alone runs."""
    first: str = ""
    """Id of the test that begins."""


class Suite:
    """Which tests have to do with a file of the package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees = {
            file.relative_to(root).as_posix(): ast.parse(file.read_text())
            for folder in (PACKAGE, "tests")
            for file in sorted((root / folder).rglob("*.py"))
        }
        self._modules = {_module(path): path for path in self._trees}

    @cached_property
    def _homes(self) -> dict[str, set[str]]:
        """Files of the package by the classes and functions that they define."""
        found: dict[str, set[str]] = collections.defaultdict(set)
        for path, tree in self._trees.items():
            if path.startswith(PACKAGE):
                for node in tree.body:
                    if isinstance(node, ast.FunctionDef | ast.ClassDef):
                        found[node.name].add(path)
        return found

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        return {path: self._imported(tree) for path, tree in self._trees.items()}

    def _imported(self, tree: ast.Module) -> set[str]:
        """Files that a file imports, by whatever package it finds a name in."""
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {self._modules[a.name] for a in node.names if a.name in self._modules}
            elif isinstance(node, ast.ImportFrom) and (node.module or "") in self._modules:
                home = self._modules[node.module or ""]
                for alias in node.names:
                    named = self._modules.get(f"{node.module}.{alias.name}")
                    below = home.removesuffix("__init__.py")
                    homes = {p for p in self._homes[alias.name] if p.startswith(below)}
                    found |= {named} if named else homes or {home}
        return found

    @cached_property
    def uses(self) -> dict[str, set[str]]:
        """By test file, the files of the package that it imports, or what it shares does."""
        return {
            path: {p for p in self._closed(path) if p.startswith(PACKAGE)}
            for path in self._trees
            if path.startswith("tests/") and Path(path).name.startswith("test_")
        }

    def _closed(self, path: str) -> set[str]:
        seen: set[str] = set()
        ahead = [path]
        while ahead:
            for other in self._imports[ahead.pop()] - seen:
                seen.add(other)
                if other.startswith("tests/"):
                    ahead.append(other)
        return seen

    def _near(self, mutated: str) -> dict[str, int]:
        """The file, those of the package that import it, and theirs if these are few: how far."""
        found = {mutated: 0}
        for distance in (1, 2):
            if len(found) <= _FEW:
                found |= {
                    path: distance
                    for path in self._trees
                    if path.startswith(PACKAGE)
                    and path not in found
                    and self._imports[path] & found.keys()
                }
        return found

    def steps(self, mutated: str) -> list[Step]:
        """The choice for a mutated file."""
        folder = Path("tests", *Path(mutated).parts[1:-1]).as_posix()
        around = "/".join(folder.split("/")[:2])
        near, words = self._near(mutated), _words(mutated)
        subject = _words(Path(mutated).stem)

        def distance(path: str) -> int:
            """Twice how far the file is that the test is named after, one more if it imports it."""
            if Path(path).stem.startswith(f"test_{Path(mutated).stem}") and path.startswith(folder):
                return 0
            top = path.split("/")[1]
            named = [
                2 * far
                for one, far in near.items()
                if Path(path).stem == f"test_{Path(one).stem}"
                and top in ("parity", one.split("/")[1])
            ]
            uses = [2 * near[used] + 1 for used in self.uses[path] & near.keys()]
            return min([*named, *uses, _FAR - bool(subject & _words(path))])

        tests = [path for path in self.uses if not path.startswith(_NEVER)]
        far = {path: distance(path) for path in tests}
        tests.sort(key=lambda p: (far[p], -len(words & _words(p)), len(self.uses[p]), p))
        own = [path for path in tests if far[path] < _FAR][:_MOST_FILES]
        others = [path for path in tests if path not in own and path.startswith(f"{around}/")]
        others.sort(key=lambda path: not path.startswith(f"{folder}/"))
        others = others[:_MOST_FILES]
        core = [path for path in CORE if path in self._trees and path not in own + others]
        doctests = [mutated] if ">>> " in (self._root / mutated).read_text() else []
        found = [doctests + own, others, core]
        return [Step(tuple(f), s) for f, s in zip(found, _SHARES, strict=True) if f]

    def killer(self, test: str) -> list[Step]:
        """Where the test of an id is now: at its place, or in files with a function of its name."""
        path = test.partition("::")[0]
        name = test.partition("[")[0].rpartition("::")[2]
        if path.startswith(PACKAGE):
            return [Step((path,), 0.5)] if path in self._trees else []
        files = [p for p in self.uses if any(_defines(self._trees[p], name))]
        if path in files:
            return [Step((path,), 0.5, only=name, first=test)]
        if files:
            return [Step(tuple(files), 0.5, only=name)]
        return [Step((path,), 0.5)] if path in self._trees else []


def _defines(tree: ast.Module, name: str) -> Iterator[bool]:
    return (isinstance(n, ast.FunctionDef) and n.name == name for n in ast.walk(tree))


def _module(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def _words(path: str) -> set[str]:
    words = re.split(r"[/_]", path.removesuffix(".py"))
    return {word.rstrip("s") for word in words} - {"test", "lightning", "megatron", ""}


# Running tests


class _Recorder:
    """A plugin of pytest: chooses, orders and limits cases, and writes down what happens.

    Args:
        step: what to run.
        skip: ids of cases that have run.
        budget: processor seconds of this process and those below it.
        events: file for lines of JSON.
    """

    def __init__(self, step: Step, skip: set[str], budget: float, events: Path) -> None:
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
            path, function = item.nodeid.partition("::")[0], _function(item)
            alone = self._step.only or CORE.get(path)
            if item.nodeid in self._skip or (alone and alone not in (item.nodeid, function)):
                continue
            seen[path, function] += 1
            place = (item.nodeid != self._step.first, order.get(path, -1), seen[path, function])
            chosen.append((place, item))
        kept = sorted(chosen, key=lambda one: one[0])  # of every function one case first
        dropped = {id(item) for item in items} - {id(item) for *_, item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
        items[:] = [item for *_, item in kept]
        self._left = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
        self.write(event="chosen", of=collections.Counter(_path(item.nodeid) for item in items))

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
        """Leave a case out, whose file has used up its share."""
        path = _path(item.nodeid)
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


def _path(test: str) -> str:
    return test.partition("::")[0]


def _function(item: Any) -> str:
    return str(getattr(item, "originalname", None) or item.name)


def _short(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines() or [""]
    return str(lines[0 if crash else -1][:200])


def _parents() -> dict[int, tuple[int, float]]:
    """By process, its parent and the processor seconds of it and of its children that ended."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parts = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                ticks = sum(map(int, parts[11:15]))
                found[int(name)] = (int(parts[1]), ticks / os.sysconf("SC_CLK_TCK"))
    return found


def descendants(process: int) -> dict[int, float]:
    """Processes below one, with their processor seconds."""
    all_of_them, found, ahead = _parents(), {}, [process]
    while ahead:
        above = ahead.pop()
        for one, (parent, used) in all_of_them.items():
            if parent == above and one not in found:
                found[one] = used
                ahead.append(one)
    return found


def processor_seconds(process: int) -> float:
    """Processor seconds of a process and all below it."""
    return _parents().get(process, (0, 0.0))[1] + sum(descendants(process).values())


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
        self.tree = folder / "tree"
        self._folder, self._root, self._hang = folder, root, hang
        self._versions = 0
        shutil.copytree(root, self.tree, ignore=lambda _, names: _TREE & set(names), symlinks=True)
        # A mutated path may lead up from where a test writes: there is nothing of others above it.
        self._scratch = folder / "a" / "b"
        self._log = folder / "log"

    def put(self, path: str, source: str | None = None) -> None:
        """Write a file of the copy, or write it as it is in the checkout."""
        self._versions += 1
        text = (self._root / path).read_text() if source is None else source
        (self.tree / path).write_text(text)
        stamp = 10**9 + 2 * self._versions  # bytecode of another version must not be taken
        os.utime(self.tree / path, (stamp, stamp))

    def run(
        self, step: Step, budget: float, skip: set[str] | None = None, patience: float = 1
    ) -> Outcome:
        """Run tests until one fails or the budget is used up; nothing of it stays behind."""
        events = self._folder / "events"
        events.write_text("")
        child = os.fork()
        if not child:
            self._be_pytest(step, skip or set(), budget, events)
        try:
            return self._watch(child, events, self._hang * patience)
        finally:
            _end_all_below()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _watch(self, child: int, events: Path, hang: float) -> Outcome:
        found, begun, running, last = Outcome(), False, "", time.monotonic()
        with events.open() as lines:
            while True:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.1 if not ended else 0)
                while line := lines.readline():
                    last = time.monotonic()
                    event = json.loads(line)
                    test = event.get("test", "")
                    if event["event"] == "chosen":
                        found.of = event["of"]
                    elif event["event"] == "start":
                        running, begun = test, True
                    elif event["event"] == "end":
                        found.passed.append(test)
                        running = ""
                    elif event["event"] == "last":
                        found.used = event["used"]
                    elif event["event"] == "fail":
                        found.failed, found.how = test, event["how"]
                        found.used = processor_seconds(child)
                        return found
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    if code not in (0, 1, 5):
                        found.kind, found.how = "killed (crashed)", self._last_line(code)
                        found.failed = running or f"exit code {code}"
                    return found
                if time.monotonic() - last > (hang if begun else _START * hang):
                    found.kind, found.failed = "killed (hung)", running or "collection"
                    found.how = f"no end within {hang:g} s"
                    found.used = processor_seconds(child)
                    return found

    def _last_line(self, code: int) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1][:200] if lines else ''}"

    def _be_pytest(self, step: Step, skip: set[str], budget: float, events: Path) -> NoReturn:
        """Run pytest in this forked process, and end it."""
        code = 70
        try:
            self._enter()
            import pytest

            recorder = _Recorder(step, skip, budget, events)
            files = [str(self.tree / path) for path in step.files]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0", "--tb=short"]
            options += [f"--rootdir={self.tree}", f"--basetemp={self._scratch / 'tests'}"]
            code = int(pytest.main([*options, *files], plugins=[recorder]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

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
        ours = {"", str(self._root), str(Path(__file__).parents[1])}
        sys.path[:] = [str(self.tree), *(path for path in sys.path if path not in ours)]
        for name in list(sys.modules):
            if name.partition(".")[0] in (PACKAGE, "tests", "benchmarks"):
                del sys.modules[name]
        importlib.invalidate_caches()


def _control(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_all_below() -> None:
    """Kill and collect whatever descends from this process, orphans that it adopted included."""
    while below := descendants(os.getpid()):
        for one in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


@dataclass
class Trial:
    """All runs that one mutation needs."""

    lane: Lane
    mutation: Mutation
    source: str
    budget: float
    controls: dict[str, bool]
    """Which tests pass without a mutation, as far as it is known."""
    ran: dict[str, str] = field(default_factory=dict)
    distrusted: list[str] = field(default_factory=list)
    """Tests that fail without the mutation too, or did not fail again with it."""

    def run(self, steps: Sequence[Step]) -> dict[str, Any]:
        """What becomes of the mutation."""
        begun, left = time.monotonic(), self.budget
        spent = 0.0
        result: dict[str, Any] = {"outcome": SURVIVED}
        self.lane.put(self.mutation.path, self.source)
        for step in steps:
            outcome, used = self._try(step, max(left * step.share, 1.0))
            spent += used
            left -= used
            if outcome is not None:
                result = {"outcome": outcome.kind, "by": outcome.failed}
                result["how"] = outcome.how.replace(f"{self.lane.tree}/", "")
                break
        self.lane.put(self.mutation.path)
        result |= {"ran": self.ran, "distrusted": self.distrusted}
        result["processor seconds"] = round(spent, 1)
        return result | {"seconds": round(time.monotonic() - begun, 1)}

    def _try(self, step: Step, budget: float) -> tuple[Outcome | None, float]:
        skip: set[str] = set()
        used = 0.0
        while True:
            found = self.lane.run(step, budget - used, skip)
            used += found.used
            passed = collections.Counter(map(_path, found.passed))
            for path, count in found.of.items():
                before = int(self.ran.get(path, "0").split()[0]) if skip else 0
                self.ran[path] = f"{before + passed[path]} of {before + count}"
            if not found.failed:
                return None, used
            if self._counts(step, found):
                return found, used
            self.distrusted.append(found.failed)
            if "::" not in found.failed:  # nothing to leave out: the whole step is of no use
                return None, used
            skip |= {*found.passed, found.failed}

    def _counts(self, step: Step, found: Outcome) -> bool:
        """Whether the mutation, and nothing else, makes the test fail."""
        test = found.failed
        one = replace(step, only=test, files=(_path(test),))
        if "::" not in test:  # what failed was to import or to collect
            one = replace(step, only="none")
        if self.controls.get(test) is None:
            self.lane.put(self.mutation.path)
            self.controls[test] = not self.lane.run(one, _NO_LIMIT).failed
            self.lane.put(self.mutation.path, self.source)
        if not self.controls[test]:
            return False
        again = self.lane.run(one, _NO_LIMIT, patience=1 if found.kind == "killed" else 2)
        found.kind = again.kind
        return bool(again.failed)


# A series


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


@dataclass
class Series:
    """Mutations, what became of them, and the file that says so."""

    record: Path
    data: dict[str, Any]

    def write(self) -> None:
        self.record.parent.mkdir(parents=True, exist_ok=True)
        draft = self.record.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.record)

    def mutations(self) -> Iterator[tuple[int, Mutation]]:
        """Those that have no result yet, with their numbers."""
        names = set(Mutation.__dataclass_fields__)
        for index, row in enumerate(self.data["mutations"]):
            if "result" not in row:
                yield index, Mutation(**{key: row[key] for key in row.keys() & names})

    def run(self, root: Path, jobs: int, budget: float, hang: float) -> None:
        """Try all that have no result yet, ``jobs`` of them at a time."""
        suite = Suite(root)
        suite.uses  # noqa: B018  # computed once, before the first fork
        ahead, free = list(self.mutations()), list(range(jobs))
        running: dict[int, tuple[int, int, Path]] = {}
        with tempfile.TemporaryDirectory(prefix="mutations-") as name:
            lanes = [self._lane(Path(name, str(job)), root, hang) for job in free]
            while ahead or running:
                while ahead and free:
                    index, mutation = ahead.pop(0)
                    lane, answer = free.pop(), Path(name, f"{index}.json")
                    child = os.fork()
                    if not child:
                        steps = self._steps(suite, mutation, index)
                        self._be_a_trial(root, lanes[lane], mutation, steps, budget, answer)
                    running[child] = (index, lane, answer)
                child, _ = os.wait()
                index, lane, answer = running.pop(child)
                free.append(lane)
                lanes[lane]._versions += 1000  # what the child counted, this process did not see
                self._take(index, answer)

    @staticmethod
    def _lane(folder: Path, root: Path, hang: float) -> Lane:
        folder.mkdir()
        return Lane(folder, root, hang)

    def _steps(self, suite: Suite, mutation: Mutation, index: int) -> list[Step]:
        earlier = self.data["mutations"][index].get("earlier", {})
        first = suite.killer(earlier["by"]) if "::" in earlier.get("by", "") else []
        return first + suite.steps(mutation.path)

    def _be_a_trial(
        self,
        root: Path,
        lane: Lane,
        mutation: Mutation,
        steps: Sequence[Step],
        budget: float,
        answer: Path,
    ) -> NoReturn:
        """Try one mutation in this forked process, and end it."""
        code = 1
        try:
            _control(_DEATH_SIGNAL, signal.SIGKILL)
            _control(_SUBREAPER, 1)
            controls: dict[str, bool] = dict(self.data["controls"])
            file = root / mutation.path
            source = apply(file.read_text(), mutation) if file.exists() else None
            result: dict[str, Any] = {"outcome": GONE}
            if source is not None:
                result = Trial(lane, mutation, source, budget, controls).run(steps)
            answer.write_text(json.dumps({"result": result, "controls": controls}))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _take(self, index: int, answer: Path) -> None:
        row = self.data["mutations"][index]
        if not answer.exists():
            print(f"{index}: no answer; --resume tries it again", flush=True)
            return
        found = json.loads(answer.read_text())
        row["result"] = found["result"]
        self.data["controls"] |= found["controls"]
        self.write()
        print(line(index, row), flush=True)


def line(index: int, row: dict[str, Any]) -> str:
    """A mutation and what became of it."""
    result = row.get("result", {})
    text = f"{index:3} {row['path'].removeprefix(PACKAGE + '/')}:{row['line']} {row['kind']}: "
    text += f"`{_cut(row['before'])}` -> `{_cut(row['after'])}`"
    text += f" | {result.get('outcome', 'not tried')}"
    return text + (f" by {result['by']}" if result.get("by") else "")


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def lost(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of those that an earlier series killed and this one did not."""
    return [
        index
        for index, row in enumerate(rows)
        if row.get("earlier", {}).get("outcome") in KILLED
        and row.get("result", {}).get("outcome", GONE) not in (*KILLED, GONE)
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Counts by kind and by outcome."""
    outcomes = collections.Counter(row.get("result", {}).get("outcome", "-") for row in rows)
    lines = [f"{len(rows)} mutations: " + ", ".join(f"{n} {o}" for o, n in outcomes.items())]
    killed: Callable[[Any], bool] = lambda row: row.get("result", {}).get("outcome") in KILLED  # noqa: E731
    for title, key in (
        ("kind", lambda r: r["kind"]),
        ("folder", lambda r: r["path"].split("/")[1]),
    ):
        for name in dict.fromkeys(map(key, rows)):
            of = [row for row in rows if key(row) == name]
            lines.append(f"  {title} {name}: {sum(map(killed, of))} of {len(of)} killed")
    return "\n".join(lines)


def commit_of(root: Path) -> str:
    """Short name of the commit of a checkout."""
    call = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(call, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no-commit"


def options() -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=here, help="checkout that is mutated")
    parser.add_argument("--number", type=int, default=80, help="mutations to draw")
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="mutations at a time")
    parser.add_argument("--budget", type=float, default=150, help="processor seconds of each")
    parser.add_argument(
        "--hang", type=float, default=180, help="seconds of a test that mean a hang"
    )
    parser.add_argument("--output", type=Path, default=here / "benchmarks" / "results")
    parser.add_argument("--list", action="store_true", help="draw and print, without running tests")
    record = parser.add_mutually_exclusive_group()
    record.add_argument("--resume", type=Path, metavar="RECORD", help="go on with a series")
    record.add_argument("--again", type=Path, metavar="RECORD", help="its mutations, tried here")
    return parser.parse_args()


def series_of(given: argparse.Namespace, root: Path) -> Series:
    """The series that the command line asks for."""
    commit = commit_of(root)
    if given.resume:
        data = json.loads(given.resume.read_text())
        if data["commit"] != commit:
            raise SystemExit(f"the series was begun at {data['commit']}, and {root} is at {commit}")
        return Series(given.resume, data)
    data = {"commit": commit, "budget": given.budget, "hang": given.hang}
    if given.again:
        earlier = json.loads(given.again.read_text())
        data["again"] = earlier["commit"]
        rows = [dict(row) for row in earlier["mutations"]]
        for row in rows:
            row["earlier"] = row.pop("result", {})
    else:
        data["seed"] = given.seed
        rows = [asdict(one) for one in draw(root, given.number, given.seed)]
    data |= {"controls": {}, "mutations": rows}
    again = "-again" if given.again else ""
    return Series(given.output / f"mutations-{commit}{again}.json", data)


def main() -> int:
    """Run a series; 1 where a mutation that was killed survives now."""
    given = options()
    root = given.root.resolve()
    series = series_of(given, root)
    rows = series.data["mutations"]
    if given.list:
        print("\n".join(line(index, row) for index, row in enumerate(rows)))
        return 0
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    print(f"the record is {series.record}", flush=True)
    series.write()
    preload(root)
    series.run(root, given.jobs, series.data["budget"], series.data["hang"])
    print(summary(rows))
    for index in lost(rows):
        print(f"killed before, survives now: {line(index, rows[index])}")
        print(f"    it was killed by {rows[index]['earlier'].get('by')}")
    return int(bool(lost(rows)))


if __name__ == "__main__":
    sys.exit(main())
