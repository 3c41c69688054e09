"""The Trainer's connectors have what `_lightning.connectors` takes from them."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_megatron._lightning.connectors import (
    callbacks_without_log,
    cluster_environment,
    collect_checkpoint,
    divide_data,
    divides_data,
    requeue_path,
    show_checkpoint_path,
)
from tests._lightning.running import Module, On, make_trainer


def test_cluster_environment() -> None:
    given = LightningEnvironment()
    assert cluster_environment(make_trainer(plugins=given, strategy="ddp")) is given


def test_divides_data_and_divide_data() -> None:
    assert not divides_data(make_trainer(use_distributed_sampler=False))
    trainer = make_trainer(strategy="ddp")
    assert divides_data(trainer)
    connector = trainer._data_connector
    assert connector._requires_distributed_sampler(Module().train_dataloader())
    divide_data(trainer, divide=False)
    assert not connector._requires_distributed_sampler(Module().train_dataloader())


def test_collect_checkpoint() -> None:
    found: list[dict[str, Any]] = []
    note = On(on_train_end=lambda trainer, _: found.append(collect_checkpoint(trainer)))
    make_trainer(note).fit(Module())
    [checkpoint] = found
    assert {"state_dict", "loops", "optimizer_states", "lr_schedulers", "callbacks"} <= set(
        checkpoint
    )
    assert {"epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"} <= set(
        checkpoint["loops"]["fit_loop"]
    )


def test_callbacks_without_log() -> None:
    def look(trainer: Any, module: Any) -> None:
        assert note.log.__self__ is module
        assert note.log_dict.__self__ is module
        with callbacks_without_log(trainer):
            assert not {"log", "log_dict"} & vars(note).keys()
        assert note.log.__self__ is module

    note: Any = On(on_train_end=look)
    make_trainer(note).fit(Module())


def test_requeue_path(tmp_path: Path) -> None:
    trainer = make_trainer(default_root_dir=tmp_path)
    assert requeue_path(trainer) == str(tmp_path / "hpc_ckpt_1.ckpt")
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    assert requeue_path(trainer) == str(tmp_path / "hpc_ckpt_2.ckpt")


def test_show_checkpoint_path() -> None:
    trainer = make_trainer()
    show_checkpoint_path(trainer, "here.ckpt")
    assert trainer.ckpt_path == "here.ckpt"
    trainer.fit(Module())  # and does not start from it
    assert trainer.ckpt_path is None
