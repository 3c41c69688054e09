"""Every name of `_lightning` has a test here, which tells when Lightning changes what it needs."""

import ast
from pathlib import Path

import pytest

import lightning_megatron._lightning as ours

HERE = Path(__file__).parent
PACKAGE = "lightning_megatron._lightning."


def _taken() -> set[str]:
    """Names that files of the package import from `_lightning`."""
    found: set[str] = set()
    for path in Path(ours.__path__[0]).parent.rglob("*.py"):
        if path.parent == Path(ours.__path__[0]):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                found |= {alias.name for alias in node.names}
    return found


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """Names that are imported from `_lightning` and used."""
    used: set[str] = set()
    for path in HERE.glob("test_*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used


@pytest.mark.parametrize("name", sorted(_taken()))
def test_is_tested(name: str, tested: set[str]) -> None:
    assert name in tested
