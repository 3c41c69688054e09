"""The source of a checkout, with names followed through imports; nothing of it is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "lightning_megatron"


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes:
        name: dotted, as in imports; that of a folder for its ``__init__``.
        path: path below the package, without suffix.
        text: content.
    """

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def classes(self) -> list[ast.ClassDef]:
        """Definitions of classes, at any depth."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def bound(self) -> dict[str, str]:
        """Full names of what imports bind, by the name that the file uses."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{base}.{alias.name}"
        return found

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = [PACKAGE, *self.path.split("/")][: -node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    @cached_property
    def imports(self) -> set[str]:
        """Dotted names that the file imports, those of modules and those in them."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        return found


class Source:
    """The package in a checkout.

    Args:
        root: folder of the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for file in sorted((root / PACKAGE).rglob("*.py")):
            path = file.relative_to(root / PACKAGE).with_suffix("").as_posix()
            parts = [PACKAGE, *path.split("/")]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path, file.read_text("utf-8"))

    def full_name(self, module: Module, expression: ast.expr) -> str:
        """Name of what an expression means: where it is defined, through all re-exports."""
        if isinstance(expression, ast.Subscript):  # of a generic class
            expression = expression.value
        name = ast.unparse(expression)
        first, dot, rest = name.partition(".")
        if first in module.bound:
            name = module.bound[first] + dot + rest
        elif isinstance(expression, ast.Name):
            return f"{module.name}.{name}"
        return self._origin(name, seen=frozenset())

    def _origin(self, name: str, seen: frozenset[str]) -> str:
        holder, _, last = name.rpartition(".")
        module = self.modules.get(holder)
        if module is None or name in seen or last not in module.bound:
            return name
        return self._origin(module.bound[last], seen | {name})

    @cached_property
    def bases(self) -> dict[str, list[str]]:
        """Full names of the bases of every class of the package, by its own."""
        return {
            f"{module.name}.{node.name}": [self.full_name(module, base) for base in node.bases]
            for module in self.modules.values()
            for node in module.classes
        }

    def subclasses(self, *bases: str) -> list[str]:
        """Full names of the classes of the package that inherit from one of ``bases``."""
        return [name for name in self.bases if name not in bases and self._inherits(name, bases)]

    def _inherits(self, name: str, bases: tuple[str, ...]) -> bool:
        above = [base for base in self.bases.get(name, ()) if base != name]
        return any(base in bases or self._inherits(base, bases) for base in above)

    def short(self, full_name: str) -> str:
        """``Class (folder/file)`` for the full name of something in the package."""
        holder, _, last = full_name.rpartition(".")
        module = self.modules.get(holder)
        return f"{last} ({module.path})" if module is not None else full_name

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())
