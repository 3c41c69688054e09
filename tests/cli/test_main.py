"""The command itself, in this process; `test_quickstart` starts it as a user does."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Union, get_args

import lightning.pytorch  # its log handler keeps the stderr that it was imported under
import pytest
import torch
import yaml

from lightning_megatron.cli import _COMMANDS, _TRAINER_COMMANDS, error_in, main
from lightning_megatron.cli.train import NUMBERS
from lightning_megatron.errors import ConfigError
from tests.cli.tiny import TINY

ROOT = Path(__file__).parents[2]


def test_fit_then_the_other_subcommands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    place = f"--trainer.default_root_dir={tmp_path}"
    assert main(["fit", *TINY, place]) == 0
    printed = capsys.readouterr().out
    assert "Trained to step 2." in printed
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    assert str(checkpoint) in printed
    options = [place, f"--ckpt_path={checkpoint}"]
    assert main(["fit", *TINY, *options]) == 0  # where it has already ended
    printed = capsys.readouterr().out
    assert "Trained nothing: the run is at step 2, and trainer.max_steps=2" in printed
    assert "Go on" not in printed
    assert main(["validate", *TINY, place, f"--ckpt_path={checkpoint}"]) == 0
    assert "val_perplexity" in capsys.readouterr().out
    assert main(["test", *TINY, place, "--trainer.limit_test_batches=1"]) == 0
    assert "test_perplexity" in capsys.readouterr().out
    # Hyper-parameters in a file of plain Lightning are not those of this command's model.
    file = tmp_path / "plain.ckpt"
    torch.save({"hyper_parameters": {"unknown": 1}, "state_dict": {}}, file)
    assert main(["validate", *TINY, place, f"--ckpt_path={file}"]) == 2
    printed = capsys.readouterr().err
    assert "12 names of the module are not in the checkpoint" in printed
    assert "unknown" not in printed


def test_the_module_of_the_current_folder_under_our_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m` finds it, and not DDP, where nobody names a strategy."""
    (tmp_path / "own_file.py").write_text(
        "from lightning.pytorch import LightningModule\nclass Own(LightningModule): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    # As a console script has it, and put back afterwards.
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    with pytest.raises(SystemExit) as end:
        main(["fit", "--model", "own_file.Own", "--print_config"])
    assert end.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"] == "own_file.Own"
    assert config["trainer"]["strategy"]["class_path"].endswith(".MegatronStrategy")
    for recipe in (["--config", "quickstart"], ["--config=quickstart"]):
        with pytest.raises(SystemExit):
            main(["fit", *recipe, "--print_config"])
        config = yaml.safe_load(capsys.readouterr().out)
        assert config["trainer"]["strategy"]["init_args"]["pp"] == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.lr=-1", "lr=-1.0: must be positive"),
        ("--model.config.num_heads=5", "num_heads=5"),
        ("--data.files=[/nowhere/*.txt]", "no such file"),
    ],
)
def test_a_mistake_exits_with_2_and_its_message_alone(
    tmp_path: Path,
    option: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    assert main(["fit", *TINY, f"--trainer.default_root_dir={tmp_path}", option]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert "Traceback" not in written


def test_without_tensorboard_metrics_go_to_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an installation without extras; the recipes name TensorBoardLogger."""
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    monkeypatch.setattr("lightning_megatron.cli.train.find_spec", lambda name: None)
    logger = [
        "--trainer.logger=TensorBoardLogger",
        *(f"--trainer.logger.save_dir={tmp_path}", "--trainer.logger.name=run"),
    ]
    options = [option for option in TINY if option != "--trainer.logger=false"]
    with pytest.warns(UserWarning, match="metrics go to metrics.csv"):
        assert main(["fit", *options, *logger, "--trainer.log_every_n_steps=1"]) == 0
    assert f"log         {tmp_path}/run/version_0" in capsys.readouterr().out
    assert "train_loss" in (tmp_path / "run" / "version_0" / "metrics.csv").read_text()


def test_one_batch_is_not_all_batches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order typing has given the types of the Trainer's option."""
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    annotations = lightning.pytorch.Trainer.__init__.__annotations__
    names = ("limit_val_batches", "limit_train_batches", "overfit_batches")
    for name in names:
        others = [kind for kind in get_args(annotations[name]) if kind not in (int, float)]
        monkeypatch.setitem(annotations, name, Union[(float, int, *others)])
    with pytest.raises(SystemExit):
        main(["fit", *(f"--trainer.{name}=1" for name in names), "--print_config"])
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert [type(trainer[name]) for name in names] == [int] * 3
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.limit_val_batches=0.5", "--print_config"])
    assert "limit_val_batches: 0.5" in capsys.readouterr().out


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**kwargs: object) -> None:
        raise ValueError("something else")

    monkeypatch.setattr("lightning_megatron.cli.train.MegatronCLI", fail)
    with pytest.raises(ValueError, match="something else"):
        main(["fit"])


def test_the_mistake_is_found_below_wrappers() -> None:
    inner = ConfigError("x=1: wrong")
    middle, outer = ValueError("middle"), ValueError("outer")
    middle.__cause__, outer.__cause__ = inner, middle
    assert error_in(outer) is inner
    assert error_in(middle) is inner
    assert error_in(ValueError("alone")) is None


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "lightning_megatron", "schedule"]
    command += ["--pp", "2", "--microbatches", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_help_lists_every_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage: lightning-megatron COMMAND" in printed
    for name in [*_TRAINER_COMMANDS, *_COMMANDS]:
        assert re.search(rf"^  {name} +\w+.* ", printed, re.MULTILINE)


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    # Wheels of PyPI do not name their CUDA.
    release = re.escape(torch.__version__.partition("+")[0])
    said = rf"lightning-megatron \d\S+, torch {release}\S*, lightning 2\.\S+, Py"
    assert re.match(said, capsys.readouterr().out)


def test_help_of_the_strategy_explains_nested_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    with pytest.raises(SystemExit) as end:
        main(["fit", "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: lightning-megatron fit [options]\n")
    printed = re.sub(r"\s+", " ", printed)
    [[*options]] = re.findall(
        r"`lightning-megatron fit (--trainer\.strategy\.help) (\w+)`", printed
    )
    with pytest.raises(SystemExit) as end:
        main(["fit", *options])
    assert end.value.code == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    nested = r"--trainer\.strategy\.\w+\.\w+ \S+ "
    assert len(re.findall(nested, printed)) > 40
    assert re.findall(nested + r"\(type", printed) == []  # each has a text before its type
    [*axes] = re.findall(r"--trainer\.strategy\.(\w+)\.help ", printed)
    assert axes == ["pp", "cp", "ep", "zero", "batch_shares"]
    helps = {}
    for axis in axes:
        with pytest.raises(SystemExit) as end:
            main(["fit", f"--trainer.strategy.{axis}.help"])
        assert end.value.code == 0
        helps[axis] = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert f"--trainer.strategy.{axis}.{NUMBERS.get(axis, 'every')} " in helps[axis]
        assert re.findall(nested + r"\(type", helps[axis]) == []
    assert "copies of the shards (hybrid sharding)" in helps["zero"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("doctor", "BAD      versions: not looked at: No module named 'packaging'"),
        ("doctor", "BAD      devices: torch cannot be imported: No module named 'torch'"),
        ("fit", "lightning-megatron: lightning is not installed; `lightning-megatron doctor`"),
        ("generate none --prompt a", "lightning-megatron: torch is not installed"),
    ],
)
def test_an_environment_without_torch(command: str, said: str) -> None:
    bare = [sys.executable, "-S", "-m", "lightning_megatron", *command.split()]
    done = subprocess.run(
        bare,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
