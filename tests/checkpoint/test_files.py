"""Checkpoints that are files: what Lightning writes, under any layout, and resumed under any other.

The module has a buffer, a tied weight and the state of Adam in two groups, and is trained by plain
Lightning, too: the numbers of a file are those of its file, and those after resuming those of a
run in one piece.
"""

import logging
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from lightning_megatron import CheckpointConfig, MegatronStrategy, PipelineSequential
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint
from lightning_megatron.checkpoint.load.file_reader import open_checkpoint
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import (
    WIDTH,
    Small,
    assert_same,
    dp_of,
    loader,
    make_trainer,
    samples,
)

FILE = CheckpointConfig(format="file")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3, "checkpoint": FILE}),
    "tp": (2, {"tp": 2, "checkpoint": FILE}),
    "pp": (2, {"pp": 2, "checkpoint": FILE}),
}


class Net(Small):
    """With a buffer, a tied weight, a part of two names, and two groups in another order."""

    def __init__(self, width: int = 8, kind: type[nn.Module] = nn.Tanh) -> None:
        super().__init__(lr=0.01)
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(1.0, WIDTH + 1))
        self.norm = nn.LayerNorm(WIDTH)
        self.net = PipelineSequential(
            layers=[
                nn.Sequential(
                    ColumnParallelLinear(WIDTH, width), kind(), RowParallelLinear(width, WIDTH)
                )
                for _ in range(4)
            ]
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.net(self.norm(self.first(x)) * self.scale))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
                {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
            ],
            lr=self.lr,
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def train(
    layout: Mapping[str, Any] | None,
    devices: int,
    directory: Path,
    *,
    epochs: int = 1,
    path: str | Path | None = None,
    module: pl.LightningModule | None = None,
    **options: Any,
) -> pl.Trainer:
    """Train and save each epoch; ``layout`` None is plain Lightning."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [ModelCheckpoint(dirpath=directory, monitor="loss", save_last=True)],
        **options,
    }
    trainer = pl.Trainer(
        strategy="auto" if layout is None else MegatronStrategy(**layout),
        devices=devices,
        max_epochs=epochs,
        default_root_dir=directory,
        **given,
    )
    dp = 1 if layout is None else dp_of(devices, layout)
    # Lightning loads before it converts a module, so this one has its format before.
    module = module or Net()
    module = module.double() if given["precision"] == "64-true" else module
    trainer.fit(module, loader(dp=dp), ckpt_path=path)
    return trainer


def save(layout: Mapping[str, Any] | None, devices: int, directory: Path, **options: Any) -> str:
    trainer = train(layout, devices, directory, **options)
    return str(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]


def resume(layout: dict[str, Any], devices: int, directory: Path, path: str) -> str:
    return save(layout, devices, directory, epochs=2, path=path)


def content(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of plain Lightning after one and after two epochs."""
    directory = tmp_path_factory.mktemp("plain")
    return [save(None, 1, directory / str(n), epochs=n) for n in (1, 2)]


def assert_same_file(path: str, other: str) -> None:
    """Compare what is in two files, as far as it is Lightning's."""
    ours, theirs = content(path), content(other)
    assert theirs.keys() <= ours.keys()
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert ours["state_dict"]._metadata.keys() >= theirs["state_dict"]._metadata.keys()
    assert_same(ours["state_dict"], theirs["state_dict"])
    for key in ("epoch", "global_step", "lr_schedulers", "hyper_parameters"):
        assert ours[key] == theirs[key]
    for one, two in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        assert one["param_groups"] == two["param_groups"]
        assert one["state"].keys() == two["state"].keys()
        for number, state in two["state"].items():
            assert_same(one["state"][number], state)


@pytest.mark.parametrize("name", LAYOUTS)
def test_file_is_that_of_lightning(
    name: str, plain: list[str], pool: WorkerPool, tmp_path: Path
) -> None:
    devices, layout = LAYOUTS[name]
    path = pool.run(devices, save, layout, devices, tmp_path / "ours")[0]
    assert Path(path).is_file()
    assert zipfile.ZipFile(path).testzip() is None
    assert_same_file(path, plain[0])
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == sorted(
        p.name for p in Path(plain[0]).parent.iterdir()
    )
    with torch.serialization.safe_globals([nn.Tanh]):
        assert Net.load_from_checkpoint(path).hparams["kind"] is nn.Tanh
        # Plain Lightning goes on from it, and another layout.
        assert_same_file(save(None, 1, tmp_path / "on", epochs=2, path=path), plain[1])
    after = {"one": "pp", "zero 1": "one", "tp": "zero 2", "pp": "tp"}.get(name)
    if after is not None:
        devices, layout = LAYOUTS[after]
        path = pool.run(devices, resume, layout, devices, tmp_path / "after", path)[0]
        assert_same_file(path, plain[1])


@pytest.mark.parametrize("name", ["one", "zero 2", "tp"])
def test_file_of_lightning_is_resumed(
    name: str, plain: list[str], pool: WorkerPool, tmp_path: Path
) -> None:
    devices, layout = LAYOUTS[name]
    path = pool.run(devices, resume, layout, devices, tmp_path, plain[0])[0]
    assert_same_file(path, plain[1])


def test_pipeline_refuses_optimizer_state_without_names(
    plain: list[str], pool: WorkerPool, tmp_path: Path
) -> None:
    devices, layout = LAYOUTS["pp"]
    with pytest.raises(Exception, match="only weights, no optimizer state"):
        pool.run(devices, resume, layout, devices, tmp_path, plain[0])


def test_directory_and_file_follow_each_other(plain: list[str], tmp_path: Path) -> None:
    directory = {"checkpoint": CheckpointConfig(format="directory")}
    path = save(directory, 1, tmp_path / "directory")
    assert Path(path).is_dir()
    assert_same_file(resume({}, 1, tmp_path / "file", path), plain[1])
    path = resume(directory, 1, tmp_path / "directory", save({}, 1, tmp_path / "one"))
    found = load_full_state_dict(path)
    assert_same(found, content(plain[1])["state_dict"])
    # One takes the place of the other.
    train({}, 1, tmp_path / "directory").save_checkpoint(path)
    assert Path(path).is_file()
    train(directory, 1, tmp_path / "directory").save_checkpoint(path)
    assert Path(path).is_dir()


@pytest.mark.parametrize("which", ["last", "best", "auto"])
def test_newest_file_is_found(which: str, plain: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_progress_bar": False}
    saved = train({}, 1, tmp_path)
    if which == "best":
        saved.test(Tested(), loader(), ckpt_path="best", verbose=False)
        return
    assert_same_file(save({}, 1, tmp_path, epochs=2, path=which, **options), plain[1])


class Tested(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert float(self.scale[1]) == 2.0


def test_half_precision(pool: WorkerPool, tmp_path: Path) -> None:
    layout = {"zero": 3, "checkpoint": FILE}
    path = pool.run(2, save, layout, 2, tmp_path / "a", precision="bf16-true")[0]
    found = content(path)["state_dict"]
    assert {v.dtype for v in found.values() if v.is_floating_point()} == {torch.bfloat16}
    plain = content(save(None, 1, tmp_path / "b", precision="bf16-true"))["state_dict"]
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0.1, atol=0.1)


def test_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    path = Path(save({}, 1, tmp_path))
    data = bytearray(path.read_bytes())
    value = content(path)["state_dict"]["net.layers.2.0.weight"].numpy().tobytes()
    data[data.index(value) + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="state_dict.net.layers.2.0.weight is not"):
        open_checkpoint(path)
    path.write_bytes(data[:-100])
    with pytest.raises(DamagedCheckpointError):
        open_checkpoint(path)
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        save({}, 1, tmp_path, epochs=2, path="auto")
    assert list(tmp_path.glob("*.corrupt"))


def test_without_this_package(tmp_path: Path) -> None:
    path = save({"checkpoint": FILE}, 1, tmp_path)
    code = (
        "import sys, torch; sys.modules['lightning_megatron'] = None; "
        f"c = torch.load({path!r}, weights_only=False); print(len(c['state_dict']))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == len(Net().state_dict())


def test_auto_is_said_once_and_follows_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_megatron")
    train({}, 1, tmp_path / "a", epochs=2)
    assert sum("Checkpoints are files" in r.message for r in caplog.records) == 1
    path = save({"checkpoint": CheckpointConfig(keep=2)}, 1, tmp_path / "b")
    assert Path(path).is_dir()
    assert any("directories, as keep=2 asks for it" in r.message for r in caplog.records)


def test_options_of_directories_are_refused_before_training(tmp_path: Path) -> None:
    config = CheckpointConfig(format="file", mode="async", incremental=True)
    with pytest.raises(ConfigError, match=r"format='file', mode='async', incremental=True"):
        train({"checkpoint": config}, 1, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["file", "directory"])
def test_what_no_pickle_holds_is_an_error_that_names_its_place(form: Any, tmp_path: Path) -> None:
    layout = {"checkpoint": CheckpointConfig(format=form)}
    module, data = Net(), pl.LightningDataModule.from_datasets(samples(), batch_size=8)
    data.save_hyperparameters({"noise": lambda x: x})
    saving = ModelCheckpoint(dirpath=tmp_path)
    trainer = make_trainer(layout, callbacks=[saving], enable_checkpointing=True)
    place = "datamodule_hyper_parameters"
    with pytest.raises(ConfigError, match=rf"{place}\.noise: a builtins\.function .*ignore="):
        trainer.fit(module, data)
    assert trainer.global_step == 0
    with pytest.raises(ConfigError, match=r"^answer: a .*cannot be pickled.*on_save_checkpoint"):
        train(layout, 1, tmp_path, module=Answers(lambda: 0))
    early = make_trainer(layout, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"^state_dict\._extra_state: a .* from get_extra_state"):
        early.fit(SavesEarly(tmp_path / "early.ckpt"), loader())
    assert early.global_step == 0
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]


class Keeps(Small):
    """Has a network among its hyper-parameters."""

    def __init__(self, net: nn.Module, bare: nn.Module) -> None:
        super().__init__(lr=1e-3)
        self.save_hyperparameters()
        self.net, self.bare = net, bare

    def loss(self, batch: Any) -> Tensor:
        x, y = (part.float() for part in batch)
        loss = torch.nn.functional.mse_loss(self.net(x) + x * self.bare.weight, y)
        self.log("loss", loss)
        return loss


def keep(layout: dict[str, Any], devices: int, directory: Path, form: Any) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH))
    layout = {**layout, "checkpoint": CheckpointConfig(format=form)}
    options = {"precision": "bf16-mixed", "sync_batchnorm": True}
    train(layout, devices, directory, module=Keeps(net, nn.LayerNorm(WIDTH)), **options)


@pytest.mark.parametrize("zero", [1, 3])
def test_networks_among_hyper_parameters_are_saved_whole(
    zero: int, pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(2, keep, {"zero": zero}, 2, tmp_path, "file")
    path = tmp_path / "last.ckpt"
    content = torch.load(path, weights_only=False)
    kept = content["hyper_parameters"]
    kinds = {type(each) for each in kept["net"]}
    assert kinds == {nn.Linear, nn.LayerNorm, nn.BatchNorm1d}
    assert not any("forward" in vars(each) for each in kept["net"].modules())
    for name in ("net", "bare"):
        for key, value in kept[name].state_dict().items():
            torch.testing.assert_close(
                value, content["state_dict"][f"{name}.{key}"], rtol=0, atol=0
            )
    loaded = Keeps.load_from_checkpoint(path, weights_only=False)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


class SavesEarly(Net):
    """Saves before the first step, to see whether it can be."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def get_extra_state(self) -> Any:
        return lambda: 0

    def set_extra_state(self, state: Any) -> None:
        pass

    def on_train_start(self) -> None:
        self.trainer.save_checkpoint(self.path)


class Answers(Net):
    """Adds to the checkpoint, and finds it again."""

    found: Any = None

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["answer"] = self.answer

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint.get("answer", "nothing")


class Answer:
    """An object of a class of the user's."""


@pytest.mark.parametrize("form", ["file", "directory"])
def test_objects_come_back_to_whoever_trusts_them(
    form: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"format": form, "on_error": "raise"}
    layout = {"checkpoint": CheckpointConfig(**options)}
    path = save(layout, 1, tmp_path, module=Answers(Answer()))
    module = Answers()
    train(layout, 1, tmp_path / "on", epochs=2, path=path, module=module)
    assert module.found == "nothing"
    [said] = [r.message for r in caplog.records if "left out" in r.message]
    assert "answer (tests.checkpoint.test_files.Answer)" in said
    trusting = {"checkpoint": CheckpointConfig(weights_only=False, **options)}
    train(trusting, 1, tmp_path / "trusting", epochs=2, path=path, module=module)
    assert isinstance(module.found, Answer)
    with torch.serialization.safe_globals([Answer]):
        train(layout, 1, tmp_path / "known", epochs=2, path=path, module=module)
    assert isinstance(module.found, Answer)


class Holds(Net):
    """Has the Trainer's callbacks among its hyper-parameters, as neuralforecast's modules."""

    def __init__(self, callbacks: Any = ()) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_callback_in_a_checkpoint_does_not_hold_the_module(form: Any, tmp_path: Path) -> None:
    layout = {"checkpoint": CheckpointConfig(format=form, on_error="raise")}
    saver = ModelCheckpoint(dirpath=tmp_path, monitor="loss")
    module = Holds([saver])
    path = save(layout, 1, tmp_path, module=module, callbacks=[saver])
    stored = open_checkpoint(path, weights_only=False).state["hyper_parameters"]
    [found] = stored["callbacks"]
    assert found.dirpath == saver.dirpath
    assert "log" not in vars(found)
    assert saver.log.__self__ is module  # type: ignore[attr-defined]


class Reads(TorchCheckpointIO):
    """Knows a class; darts has one like it."""

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        with torch.serialization.safe_globals([Answer, nn.Tanh]):  # hyper-parameters have the other
            return super().load_checkpoint(path, *args, **options)


class Writes(Reads):
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        super().save_checkpoint(*args, **options)


@pytest.mark.parametrize("resumed", [None, {}])
def test_a_plugin_that_only_reads_files_reads_them(
    resumed: dict[str, Any] | None, tmp_path: Path
) -> None:
    """As under plain Lightning, which goes first."""
    module, plugins = Answers(), [Reads()]
    path = save({}, 1, tmp_path, module=Answers(Answer()), plugins=plugins)
    train(resumed, 1, tmp_path / "on", epochs=2, path=path, module=module, plugins=plugins)
    assert isinstance(module.found, Answer)


def test_a_plugin_that_is_not_called_is_refused(tmp_path: Path) -> None:
    form: dict[str, Any] = {"checkpoint": CheckpointConfig(format="directory")}
    with pytest.raises(ConfigError, match=r"plugins=\[Writes\]: .* would never call it"):
        train({}, 1, tmp_path, plugins=[Writes()])
    with pytest.raises(ConfigError, match=r"plugins=\[Reads\], checkpoint.format='directory': "):
        train(form, 1, tmp_path, plugins=[Reads()])
    path = save(form, 1, tmp_path)
    with pytest.raises(ConfigError, match="is a directory, and Reads.load_checkpoint reads files"):
        train({}, 1, tmp_path, epochs=2, path=path, plugins=[Reads()])


def test_files_are_checkpoints_of_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_megatron.cli.ckpt import ckpt
    from lightning_megatron.cli.convert import convert

    path = save({}, 1, tmp_path)
    assert is_checkpoint(path)
    assert ckpt(["verify", path]) == 0
    assert ckpt(["ls", str(tmp_path)]) == 0
    assert "complete, not verified" in capsys.readouterr().out
    assert convert([path, str(tmp_path / "out.safetensors")]) == 0
    assert convert([path, str(tmp_path / "made"), "--from-lightning", "--trust-pickle"]) == 0
    assert_same(load_full_state_dict(tmp_path / "made"), content(path)["state_dict"])
    assert convert([str(tmp_path / "made"), str(tmp_path / "back.ckpt")]) == 0
    assert_same(content(tmp_path / "back.ckpt")["state_dict"], content(path)["state_dict"])
