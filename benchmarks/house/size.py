"""Lines by folder, small files, who imports whom, and rows of the table of layers."""

import ast
import io
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.house.mechanisms import Figure
from benchmarks.house.source import PACKAGE, Source

SMALL = 60
"""Lines below which a file is counted as small."""


@dataclass
class Lines:
    """Lines of a file or of several.

    Attributes:
        files: number of files.
        code: lines that are neither empty, nor comment, nor docstring.
        docstring: lines of docstrings.
        other: empty lines and comments.
    """

    files: int = 0
    code: int = 0
    docstring: int = 0
    other: int = 0

    @property
    def all(self) -> int:
        """Lines of all kinds."""
        return self.code + self.docstring + self.other

    def __iadd__(self, more: "Lines") -> "Lines":
        self.files += more.files
        self.code += more.code
        self.docstring += more.docstring
        self.other += more.other
        return self


def count_lines(text: str) -> Lines:
    """Lines of a file by kind.

    A docstring is a string that is a statement of its own, also one below an attribute.
    """
    code: set[int] = set()
    docstring: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    begins = True  # of a statement
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped or token.type == tokenize.ENDMARKER:
            begins |= token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        lines = range(token.start[0], token.end[0] + 1)
        (docstring if begins and token.type == tokenize.STRING else code).update(lines)
        begins = False
    docstring -= code
    total = len(text.splitlines())
    return Lines(1, len(code), len(docstring), total - len(code) - len(docstring))


def lines_by_folder(source: Source) -> dict[str, Lines]:
    """Lines of the package by its first folders, the largest first; ``.`` for its top level."""
    found: dict[str, Lines] = defaultdict(Lines)
    for module in source:
        folder, slash, _ = module.path.partition("/")
        found[folder if slash else "."] += count_lines(module.text)
    return dict(sorted(found.items(), key=lambda item: -item[1].all))


def lines_of_tests(root: Path) -> Lines:
    """Lines below ``tests/``."""
    found = Lines()
    for file in (root / "tests").rglob("*.py"):
        found += count_lines(file.read_text("utf-8"))
    return found


def single_importer(source: Source) -> tuple[str, ...]:
    """Modules that one other module of the package imports; the ``__init__`` count as importers."""
    names = {module.name for module in source if not module.path.endswith(("__init__", "__main__"))}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in source:
        for name in module.imports & names:
            importers[name].add(module.name)
    return tuple(source.modules[name].path for name in sorted(names) if len(importers[name]) == 1)


def layer_rows(root: Path) -> tuple[str, ...]:
    """Rows of ``LAYERS`` in ``tests/test_layering.py`` for one file of a folder."""
    table = root / "tests" / "test_layering.py"
    if not table.exists():
        return ()
    for node in ast.parse(table.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            rows = ast.literal_eval(node.value)
            return tuple(r for r in rows if "/" in r and (root / PACKAGE / f"{r}.py").exists())
    return ()


def sizes(source: Source) -> list[Figure]:
    """The figures of this file."""
    total, tests = Lines(), lines_of_tests(source.root)
    for lines in lines_by_folder(source).values():
        total += lines
    modules = [module for module in source if not module.path.endswith(("__init__", "__main__"))]
    small = tuple(m.path for m in modules if count_lines(m.text).all < SMALL)
    single = single_importer(source)
    return [
        Figure("files", number=total.files),
        Figure("lines", number=total.all),
        Figure("lines of code", number=total.code),
        Figure("lines of docstrings", number=total.docstring),
        Figure("lines of tests", number=tests.all),
        Figure(f"modules under {SMALL} lines", small),
        Figure("modules with a single importer", single),
        Figure("their share", number=round(100 * len(single) / len(modules), 1), unit=" %"),
        Figure("rows of the layer table for one file", layer_rows(source.root)),
    ]
