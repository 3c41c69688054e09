"""Projects that import the package `pytorch_lightning`: a line, or the command."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron import ConfigError, MegatronStrategy
from lightning_megatron.cli import main

PROJECT = """
import torch
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel, BoringDataModule
from pytorch_lightning.strategies import DDPStrategy


class Net(BoringModel):
    trained = []

    def on_train_end(self):
        assert isinstance(self.trainer.strategy, DDPStrategy)
        self.trained.append(self.trainer.global_step)


class Data(BoringDataModule):
    pass


def train(strategy):
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), datamodule=Data())
    return trainer
"""
LINE = "lightning_megatron.pytorch_lightning"
OF_A_PROJECT = ("pytorch_lightning", "lightning_fabric", "project_of_a_user", LINE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a project, in a process that has imported neither it nor `pytorch_lightning`."""

    def forget() -> None:
        for name in list(sys.modules):
            if name in OF_A_PROJECT or name.partition(".")[0] in OF_A_PROJECT[:3]:
                del sys.modules[name]

    (tmp_path / "project_of_a_user.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sys.meta_path[:]
    forget()
    yield "project_of_a_user"
    sys.meta_path[:] = before
    forget()


def test_a_line_before_the_project(project: str) -> None:
    import_module(LINE)
    trainer: Any = import_module(project).train("megatron_zero_2")
    assert isinstance(trainer, pl.Trainer)
    assert isinstance(trainer.strategy, MegatronStrategy)
    assert import_module(project).Net.trained == [2]


@pytest.mark.usefixtures("project")
def test_the_line_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.raises(ConfigError, match="been imported before.* as the first line of the script"):
        import_module(LINE)
    assert "import lightning_megatron.pytorch_lightning" in repr(MegatronStrategy())


def test_the_command_needs_no_line(project: str) -> None:
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=2"]
    options += ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    options += ["--trainer.limit_val_batches=0", "--trainer.strategy=megatron_zero_0"]
    options += ["--trainer.enable_progress_bar=false", f"--data={project}.Data"]
    assert main(["fit", f"--model={project}.Net", *options]) == 0
    assert import_module(project).Net.trained == [2]
