"""What users mistype: each ends with exit code 2 and in a few lines that say what was meant."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch  # noqa: F401  its log handler keeps the stderr that it was imported under
import pytest

from lightning_megatron.cli import main
from lightning_megatron.cli.option_errors import explain

MODULE = """
from lightning.pytorch import LightningModule
class Module(LightningModule):
    def __init__(self, height: int) -> None:
        super().__init__()
        self.example_input_array = 1 / height
"""
STRATEGY = "--trainer.strategy"
COMMANDS = [
    ("", "  doctor "),
    ("trian", "no command `trian`; did you mean `fit`?"),
    ("fti", "did you mean `fit`?"),
    ("frobnicate", "there are fit, validate"),
    ("--config fine.yaml fti", "fti"),
    ("fit --config zzz.yaml", "--config zzz.yaml: there is no such file; `init` lists the recipes"),
    (
        "fit --config pretrain8b",
        "there is no such file; did you mean pretrain-",
    ),
    ("fit --config fine.yml", "did you mean fine.yaml?"),
    ("fit strayword", "strayword"),
    ("fit --trainer.max_steps", "--trainer.max_steps"),
    ("fit --trainer.max_step 3", "did you mean `trainer.max_steps`?"),
    ("fit --trainer.frobnicate 3", "`lightning-megatron fit --help` lists all"),
    ("fit --tp 2", "did you mean `trainer.strategy.tp`?"),
    ("fit --optimizer.lr 2", "did you mean `model.lr`?"),
    ("fit --trainer.max_steps=many", "trainer.max_steps=many: must be a whole number"),
    (f"fit {STRATEGY}.tpp 2", "no option `tpp` of MegatronStrategy"),
    (f"fit {STRATEGY}.tpp 2", "did you mean `tp`?"),
    (f"fit {STRATEGY}.frobnicate 2", "it has tp, pp, cp, ep, zero"),
    (f"fit {STRATEGY}.recompute full", "did you mean `activations.recompute`?"),
    (
        f"fit {STRATEGY}.activations.recompute ful",
        "none, full, selective or adaptive; did you mean full",
    ),
    (f"fit {STRATEGY}.activations full", "activations=full: is a group of options"),
    (f"fit {STRATEGY}.schedule zbv", "did you mean `pp.schedule`?"),
    (f"fit {STRATEGY}.dp_replicate 2", "did you mean `zero.dp_replicate`?"),
    (f"fit {STRATEGY}.pp.schedule zbv", "required: degree"),
    (f"fit {STRATEGY}.pp 2 {STRATEGY}.pp.shedule zbv", "did you mean `schedule`?"),
    (f"fit {STRATEGY}.pp two", "pp=two: must be a whole number or a PipelineConfig"),
    (f"fit {STRATEGY}.cp two", "cp=two: must be a whole number or a ContextConfig"),
    (f"fit {STRATEGY}.cp.kind ring", "required: degree"),
    (f"fit {STRATEGY}.pp.degree two", "pp.degree=two: must be a whole number"),
    (f"fit {STRATEGY}.zero.stage 4", "zero.stage=4: must be 0, 1, 2 or 3"),
    (f"fit {STRATEGY}.zero 4", "zero=4: must be 0, 1, 2 or 3"),
    (f"fit {STRATEGY}.tp two", "tp=two: must be a whole number"),
    (f"fit {STRATEGY}=ddpp", "did you mean 'ddp'?"),
    (f"fit {STRATEGY}=MegatronStrateg", "did you mean 'MegatronStrategy'?"),
    ("fit --trainer.accelerator gpuu", "accelerator='gpuu'"),
    ("fit --trainer.precision fp8", "--trainer.plugins+=Fp8Precision"),
    ("fit --trainer.precision bf16-mixd", "did you mean bf16-mixed?"),
    ("fit --trainer.plugins+=Fp8Precison", "did you mean Fp8Precision?"),
    (
        "fit --trainer.plugins+=Fp8Precision --trainer.plugins.recipe=rowise",
        "did you mean rowwise?",
    ),
    ("fit --trainer.callbacks+=Monitr", "did you mean Monitor?"),
    ("fit --trainer.callbacks+=Monitor --trainer.callbacks.widow=3", "did you mean `window`?"),
    ("fit --model.lr x", "model.lr=x: must be a number"),
    ("fit --model.config.num_head 3", "nearest valid: config.num_heads"),
    ("fit --model.config gpt2-124", "nearest valid: 'gpt2-124m'"),
    ("fit --model wrong_file.Module", "wrong_file.Module: invalid syntax"),
    ("fit --model right_file.Other", "has no attribute 'Other'"),
    ("fit --model right_file.Module", "(right_file.Module): the following arguments are required"),
    ("fit --model right_file.Module --model.hight=1", "did you mean `height`?"),
    ("fit --model NoSuch", "no LightningModule of this package"),
    ("fit --model pathlib.Path", "is no LightningModule"),
    ("fit --model no_such_module.Thing", "there is no module 'no_such_module'"),
]
FILES = [
    ("trainer: {max_step: 3}", "did you mean `trainer.max_steps`?"),
    ("trainr: {max_steps: 3}", "did you mean `trainer.max_steps`?"),
    ("trainer: {max_steps: [3}", "is no YAML"),
    ("trainer: 3", "trainer"),
    ("trainer: {strategy: {init_args: {tpp: 3}}}", "did you mean `tp`?"),
    ("trainer: {strategy: {init_args: {activations: {recompute: ful}}}}", "did you mean full?"),
    ("trainer: {callbacks: [{class_path: Monitr}]}", "did you mean Monitor?"),
    ("model: {class_path: LanguageModel, config: tiny}", "stand under init_args"),
]


def mistaken(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints to stderr, of which there must be little."""
    capsys.readouterr()
    assert main(shlex.split(command)) == 2
    printed = capsys.readouterr().err
    own = printed[printed.find("lightning-megatron: ") :] if command else printed
    assert len(own.splitlines()) <= (6 if command else 30), printed
    assert "Traceback" not in printed
    assert "Given value" not in printed
    return own


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder with modules, in which there are no arguments of pytest's."""
    (tmp_path / "fine.yaml").write_text("seed_everything: 1\n")
    (tmp_path / "wrong_file.py").write_text("x = = 1\n")
    (tmp_path / "right_file.py").write_text(MODULE)
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("right_file", None)


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_a_mistyped_command(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in mistaken(command, capsys)


@pytest.mark.parametrize(("text", "said"), FILES)
def test_a_mistyped_file(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "config.yaml").write_text(text)
    assert said in mistaken(f"fit --config {file}", capsys)


def test_an_error_in_the_constructor_of_a_module_is_the_users_own(
    tmp_path: Path,
) -> None:
    with pytest.raises(ZeroDivisionError) as failure:
        main(["fit", "--model", "right_file.Module", "--model.height=0"])
    assert failure.value.__cause__ is None
    assert failure.traceback[-1].path == tmp_path / "right_file.py"


def test_a_message_of_another_form_is_cut_short() -> None:
    """As a later jsonargparse may have."""
    message = 'Parser key "model":\n' + "\n".join(f"  line {i}" for i in range(20))
    said = explain(message, None, {}, []).splitlines()
    assert said[0] == "model: line 0"
    assert len(said) < 6
