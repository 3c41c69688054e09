"""The strategy on one GPU: NCCL, device placement, every precision, checkpoints."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import Fp8Precision, LanguageModel, MegatronStrategy, ShardingConfig
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.precision.fp8_recipes import RECIPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CONFIG = TransformerConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4)


def _fit(precision: Any, ckpt_path: str | None = None, **options: Any) -> tuple[pl.Trainer, float]:
    pl.seed_everything(3, verbose=False)
    tokens = torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(0)).expand(64, 17)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=MegatronStrategy(**options),
        **({"precision": precision} if isinstance(precision, str) else {"plugins": [precision]}),
        max_epochs=1 if ckpt_path is None else 2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    module = LanguageModel(CONFIG, lr=1e-2, warmup_steps=2)
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    zero = trainer.strategy.options.zero
    place = "cpu" if zero.offload_parameters else "cuda"
    assert all(p.device.type == place for p in module.parameters())
    place = "cpu" if zero.offload_optimizer else place
    for state in trainer.optimizers[0].state.values():
        assert all(v.device.type == place for v in state.values() if v.ndim)
    return trainer, float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}], ids=str)
def test_one_sentence_is_learnt(precision: str, options: dict[str, Any]) -> None:
    _, loss = _fit(precision, **options)
    assert loss < 1.0  # log(64) = 4.2 at the start


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs FP8 units",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_sentence_is_learnt_in_fp8(recipe: Any) -> None:
    _, loss = _fit(Fp8Precision(recipe, keep_first=0, keep_last=0))
    assert loss < 1.0


def test_checkpoint_continues(tmp_path: Path) -> None:
    trainer, before = _fit("bf16-mixed")
    trainer.save_checkpoint(tmp_path / "gpu.ckpt")
    _, after = _fit("bf16-mixed", str(tmp_path / "gpu.ckpt"))
    assert after < before


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_one_sentence_is_learnt_with_shards_in_host_memory(
    precision: str, zero: Any, tmp_path: Path
) -> None:
    config = ShardingConfig(stage=zero, offload_optimizer=True, offload_parameters=zero == 3)
    trainer, loss = _fit(precision, zero=config, num_microbatches=2)
    assert loss < 1.0
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    path = str(tmp_path / "half.ckpt")
    _, continued = _fit(precision, path, zero=config, num_microbatches=2)
    assert continued < loss
