"""Which tests have to do with a file of the package, and in what order they are tried."""

import ast
import collections
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutations.draw import PACKAGE

CORE: dict[str, tuple[str, ...]] = {
    "tests/parity/test_matrix.py": (),
    "tests/parity/test_modules.py": (),
    "tests/parity/test_strangers.py": (),
    "tests/lightning/test_cases.py": (
        "test_it_is_as_plain_lightning",
        "test_one_process_is_as_plain_lightning",
    ),
    "tests/parity/test_habits.py": (),
    "tests/parity/test_resume.py": (),
}
"""Tests that train whole models: all cases of a file, or those of some functions.

A checkout has some of them: each counts that is there.
"""

_SHARES = (0.45, 0.5, 1.0)
"""Share of what is left of the budget, by step of the choice of tests."""
_MOST_FILES = 10
"""Most test files of a step."""
_FEW, _FAR = 4, 6
"""Files that import a mutated one, up to which theirs count as well; a distance beyond all."""
_NEVER = ("tests/gpu/", "tests/machines/", "tests/launched/", "tests/docs/")
"""Tests that cost too much for what they find of one defect."""


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
        # Files of the package by the classes and functions that they define.
        self._homes: dict[str, set[str]] = collections.defaultdict(set)
        for path, tree in self._trees.items():
            for node in tree.body if path.startswith(PACKAGE) else ():
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self._homes[node.name].add(path)
        self._imports = {path: self._imported(tree) for path, tree in self._trees.items()}
        # By test file, the files of the package that it imports, or what it shares does.
        self._uses = {
            path: {p for p in self._closed(path) if p.startswith(PACKAGE)}
            for path in self._trees
            if path.startswith("tests/") and Path(path).name.startswith("test_")
        }

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

    def _distance(self, test: str, mutated: str, near: dict[str, int]) -> int:
        """Twice how far the file is that a test is named after, one more if it imports it."""
        name, top = Path(test).stem, test.split("/")[1]
        if name.startswith(f"test_{Path(mutated).stem}") and test.startswith(_folder(mutated)):
            return 0
        named = [
            2 * far
            for one, far in near.items()
            if name == f"test_{Path(one).stem}" and top in ("parity", one.split("/")[1])
        ]
        uses = [2 * near[used] + 1 for used in self._uses[test] & near.keys()]
        shared = _words(Path(mutated).stem) & _words(test)
        return min([*named, *uses, _FAR - bool(shared)])

    def steps(self, mutated: str) -> list[Step]:
        """The choice for a mutated file."""
        near, words = self._near(mutated), _words(mutated)
        tests = [path for path in self._uses if not path.startswith(_NEVER)]
        far = {path: self._distance(path, mutated, near) for path in tests}
        tests.sort(key=lambda p: (far[p], -len(words & _words(p)), len(self._uses[p]), p))
        own = [path for path in tests if far[path] < _FAR][:_MOST_FILES]
        folder = _folder(mutated)
        around = "/".join(folder.split("/")[:2])
        others = [path for path in tests if path not in own and path.startswith(f"{around}/")]
        others.sort(key=lambda path: not path.startswith(f"{folder}/"))
        others = others[:_MOST_FILES]
        core = [path for path in CORE if path in self._trees and path not in own + others]
        doctests = [mutated] if ">>> " in (self._root / mutated).read_text() else []
        found = [doctests + own, others, core]
        return [Step(tuple(f), s) for f, s in zip(found, _SHARES, strict=True) if f]

    def killer(self, test: str) -> list[Step]:
        """Where the test of an id is now: at its place, or in files with a function of its name."""
        path = path_of(test)
        name = test.partition("[")[0].rpartition("::")[2]
        if path.startswith(PACKAGE):
            return [Step((path,), 0.5)] if path in self._trees else []
        files = [p for p in self._uses if any(_defines(self._trees[p], name))]
        if path in files:
            return [Step((path,), 0.5, only=name, first=test)]
        if files:
            return [Step(tuple(files), 0.5, only=name)]
        return [Step((path,), 0.5)] if path in self._trees else []


def path_of(test: str) -> str:
    """File of the test of an id."""
    return test.partition("::")[0]


def _folder(mutated: str) -> str:
    """Folder of the tests of a file's folder."""
    return Path("tests", *Path(mutated).parts[1:-1]).as_posix()


def _defines(tree: ast.Module, name: str) -> Iterator[bool]:
    return (isinstance(n, ast.FunctionDef) and n.name == name for n in ast.walk(tree))


def _module(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def _words(path: str) -> set[str]:
    words = re.split(r"[/_]", path.removesuffix(".py"))
    return {word.rstrip("s") for word in words} - {"test", "lightning", "megatron", ""}
