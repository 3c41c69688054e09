"""How the strategy class is cut: each hook once, and few names beside those of Lightning."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.house.mechanisms import Figure
from benchmarks.house.source import Source

STRATEGY = "MegatronStrategy"
_UNTYPED = re.compile(r"\bstrategy: Any\b|: Any = (self\.)?_?trainer\.strategy\b")


class Class:
    """A class in the source.

    Args:
        node: its definition.

    Attributes:
        bases: last names of its bases.
        methods: names of what is defined in its body by ``def``.
        declared: names of attributes that its body or its methods declare or set.
    """

    def __init__(self, node: ast.ClassDef) -> None:
        self.name = node.name
        self.bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        self.methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        self.declared: set[str] = set()
        for child in node.body:
            if isinstance(child, ast.AnnAssign | ast.Assign):
                self.declared |= {t.id for t in _targets(child) if isinstance(t, ast.Name)}
        for child in ast.walk(node):
            if isinstance(child, ast.AnnAssign | ast.Assign | ast.AugAssign):
                self.declared |= {t.attr for t in _targets(child) if _is_of_self(t)}


def _targets(node: ast.AnnAssign | ast.Assign | ast.AugAssign) -> Iterator[ast.expr]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _is_of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"


def lineage(name: str, classes: dict[str, ast.ClassDef]) -> list[Class]:
    """A class and those that it inherits from, as far as they are in ``classes``."""
    if name not in classes:
        return []
    found = [Class(classes[name])]
    for base in found[0].bases:
        known = {one.name for one in found}
        found += [one for one in lineage(base, classes) if one.name not in known]
    return found


def _lightnings() -> list[Class]:
    spec = find_spec("lightning")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "pytorch" / "strategies"
    trees = [ast.parse((folder / name).read_text()) for name in ("parallel.py", "strategy.py")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return lineage("ParallelStrategy", {n.name: n for n in nodes if isinstance(n, ast.ClassDef)})


def strategy_figures(source: Source) -> list[Figure]:
    """The figures of this file."""
    ours = lineage(STRATEGY, {node.name: node for module in source for node in module.classes})
    theirs = _lightnings()
    hooks = set[str]().union(*(one.methods for one in theirs)) - {"__init__"}
    inherited = hooks.union(*(one.declared for one in theirs))
    defined = Counter(name for one in ours for name in one.methods if name in hooks)
    names = set[str]().union(*(one.methods | one.declared for one in ours))
    own = sorted(name for name in names - inherited if not name.startswith("_"))
    untyped = tuple(
        module.path
        for module in source
        if not module.path.startswith("strategy/")
        for _ in _UNTYPED.findall(module.text)
    )
    return [
        Figure("hooks of Lightning on the strategy", tuple(sorted(defined))),
        Figure("of these in several classes", tuple(n for n, c in defined.items() if c > 1)),
        Figure("public names on it beside Lightning's", tuple(own)),
        Figure("`Any` where callbacks reach the strategy", untyped),
    ]
