"""A user's own command line, given a checkpoint directory."""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.cli.checkpoint_cli import CheckpointCLI


class Sized(LightningModule):
    def __init__(self, width: int = 2, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, width)


class Parsed(CheckpointCLI):
    """Builds the module and does not run it."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def test_hyper_parameters_of_the_checkpoint_are_those_of_the_module(tmp_path: Path) -> None:
    module = Sized(width=5)
    state = {"hyper_parameters": {**module.hparams, "_instantiator": "x"}}
    save_directory(tmp_path / "a.ckpt", model_chunks(module), state)
    arguments = ["fit", "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    widths = [
        Parsed(Sized, args=[*arguments, f"--ckpt_path={tmp_path / name}"]).model.net.in_features
        for name in ("a.ckpt", "none.ckpt")
    ]
    assert widths == [5, 2]
