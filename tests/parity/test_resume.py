"""A run interrupted in mid-epoch goes on under any other layout as if nothing had happened.

It is resumed and saved again without a step, under one layout after the other: the tensors of the
checkpoints stay what they are, bit for bit, and the curves what they were, to rounding.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import LanguageModel, MegatronStrategy, PipelineConfig
from lightning_megatron.checkpoint.chunks import whole
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import dp_of

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


class _SaveAgain(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _train(
    path: str, world_size: int, options: dict[str, Any], precision: Any, source: str | None
) -> list[tuple[float, float]]:
    """Train from the start, and save ``path`` on the way; or from ``source``, and save at once."""
    pl.seed_everything(7, verbose=False)
    dp = dp_of(world_size, options)
    tokens = torch.randint(64, (16, 9), generator=torch.Generator().manual_seed(0))
    directory, name = path.rsplit("/", 1)
    curve = _Curve()
    save: pl.Callback = _SaveAgain(path)
    if source is None:
        save = ModelCheckpoint(
            dirpath=directory, filename=name[:-5], every_n_train_steps=INTERRUPTED_AT
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MegatronStrategy(**options),
        precision=precision,
        max_epochs=2,
        gradient_clip_val=0.5,
        callbacks=[curve, save],
        enable_checkpointing=source is None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // dp, shuffle=True)
    trainer.fit(LanguageModel(CONFIG, lr=1e-2, warmup_steps=2), loader, ckpt_path=source)
    return curve.points


def _tensors(path: Path) -> dict[str, Tensor]:
    """Weights and optimizer moments, each as one tensor of the whole model."""
    reader = CheckpointReader(path, alone=True)
    entries = reader.index.tensors
    found = {n: torch.empty(e.shape, dtype=e.dtype) for n, e in entries.items()}
    reader.read({name: whole(tensor) for name, tensor in found.items()})
    return found


FIRST: tuple[int, dict[str, Any]] = (4, {"tp": 2, "pp": 2, "num_microbatches": 2})
CHAINS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "64-true": [
        (4, {"tp": 4}),
        (4, {"cp": 2, "zero": 3}),
        (1, {}),
        (4, {"pp": 2, "num_microbatches": 2, "zero": 0}),
        (4, {"tp": 2, "sequence_parallel": True, "zero": 3, "num_microbatches": 2}),
        (4, {"pp": PipelineConfig(degree=4, schedule="gpipe"), "num_microbatches": 4}),
        (4, {"tp": 2, "zero": 2}),
    ],
    "32-true": [(4, {"pp": 2, "num_microbatches": 2, "zero": 1}), (1, {}), (2, {"zero": 0})],
}
"""Processes and layouts, each of which continues from what the one before has saved."""


@pytest.mark.parametrize("precision", CHAINS)
def test_one_layout_continues_what_another_began(
    pool: WorkerPool, tmp_path: Path, precision: str
) -> None:
    path = tmp_path / "first.ckpt"
    curve = pool.run(FIRST[0], _train, str(path), *FIRST, precision, None)[0]
    assert len(curve) == 2 * STEPS_PER_EPOCH
    saved = _tensors(path)
    assert sum(name.startswith("optimizer") for name in saved) > 2 * len(saved) / 3 - 1
    expected = torch.tensor(curve[INTERRUPTED_AT:], dtype=torch.float64)
    next_loss, rest = (1e-12, 1e-10) if precision == "64-true" else (1e-6, 1e-4)
    for number, (world_size, options) in enumerate(CHAINS[precision]):
        again = tmp_path / f"{number}.ckpt"
        points = pool.run(
            world_size, _train, str(again), world_size, options, precision, str(path)
        )[0]
        actual = torch.tensor(points, dtype=torch.float64)
        where = f"{options}: "
        torch.testing.assert_close(
            actual[0, 0], expected[0, 0], rtol=next_loss, atol=0, msg=lambda m, w=where: w + m
        )
        torch.testing.assert_close(
            actual, expected, rtol=rest, atol=0, msg=lambda m, w=where: w + m
        )
        tensors = _tensors(again)
        assert tensors.keys() == saved.keys()
        assert [n for n in saved if not torch.equal(tensors[n], saved[n])] == [], options
        path = again
