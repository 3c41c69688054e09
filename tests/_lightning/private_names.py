"""Which private names Lightning has, and where a file of ours uses one; read from the sources.

Nothing tells whose attribute ``thing._name`` is. So every private name that Lightning or
torchmetrics gives an attribute, a method or a function counts, on whatever object; but on ``self``,
only where a base of the class has it.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

FOREIGN = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
LOOKED_UP = (*FOREIGN, "torch", "torchmetrics")
"""Packages in which the bases of our classes are looked up."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a class, or the whole of a file, gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                targets = one.targets if isinstance(one, ast.Assign) else []
                targets += [one.target] if isinstance(one, ast.AnnAssign) else []
                yield from (target.id for target in targets if isinstance(target, ast.Name))


@cache
def names_of_lightning() -> frozenset[str]:
    """Those of Lightning and of torchmetrics' ``Metric``, but those that torch has, too."""
    files = [*_folder("lightning").glob("pytorch/**/*.py")]
    files += [*_folder("lightning").glob("fabric/**/*.py"), _folder("torchmetrics") / "metric.py"]
    found = {name for file in files for name in own_names(ast.parse(file.read_text("utf-8")))}
    return frozenset(filter(is_private, found - set(dir(nn.Module())) - set(dir(Tensor))))


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


# On other objects ---------------------------------------------------------------------------------


def private_uses(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines where something private of Lightning's is imported, or used on another object."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, f"imports {name}") for name in _private_imports(node))
        elif isinstance(node, ast.Attribute | ast.Call | ast.Subscript) and _is_private_use(node):
            yield node.lineno, f"uses {ast.unparse(node)}"


def _private_imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for name in (module + alias.name for alias in node.names):
        if _top(name) in FOREIGN and any(map(is_private, name.split("."))):
            yield name


def _is_private_use(node: ast.Attribute | ast.Call | ast.Subscript) -> bool:
    names = names_of_lightning()
    if isinstance(node, ast.Attribute):
        return node.attr in names and not _is_self(node.value)
    if isinstance(node, ast.Call):
        given = (one.value for one in node.args if isinstance(one, ast.Constant))
        return any(value in names for value in given) and _is_by_name(node.func)
    if not (isinstance(node.slice, ast.Constant) and node.slice.value in names):
        return False
    held = ast.unparse(node.value)
    return "vars(" in held or "__dict__" in held


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_self(value: ast.expr) -> bool:
    return ast.unparse(value) in ("self", "cls", "super()")


def _is_by_name(function: ast.expr) -> bool:
    """Whether it takes the name of an attribute: ``getattr(x, "_y")``, ``vars(x).pop("_y")``."""
    called = ast.unparse(function)
    by_name = called in ("getattr", "setattr", "hasattr", "delattr")
    return by_name or "vars(" in called or "__dict__" in called


# On ``self`` --------------------------------------------------------------------------------------


class Bases:
    """Finds what classes of the package inherit from others.

    Args:
        package: its name.
        files: all nodes of each of its files, by their paths without suffix.
    """

    def __init__(self, package: str, files: Mapping[str, Sequence[ast.AST]]) -> None:
        self._package, self._files = package, files
        self._classes, self._imports = cache(self._classes_of), cache(self._imports_of)

    def inherited_uses(self, path: str) -> Iterator[tuple[int, str]]:
        """Lines of a file where a class uses, sets or overrides a private name of a base."""
        for node in self._files[path]:
            if isinstance(node, ast.ClassDef):
                names = self.private_members(path, node)
                yield from _uses_in_class(node, names)

    def private_members(self, path: str, node: ast.ClassDef) -> dict[str, str]:
        """Private names that bases of a class have, and whose they are."""
        members: dict[str, str] = {}
        for base in node.bases:
            for found in self._resolve(path, base):
                if isinstance(found, type):
                    members |= private_members_of(found)
                else:
                    members |= self.private_members(*found)
        return members

    def _resolve(self, path: str, base: ast.expr) -> Iterator[Any]:
        """A class of another package, or path and syntax tree of one of ours; maybe neither."""
        while isinstance(base, ast.Subscript):
            base = base.value
        first, _, rest = ast.unparse(base).partition(".")
        here = self._classes(path).get(first)
        if here is not None and not rest:
            yield path, here
            return
        imported = self._imports(path).get(first)
        if imported is not None:
            yield from self._look_up(f"{imported}.{rest}" if rest else imported)

    def _look_up(self, dotted: str) -> Iterator[Any]:
        module, _, name = dotted.rpartition(".")
        if _top(dotted) == self._package:
            inside = "/".join(module.split(".")[1:])
            for path in (inside, f"{inside}/__init__".lstrip("/")):
                if path in self._files:
                    yield from self._resolve(path, ast.Name(name))
                    return
        elif _top(dotted) in LOOKED_UP:
            found = getattr(import_module(module), name)
            if isinstance(found, type):
                yield found

    def _classes_of(self, path: str) -> dict[str, ast.ClassDef]:
        """Classes by their names, of several with one name the first."""
        classes = [node for node in self._files[path] if isinstance(node, ast.ClassDef)]
        return {node.name: node for node in reversed(classes)}

    def _imports_of(self, path: str) -> dict[str, str]:
        names = {}
        for node in self._files[path]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or _top(alias.name)
                    names[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return names


@cache
def private_members_of(kind: type) -> dict[str, str]:
    """Private names of a class and its bases: those of Lightning, and private ones of torch.

    Public classes of torch do not count: to derive from ``nn.Module`` is to know it.
    """
    members = {}
    for one in reversed(kind.__mro__):
        top = _top(one.__module__)
        torchs = top == "torch" and one.__module__ != "torch._C" and is_private(one.__name__)
        if top in (*FOREIGN, "torchmetrics") or torchs:
            tree = ast.parse(_dedented(inspect.getsource(one)))
            members |= {name: one.__name__ for name in own_names(tree) if is_private(name)}
            members.pop(one.__name__, None)
    return {name: owner for name, owner in members.items() if not hasattr(nn.Module, name)}


def _dedented(text: str) -> str:
    return inspect.cleandoc("\n" + text) if text[0].isspace() else text


def _uses_in_class(node: ast.ClassDef, members: dict[str, str]) -> Iterator[tuple[int, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in members and _is_self(part.value):
            used = ast.unparse(part)
            yield part.lineno, f"uses {used} of {members[part.attr]} in {node.name}"
    for name, line in _defined(node.body):
        if name in members:
            yield line, f"defines {node.name}.{name}, which {members[name]} has"


def _defined(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    for one in body:
        if isinstance(one, ast.FunctionDef):
            yield one.name, one.lineno
        elif isinstance(one, ast.Assign):
            yield from ((t.id, one.lineno) for t in one.targets if isinstance(t, ast.Name))
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, one.lineno
