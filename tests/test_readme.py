"""What README.md and the recipes claim, executed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT = [
    *["--trainer.max_steps=4", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"],
    "--data.max_bytes=400000",
]


def start(command: list[str], folder: Path, timeout: float = 200) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_python_example_trains(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(readme_example())
    output = start([sys.executable, str(script)], tmp_path)
    loss = re.search(r"final loss ([\d.]+)", output)
    assert loss is not None
    assert float(loss[1]) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_quickstart_trains_and_its_last_line_resumes_under_another_layout(tmp_path: Path) -> None:
    """Once through the console script, once through `python -m`: both must relaunch themselves."""
    script = Path(sys.executable).with_name("lightning-megatron")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    recipe = ["fit", "--config", "recipes/quickstart.yaml"]
    printed = start([str(script), *recipe, *SHORT], tmp_path)
    assert "Trained to step 4." in printed
    log_dir = Path(re.search(r"log +(\S+)", printed)[1])  # type: ignore[index]
    assert list((tmp_path / log_dir).glob("events.out.tfevents*"))
    command = printed.strip().splitlines()[-1].split()
    assert command[:1] == ["lightning-megatron"]
    assert "--trainer.strategy.pp" in command
    resumed = start([sys.executable, "-m", "lightning_megatron", *command[1:]], tmp_path)
    assert "Trained to step 8." in resumed


def test_options_table_is_the_strategys_signature() -> None:
    import inspect

    from lightning_megatron import MegatronStrategy

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


def test_versions_agree() -> None:
    import lightning_megatron

    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{lightning_megatron.__version__}"' in project
