"""Weights of Lightning's other strategies."""

import os
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_megatron import import_lightning, load_from_checkpoint
from lightning_megatron.cli import main
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, loader, make_trainer, weights


class Marker:
    """A class of a user's own; unpickling it leaves a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["LM_TEST_TRACE"],)


class Tied(pl.LightningModule):
    def __init__(self, size: int = 3, odd: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LM_TEST_TRACE", str(tmp_path / "trace"))
    return tmp_path / "trace"


def lightning_file(path: Path, **hyper_parameters: Any) -> dict[str, Tensor]:
    """What `Trainer.save_checkpoint` writes, as far as it matters."""
    module = Tied(**hyper_parameters)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return module.state_dict()


def test_a_file_with_shared_weights_and_hyper_parameters(tmp_path: Path) -> None:
    held = lightning_file(tmp_path / "old.ckpt", size=5)
    import_lightning(tmp_path / "old.ckpt", tmp_path / "new.ckpt", max_shard_bytes=50)
    loaded = load_from_checkpoint(Tied, tmp_path / "new.ckpt")
    assert loaded.hparams["size"] == 5
    assert loaded.second.weight is loaded.first.weight
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, held[name], rtol=0, atol=0)
    with pytest.raises(ConfigError, match="exists; nearest valid"):
        import_lightning(tmp_path / "old.ckpt", tmp_path / "new.ckpt")
    half = {"a": torch.ones(2, 2), "n": torch.ones(3, dtype=torch.long)}
    torch.save(half, tmp_path / "plain.pt", _use_new_zipfile_serialization=False)
    import_lightning(
        tmp_path / "plain.pt", tmp_path / "new.ckpt", overwrite=True, dtype=torch.bfloat16
    )
    shown = str((tmp_path / "new.ckpt" / "manifest.json").read_text())
    assert '"bfloat16"' in shown
    assert '"int64"' in shown


def test_no_code_is_run_unless_the_source_is_trusted(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = str(tmp_path / "old.ckpt"), str(tmp_path / "new.ckpt")
    lightning_file(Path(old), odd=Marker())
    trace.rmdir()  # of the copy that Lightning made
    assert main(["convert", "--from-lightning", old, new]) == 2
    assert "nearest valid: trust_pickle=True (--trust-pickle)" in capsys.readouterr().err
    assert not trace.exists()
    assert not os.path.lexists(new)
    assert main(["convert", "--from-lightning", old, new, "--trust-pickle"]) == 0
    assert trace.exists()
    assert load_from_checkpoint(Tied, new).hparams["size"] == 3
    assert main(["convert", old, new + ".safetensors", "--trust-pickle"]) == 2


@pytest.mark.parametrize("file", [".metadata", "meta.pt"])
def test_a_directory_is_not_trusted_either(
    pool: WorkerPool, tmp_path: Path, trace: Path, file: str
) -> None:
    pool.run(1, lightning_directory, tmp_path / "old.ckpt")
    content: Any = Marker()
    if file == "meta.pt":
        torch.save({"hyper_parameters": {"odd": content}}, tmp_path / "old.ckpt" / file)
    else:
        (tmp_path / "old.ckpt" / file).write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match="trust_pickle=True"):
        import_lightning(tmp_path / "old.ckpt", tmp_path / "new.ckpt")
    assert not trace.exists()


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    torch.save([1], tmp_path / "list.pt")
    torch.save({"state_dict": {}}, tmp_path / "nothing.pt")
    for name, message in {
        "text.ckpt": "trust_pickle",
        "missing.ckpt": "cannot be read",
        "empty": "no sharded checkpoint",
        "list.pt": "holds a list",
        "nothing.pt": "holds none",
    }.items():
        with pytest.raises(ConfigError, match=message):
            import_lightning(tmp_path / name, tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()


class Sharded(Small):
    """`Small` as Lightning's ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        if dist.is_initialized() and isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def lightning_directory(path: Path) -> dict[str, Tensor]:
    module = Sharded()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    trainer = make_trainer(None, size, max_steps=2)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy,
        devices=size,
        accelerator="cpu",
        precision="32-true",
        max_steps=2,
        enable_model_summary=False,
        **options,
    )
    module.loss = lambda batch: nn.functional.mse_loss(  # type: ignore[method-assign]
        module.net(batch[0].float()), batch[1].float()
    )
    trainer.fit(module, loader(dp=size))
    trainer.save_checkpoint(path)
    return weights(module)


def first_loss(path: Path, layout: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    module = Sharded(lr=0.0)
    trainer = make_trainer(layout, 2, max_steps=1, precision="64-true")
    trainer.fit(module, loader(dp=2 if "pp" not in layout else 1), ckpt_path=path)
    held = module.net.stage_items[0] if "pp" in layout else module.net
    assert sum(p.numel() for p in held.parameters()) <= 4 * (WIDTH * WIDTH + WIDTH)
    return weights(module), trainer.global_step


def test_training_starts_from_a_sharded_directory(pool: WorkerPool, tmp_path: Path) -> None:
    held = pool.run(2, lightning_directory, tmp_path / "old.ckpt")[0]
    assert (tmp_path / "old.ckpt" / "meta.pt").exists()
    import_lightning(tmp_path / "old.ckpt", tmp_path / "new.ckpt")
    for layout in ({"zero": 3}, {"pp": 2}):
        for ours, step in pool.run(2, first_loss, tmp_path / "new.ckpt", layout):
            assert step == 1
            for name, value in ours.items():
                # One step of Adam moves no weight further than its learning rate.
                torch.testing.assert_close(value, held[name].double(), rtol=0, atol=1.01e-2)
