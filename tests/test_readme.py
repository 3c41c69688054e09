"""What README.md and the options page say, held against the package.

`tests/launched` runs the README's commands and its program.
"""

import inspect
import re
from pathlib import Path

import lightning_megatron
from lightning_megatron import MegatronStrategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_options_table_is_the_strategys_signature() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    table = page.split("## MegatronStrategy")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE)
    documented = {name: value for cell, value in rows for name in re.findall(r"`(\w+)`", cell)}
    parameters = inspect.signature(MegatronStrategy).parameters.values()
    assert list(documented) == [p.name for p in parameters]
    for parameter in parameters:
        default = parameter.default
        plain = isinstance(default, int | str | None)
        expected = str(default) if plain else f"{type(default).__name__}()"
        assert documented[parameter.name] == expected


def test_readme_is_one_page() -> None:
    assert len(README.encode()) <= 9000


def test_getting_started_has_the_readmes_program() -> None:
    """The latter is run by `tests/launched`."""
    [program, _] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert f"```python\n{program}```" in (ROOT / "docs" / "getting-started.md").read_text()


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{lightning_megatron.__version__}"' in project
