"""A run interrupted in mid-epoch goes on under any other layout as if nothing had happened."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import LanguageModel, MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    tied_embeddings=True,
)
GLOBAL_BATCH, STEPS_PER_EPOCH, INTERRUPTED_AT = 4, 4, 5


class _Curve(pl.Callback):
    """Loss and gradient norm of every step, over all ranks."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        loss = strategy.reduce(outputs["loss"].detach().double())
        norm = strategy.parallel.gradients.last_norm
        assert norm is not None
        self.points.append((float(loss), float(norm)))


def _train(
    directory: str, world_size: int, options: dict[str, Any], resume: bool
) -> list[tuple[float, float]]:
    pl.seed_everything(7, verbose=False)
    dp = world_size // (options.get("tp", 1) * options.get("pp", 1))
    tokens = torch.randint(64, (16, 9), generator=torch.Generator().manual_seed(0))
    curve = _Curve()
    save = ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=INTERRUPTED_AT, save_top_k=-1
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MegatronStrategy(**options),
        precision="64-true",
        max_epochs=2,
        gradient_clip_val=0.5,
        callbacks=[curve] if resume else [curve, save],
        enable_checkpointing=not resume,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // dp, shuffle=True)
    path = f"{directory}/step={INTERRUPTED_AT}.ckpt" if resume else None
    trainer.fit(LanguageModel(CONFIG, lr=1e-2, warmup_steps=2), loader, ckpt_path=path)
    return curve.points


@pytest.fixture(scope="module")
def interrupted(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[float, float]]]:
    """A checkpoint of step 5 of 8, and the whole curve."""
    directory = tmp_path_factory.mktemp("resume")
    options = {"tp": 2, "pp": 2, "num_microbatches": 2}
    return directory, pool.run(4, _train, str(directory), 4, options, False)[0]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"zero": 3}),
        (2, {"tp": 2, "sequence_parallel": True, "num_microbatches": 4}),
        (4, {"pp": 4, "schedule": "gpipe", "num_microbatches": 4}),
        (4, {"tp": 2, "zero": 0}),
        (4, {"pp": 2, "zero": 2, "num_microbatches": 2}),
    ],
    ids=str,
)
def test_curve_continues(
    pool: WorkerPool,
    interrupted: tuple[Path, list[tuple[float, float]]],
    world_size: int,
    options: dict[str, Any],
) -> None:
    directory, whole = interrupted
    assert len(whole) == 2 * STEPS_PER_EPOCH
    rest = pool.run(world_size, _train, str(directory), world_size, options, True)[0]
    assert len(rest) == len(whole) - INTERRUPTED_AT
    expected = torch.tensor(whole[INTERRUPTED_AT:], dtype=torch.float64)
    actual = torch.tensor(rest, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
