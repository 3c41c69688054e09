"""A run interrupted in mid-epoch goes on under any other layout as if nothing had happened.

It is resumed and saved again without a step, under one layout after the other: the tensors of the
checkpoints stay what they are, bit for bit, and the curves what they were, to rounding.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import (
    LanguageModel,
    MegatronStrategy,
    PipelineConfig,
    load_from_checkpoint,
)
from lightning_megatron.checkpoint.chunks import whole
from lightning_megatron.checkpoint.load.file_reader import open_checkpoint
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.strategy.small import dp_of

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    tied_embeddings=True,
)
MIXTURE = replace(
    CONFIG,
    num_layers=2,
    experts=MixtureConfig(
        num_experts=4,
        mlp_size=12,
        shared_size=8,
        first_dense=1,
        router=RouterConfig(score="sigmoid", bias_update=0.01, z_loss=0.01),
    ),
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
    path: str,
    world_size: int,
    options: dict[str, Any],
    precision: Any,
    source: str | None,
    config: TransformerConfig = CONFIG,
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
    trainer.fit(LanguageModel(config, lr=1e-2, warmup_steps=2), loader, ckpt_path=source)
    return curve.points


def _tensors(path: Path) -> dict[str, Tensor]:
    """Weights and optimizer moments, each as one tensor of the whole model."""
    reader = open_checkpoint(path, alone=True)
    entries = reader.manifest.tensors
    found = {n: torch.empty(e.shape, dtype=e.torch_dtype) for n, e in entries.items()}
    reader.read({name: whole(tensor) for name, tensor in found.items()})
    return found


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Layouts, each of which continues from what the one before has saved."""

    layouts: tuple[tuple[int, dict[str, Any]], ...]
    """Processes and options; the first begins."""
    precision: str = "64-true"
    config: TransformerConfig = CONFIG


FIRST: tuple[int, dict[str, Any]] = (4, {"tp": 2, "pp": 2, "num_microbatches": 2})
CHAINS: dict[str, Chain] = {
    "64-true": Chain(
        layouts=(
            (2, {"tp": 2, "sequence_parallel": True, "num_microbatches": 2}),
            (2, {"cp": 2, "zero": 3}),
            (1, {}),
            (2, {"pp": 2, "num_microbatches": 2}),
        )
    ),
    "experts": Chain(
        layouts=(
            (2, {"ep": 2, "tp": 2}),
            (4, {"ep": 2, "zero": 3}),
            (2, {"ep": 2, "zero": 0}),
        ),
        config=MIXTURE,
    ),
    "64-true, every layout": Chain(
        layouts=(
            FIRST,
            (4, {"tp": 4}),
            (4, {"cp": 2, "zero": 3}),
            (1, {}),
            (4, {"pp": 2, "num_microbatches": 2, "zero": 0}),
            (4, {"tp": 2, "sequence_parallel": True, "zero": 3, "num_microbatches": 2}),
            (4, {"pp": PipelineConfig(degree=4, schedule="gpipe"), "num_microbatches": 4}),
            (4, {"tp": 2, "zero": 2}),
        )
    ),
    "32-true, every layout": Chain(
        layouts=(
            FIRST,
            (4, {"pp": 2, "num_microbatches": 2, "zero": 1}),
            (1, {}),
            (2, {"tp": 2}),
            (2, {"zero": 0}),
        ),
        precision="32-true",
    ),
    "experts, every layout": Chain(
        layouts=(
            (4, {"ep": 4}),
            (1, {}),
            (2, {"ep": 2, "zero": 0}),
            (4, {"ep": 2, "zero": 3}),
            (4, {"ep": 2, "pp": 2, "num_microbatches": 2}),
            (4, {"ep": 2, "zero": ShardingConfig(stage=1, dp_replicate=2)}),
            # More ranks with the same experts than experts of one of them.
            (8, {"ep": 4, "tp": 2, "zero": 2}),
            (8, {"ep": 4, "tp": 2, "zero": 3, "sequence_parallel": True}),
            (2, {"cp": 2, "ep": 2}),
        ),
        config=MIXTURE,
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * ("every" in name)) for name in CHAINS],
)
def test_one_layout_continues_what_another_began(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    chain = CHAINS[name]
    path = tmp_path / "first.ckpt"

    def train(
        layout: tuple[int, dict[str, Any]], to: Path, source: Path | None
    ) -> list[tuple[float, float]]:
        loaded = source if source is None else str(source)
        by_rank = pool.run(
            layout[0], _train, str(to), *layout, chain.precision, loaded, chain.config
        )
        curve: list[tuple[float, float]] = by_rank[0]
        return curve

    curve = train(chain.layouts[0], path, None)
    assert len(curve) == 2 * STEPS_PER_EPOCH
    saved = _tensors(path)
    assert sum(name.startswith("optimizer") for name in saved) > len(saved) / 2
    expected = torch.tensor(curve[INTERRUPTED_AT:], dtype=torch.float64)
    next_loss, rest = (1e-12, 1e-10) if chain.precision == "64-true" else (1e-6, 1e-4)
    for number, layout in enumerate(chain.layouts[1:]):
        again = tmp_path / f"{number}.ckpt"
        actual = torch.tensor(train(layout, again, path), dtype=torch.float64)
        where = f"{layout}: "
        torch.testing.assert_close(
            actual[0, 0], expected[0, 0], rtol=next_loss, atol=0, msg=lambda m, w=where: w + m
        )
        torch.testing.assert_close(
            actual, expected, rtol=rest, atol=0, msg=lambda m, w=where: w + m
        )
        tensors = _tensors(again)
        assert tensors.keys() == saved.keys()
        assert [n for n in saved if not torch.equal(tensors[n], saved[n])] == [], layout
        path = again
    assert all(tensors[name].any() for name in tensors if name.endswith("router.bias"))
    module = load_from_checkpoint(LanguageModel, path)
    assert module.config == chain.config
    for name, value in module.state_dict().items():
        stored = tensors.get(f"model.{name}", value)  # what is tied has one name
        assert torch.equal(value, stored.to(value.dtype)), name
