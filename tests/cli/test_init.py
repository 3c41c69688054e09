"""`lightning-megatron init`."""

import shlex
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli import main
from lightning_megatron.cli.init import RECIPES, commands_of, files_of, recipe_names
from lightning_megatron.cli.train import _with_recipes


def test_without_a_name_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  quickstart  ")
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(recipe_names())
    assert all(len(line) < 120 for line in lines)


def test_a_recipe_is_written_with_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "diffusion"]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["denoiser.py", "diffusion.yaml"]
    assert "\n  lightning-megatron fit --config diffusion.yaml\n" in printed
    assert main(["init", "fault-tolerant", "--folder", "run"]) == 0
    assert sorted(path.suffix for path in (tmp_path / "run").iterdir()) == [".sbatch", ".yaml"]
    assert "in that folder" in capsys.readouterr().out
    assert main(["init", "tokens", "--folder", "text"]) == 0
    assert (tmp_path / "text" / "tokens_corpus.py").exists()  # which a command runs


def test_nothing_is_overwritten_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("denoiser.py").write_text("mine")
    assert main(["init", "diffusion"]) == 2
    assert "denoiser.py exists; nearest valid: another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["denoiser.py"]
    assert main(["init", "diffusion", "--force"]) == 0
    assert Path("denoiser.py").read_text() != "mine"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("pretrain8b", "did you mean pretrain-8b or "),
        ("zzz", "there are quickstart, diffusion"),
    ],
)
def test_an_unknown_name_is_told_its_neighbours(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", name]) == 2
    told = capsys.readouterr().err
    assert f"no recipe '{name}'; {hint}" in told


@pytest.mark.parametrize("name", recipe_names())
def test_the_printed_commands_name_files_that_are_written(name: str) -> None:
    written = {path.name for path in files_of(f"{name}.yaml")}
    commands = [shlex.split(command) for command in commands_of(name)]
    assert any(f"{name}.yaml" in command for command in commands)
    programs = {"lightning-megatron", "torchrun", "sbatch", "hf", "python"}
    assert {command[0] for command in commands} <= programs
    named = {word for command in commands for word in command if word.endswith((".sbatch", ".py"))}
    assert named <= written


def test_a_config_is_looked_for_here_and_then_among_the_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    package = str(RECIPES / "quickstart.yaml")
    assert _with_recipes(["--config", "quickstart"]) == ["--config", package]
    assert _with_recipes(["-c=quickstart.yaml"]) == [f"-c={package}"]
    assert str(RECIPES) in sys.path  # so that modules beside a recipe are found
    Path("quickstart.yaml").write_text("")
    assert _with_recipes(["--config=quickstart"]) == ["--config=quickstart.yaml"]
    assert _with_recipes(["--config", "nowhere"]) == ["--config", "nowhere"]
