"""What README.md says, held against the package; `tests/launched` runs its commands."""

import ast
import inspect
import re
from pathlib import Path

import lightning_megatron
from lightning_megatron import MegatronStrategy

ROOT = Path(__file__).parents[1]


def test_options_table_is_the_strategys_signature() -> None:
    table = (ROOT / "README.md").read_text().split("## Options")[1].split("\n\nA Lightning")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE)
    documented = {name: value for cell, value in rows for name in re.findall(r"`(\w+)`", cell)}
    parameters = inspect.signature(MegatronStrategy).parameters.values()
    assert list(documented) == [p.name for p in parameters]
    for parameter in parameters:
        default = parameter.default
        plain = isinstance(default, int | str | None)
        expected = str(default) if plain else f"{type(default).__name__}()"
        assert documented[parameter.name].strip('"') == expected


def test_names_in_python_examples_exist() -> None:
    """Of those that are no programs, which `tests/launched` runs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for block in blocks:
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(block))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if "__main__" not in block:
            assert calls
            assert calls <= set(lightning_megatron.__all__), block


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{lightning_megatron.__version__}"' in project
