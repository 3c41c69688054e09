"""docs/troubleshooting.md quotes texts that the package really says."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_layering import FILES

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()


def quoted() -> list[str]:
    """First cells of the tables of errors."""
    tables = PAGE.partition("## Errors by text")[2]
    return re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)


def said() -> list[str]:
    """All strings in the package's code, with a NUL for each value."""
    found = []
    for file in FILES.values():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[a-z]", "\0", node.value))
    return found


SAID = said()


@pytest.mark.parametrize("text", quoted())
def test_the_package_says_it(text: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, text.split("..."))), re.DOTALL)
    assert any(pattern.search(one) for one in SAID if len(one) < 2000)


def test_there_are_texts() -> None:
    assert len(quoted()) > 40
