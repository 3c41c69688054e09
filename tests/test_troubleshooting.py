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
    texts, of_the_package = quoted(), said()
    assert len(texts) > 40
    # What "..." stands for is within one string.
    parts = {text: text.split("...") for text in texts}
    missing = [t for t in texts if not any(in_order(parts[t], one) for one in of_the_package)]
    assert missing == []


def in_order(parts: list[str], text: str) -> bool:
    """Whether a text has all parts, one after the other."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
