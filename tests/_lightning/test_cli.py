"""LightningCLI calls what `_lightning.cli` overrides."""

import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from typing_extensions import override

from lightning_megatron._lightning.cli import BaseCLI


class Sized(BoringModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width


class Ours(BaseCLI):
    read = 0

    @override
    def read_checkpoint_path(self) -> None:
        self.read += 1
        super().read_checkpoint_path()


def test_base_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py"])
    file = tmp_path / "a.ckpt"
    torch.save({"hyper_parameters": {"width": 5}}, file)
    options = ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", f"--ckpt_path={file}"]
    silent = ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    cli = Running(Sized, BoringDataModule, args=["fit", *options, *silent])
    assert cli.read == 1
    assert cli.model.width == 5, "read_checkpoint_path reads hyper-parameters"
    assert isinstance(cli.parser_of("fit"), LightningArgumentParser)
    assert cli.option("trainer.accelerator") == "cpu"


class Running(Ours):
    """Instantiates everything, and does not run."""

    @override
    def _run_subcommand(self, subcommand: str) -> None: ...
