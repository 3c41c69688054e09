"""The last lines of `fit`."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.cli.train import ending

ARGS = ["fit", "--config", "a b.yaml", "--trainer.strategy.tp=2"]


def after_fit(strategy: Any, checkpoint: str, layers: int = 4) -> Any:
    """What `ending` asks of a trainer that has done 50 steps."""
    callback = ModelCheckpoint()
    callback.last_model_path = checkpoint
    return SimpleNamespace(
        global_step=50,
        loggers=[SimpleNamespace(log_dir="runs/a")],
        checkpoint_callback=callback,
        strategy=strategy,
        lightning_module=SimpleNamespace(config=SimpleNamespace(num_layers=layers)),
    )


@pytest.mark.parametrize(
    ("tp", "pp", "layers", "other"),
    [
        (2, 2, 4, ("1", "4")),
        (2, 2, 3, ("4", "1")),
        (1, 4, 4, ("4", "1")),
        (4, 1, 4, ("1", "4")),
        (4, 1, 2, None),
        (1, 1, 4, None),
        (None, None, 4, None),
    ],
)
def test_the_command_goes_on_under_another_layout_of_as_many_ranks(
    tmp_path: Path, tp: int | None, pp: int | None, layers: int, other: tuple[str, str] | None
) -> None:
    checkpoint = tmp_path / "last.ckpt"
    checkpoint.mkdir()
    strategy = object() if tp is None or pp is None else MegatronStrategy(tp=tp, pp=pp)
    lines = ending(ARGS, after_fit(strategy, str(checkpoint), layers)).splitlines()
    assert lines[:3] == [
        *["Trained to step 50.", "  log         runs/a", f"  checkpoint  {checkpoint}"]
    ]
    layout = ["--trainer.strategy.tp", other[0], "--trainer.strategy.pp", other[1]] if other else []
    where = "under another layout" if other else "from here"
    assert lines[3:5] == ["", f"Go on {where}:"]
    assert shlex.split(lines[5]) == [
        *["lightning-megatron", *ARGS, *layout],
        *["--trainer.max_steps", "100", "--ckpt_path", str(checkpoint)],
    ]


@pytest.mark.parametrize("checkpoint", ["", "/of/another/folder/last.ckpt"])
def test_without_a_checkpoint_there_is_no_command(checkpoint: str) -> None:
    trainer = after_fit(MegatronStrategy(tp=2), checkpoint)
    trainer.loggers = []
    assert ending(ARGS, trainer) == "Trained to step 50."


def test_a_checkpoint_in_a_store_is_not_looked_for() -> None:
    trainer = after_fit(MegatronStrategy(), "s3://bucket/last.ckpt")
    assert ending(ARGS, trainer).endswith("--ckpt_path s3://bucket/last.ckpt")
