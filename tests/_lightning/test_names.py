"""Every name of `_lightning` has a test here, which tells when Lightning changes what it needs."""

import ast
from pathlib import Path

import pytest

import lightning_megatron._lightning as ours

HERE = Path(__file__).parent
NAMES = [name for name in vars(ours) if not name.startswith("_")]
MODULES = {path.stem for path in Path(ours.__path__[0]).glob("*.py")}


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """Names that are imported from `_lightning` and used."""
    used: set[str] = set()
    for path in HERE.glob("test_*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MODULES])
def test_is_tested(name: str, tested: set[str]) -> None:
    assert name in tested
