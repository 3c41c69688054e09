"""docs/troubleshooting.md quotes texts that the package really says."""

import ast
import re
from pathlib import Path

from tests.test_layering import package_files

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()


def quoted() -> list[str]:
    """First cells of the tables of errors."""
    tables = PAGE.partition("## Errors by text")[2]
    return re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)


def said() -> set[str]:
    """All strings in the package's code, with a NUL for each value, but for whole pages."""
    found = set()
    for file in package_files().values():
        for node in file.nodes:
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[a-z]", "\0", node.value))
    return {text for text in found if len(text) < 2000}


def test_the_package_says_it() -> None:
    texts, of_the_package = quoted(), "\1".join(said())
    assert len(texts) > 40
    # What "..." stands for is within one string.
    patterns = {text: "[^\1]*?".join(map(re.escape, text.split("..."))) for text in texts}
    assert [text for text in texts if not re.search(patterns[text], of_the_package)] == []
