"""Models of the presets' kinds train alike under every layout."""

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import ActivationConfig, LanguageModel, MegatronStrategy, PipelineConfig
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import batch_share, quiet_trainer

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_layers": 4, "num_heads": 4}
CONFIGS = {
    "like DeepSeek-V3": TransformerConfig(
        **SIZES,
        latent=LatentSizes(q_rank=12, kv_rank=8, rope_dim=4, nope_dim=6, value_dim=5),
        experts=MixtureConfig(
            **{"num_experts": 8, "top_k": 3, "mlp_size": 8, "shared_size": 16, "first_dense": 1},
            router=RouterConfig(
                **{"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5},
                **{"bias_update": 0.01, "balance_weight": 0.05},
            ),
        ),
    ),
    "like Qwen3-MoE": TransformerConfig(
        **SIZES,
        num_kv_heads=2,
        qk_norm=True,
        experts=MixtureConfig(
            **{"num_experts": 4, "mlp_size": 8, "every": 2},
            router=RouterConfig(balance_weight=0.05, z_loss=0.01),
        ),
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"ep": 2, "zero": 2}),
    "ep, recomputed": (2, {"ep": 2, "activations": ActivationConfig(recompute="full")}),
    "tp, ep": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "cp, ep, zero 3": (2, {"cp": 2, "ep": 2, "zero": 3}),
    "cp, dp, ep, zero 3": (4, {"cp": 2, "ep": 4, "zero": 3}),
    "pp, ep": (
        4,
        {"pp": PipelineConfig(degree=2, schedule="zbv"), "ep": 2, "microbatch_size": 2},
    ),
}


class Padded(LanguageModel):
    """Sequences of unequal lengths, whose padding goes to no expert."""

    def train_dataloader(self) -> Any:
        topology = getattr(self.trainer.strategy, "_topology", None)
        size, rank = (1, 0) if topology is None else (topology.batch.size, topology.batch.rank)
        found = []
        for step in range(3):
            rows = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
            lengths = torch.tensor((8, 8, 5, 1, 8, 3, 7, 6)).roll(step)
            mask = torch.arange(8) < lengths[:, None]
            labels = rows[:, 1:].masked_fill(~mask, -100)
            batch = {"tokens": rows[:, :-1], "labels": labels, "token_mask": mask}
            found.append(batch_share(batch, size, rank))
        return DataLoader(found, batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def _train(name: str, options: dict[str, Any]) -> list[float]:
    pl.seed_everything(1, verbose=False)
    module = Padded(CONFIGS[name])
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["val_loss"]))

    trainer = quiet_trainer(
        MegatronStrategy(**options),
        callbacks=[Watch()],
        gradient_clip_val=1.0,
        val_check_interval=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module)
    return losses


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, list[float]]:
    """Losses of one process after each step."""
    return {name: pool.run(1, _train, name, {})[0] for name in CONFIGS}


PAIRS = [("like DeepSeek-V3", layout) for layout in ("ep, recomputed", "cp, ep, zero 3")]
PAIRS += [("like Qwen3-MoE", layout) for layout in ("tp, ep", "pp, ep")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*pair, marks=[pytest.mark.thorough] * (pair not in PAIRS))
        for pair in itertools.product(CONFIGS, LAYOUTS)
    ],
)
def test_losses_are_those_of_one_process(
    pool: WorkerPool, alone: dict[str, list[float]], name: str, layout: str
) -> None:
    world, options = LAYOUTS[layout]
    assert len(alone[name]) == 3
    for losses in pool.run(world, _train, name, options):
        assert losses == pytest.approx(alone[name], rel=1e-9)
