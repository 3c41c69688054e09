"""What is said of a checkpoint that does not fit, and what is left out of one on request."""

import logging
import resource
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.strategy.small import WIDTH, Small, loader, make_trainer


class Net(Small):
    def __init__(self, hidden: int = WIDTH, layers: int = 4, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    nn.Sequential(nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH))
                    for _ in range(layers)
                ),
                "head": nn.Linear(WIDTH, WIDTH),
            }
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch[0]
        for layer in self.net["layers"]:
            x = x + layer(x)
        return (self.net["head"](x) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.hparams["optimizer"])(self.parameters(), lr=0.01)


def fit(module: pl.LightningModule, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    checkpoint = options.pop("checkpoint", CheckpointConfig())
    trainer = make_trainer({"checkpoint": checkpoint}, **options)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def resuming_job(folder: str) -> dict[str, Any]:
    """What is said of a checkpoint by modules that it does not fit."""
    path = f"{folder}/a.ckpt"
    saved = Net()
    fit(saved, max_steps=2).save_checkpoint(path)

    def error(module: Any, ckpt_path: Any = path, **options: Any) -> Any:
        try:
            fit(module, ckpt_path, max_steps=3, **options)
        except (CheckpointError, ConfigError, FileNotFoundError) as found:
            return type(found).__mro__, str(found), found.__cause__, found.__suppress_context__
        return None

    said = {
        "more layers": error(Net(layers=6)),
        "fewer layers": error(Net(layers=3)),
        "wider": error(Net(hidden=8)),
        "optimizer": error(Net(optimizer="SGD")),
        "adam": error(Net(optimizer="Adam")),
        "nowhere": error(Net(), f"{folder}/b.ckpt"),
        "misspelt": error(Net(), checkpoint=CheckpointConfig(exclude=["net.haed.*"])),
        "plugin": error(Net(), plugins=[TorchCheckpointIO(), AsyncCheckpointIO()][1:]),
    }
    module = Net(optimizer="SGD")
    before = module.net["head"].weight.detach().double().clone()
    parts = ["net.head.*", "optimizer", "lr_schedulers", "loops"]
    looks = AtStart()
    exclude = CheckpointConfig(exclude=parts)
    fit(module, path, max_steps=1, checkpoint=exclude, callbacks=[looks])
    said["step"] = looks.step
    said["head kept"] = torch.equal(looks.state["net.head.weight"], before)
    first = "net.layers.0.0.weight"
    said["rest loaded"] = torch.equal(looks.state[first], saved.state_dict()[first])
    Path(folder, "a.ckpt", "manifest.json").unlink()
    said["torn"] = error(Net())
    return said


class AtStart(pl.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.step = trainer.global_step
        self.state = {name: value.clone() for name, value in module.state_dict().items()}


def test_misfits_are_told_in_one_sentence_each(pool, tmp_path):
    said = pool.run(1, resuming_job, str(tmp_path))[0]
    text = {name: found[1] for name, found in said.items() if isinstance(found, tuple)}
    assert text["more layers"].startswith("net.layers: the checkpoint has 4 layers, the module 6;")
    assert text["fewer layers"].startswith("net.layers: the checkpoint has 4 layers, the module 3;")
    assert text["wider"].startswith("12 parameters have other shapes; ")
    assert text["wider"].endswith("saved module: hidden=4 instead of 8")
    assert (
        "has the state of AdamW, which the module's optimizer, SGD, cannot use" in text["optimizer"]
    )
    assert "CheckpointConfig(exclude=['optimizer', 'lr_schedulers'])" in text["optimizer"]
    assert said["adam"] is None
    assert text["nowhere"] == f"loading {tmp_path}/b.ckpt: there is no such checkpoint"
    assert {CheckpointError, FileNotFoundError} <= set(said["nowhere"][0])
    assert text["misspelt"].endswith("nearest valid: 'net.head.*'")
    assert "plugins=[AsyncCheckpointIO]" in text["plugin"]
    assert text["plugin"].endswith("nearest valid: checkpoint=CheckpointConfig(mode='async')")
    assert (said["step"], said["head kept"], said["rest loaded"]) == (0, True, True)
    assert text["torn"].count(str(tmp_path)) == 1
    for name in text:
        assert "\n" not in text[name], name
        assert said[name][2:] == (None, True) or name in ("misspelt", "plugin"), name


class Uploads(CSVLogger):
    _log_model = True


def full_disk_job(folder: str) -> tuple[int, list[str]]:
    """Steps of a run that can save nothing, as the system lets no file grow, and what it says."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep()
    logging.getLogger("lightning_megatron").addHandler(handler)
    callback = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        with pytest.warns(UserWarning, match=r"Uploads\(log_model=...\) uploads nothing.*'file'"):
            trainer = fit(Net(), max_steps=5, max_epochs=2, logger=Uploads(folder), **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler_before)
    logging.getLogger("lightning_megatron").removeHandler(handler)
    return trainer.global_step, records


def test_a_run_outlives_a_full_disk_and_says_that_nothing_was_saved(pool, tmp_path):
    steps, said = pool.run(1, full_disk_job, str(tmp_path))[0]
    assert steps == 5
    failed = [text for text in said if "training goes on" in text]
    assert len(failed) >= 5
    assert "(5 saves failed in a row; this run has no checkpoints)" in failed[4]
    assert failed[0].count(str(tmp_path)) == 1
    assert said[-1] == "nothing was saved in this run: every save has failed"
