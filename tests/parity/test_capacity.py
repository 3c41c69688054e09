"""Experts that are full drop the same tokens in every layout."""

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import ActivationConfig, MegatronStrategy, PipelineConfig
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.testing import WorkerPool
from tests.models.test_mixture_layouts import SIZES, Padded
from tests.parity.jobs import quiet_trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp, ep": (4, {"tp": 2, "ep": 4, "zero": 2}),
    "cp, tp": (
        4,
        {"cp": 2, "tp": 2, "sequence_parallel": True, "ep": 2}
        | {"activations": ActivationConfig(recompute="selective")},
    ),
    "dp, zero 3": (
        2,
        {"ep": 2, "zero": 3, "microbatch_size": 2}
        | {"activations": ActivationConfig(recompute="full")},
    ),
    "pp, cp": (
        4,
        {"pp": PipelineConfig(degree=2, schedule="interleaved"), "cp": 2, "ep": 2}
        | {"microbatch_size": 4},
    ),
}


def _config(drop: Any) -> TransformerConfig:
    router = RouterConfig(capacity_factor=0.7, drop=drop, balance_weight=0.05, z_loss=0.01)
    experts = MixtureConfig(num_experts=4, mlp_size=8, top_k=2, router=router)
    return TransformerConfig(**SIZES, experts=experts)


def _train(drop: str, options: dict[str, Any]) -> tuple[list[float], torch.Tensor]:
    """Losses, and for each layer here the sums of this rank's part of tokens and choices."""
    pl.seed_everything(1, verbose=False)
    module = Padded(_config(drop))
    losses: list[float] = []
    sums: list[torch.Tensor] = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["val_loss"]))

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            found = torch.zeros(SIZES["num_layers"], 6, dtype=torch.float64)
            for name, router in module.named_modules():
                if isinstance(router, Router):
                    taken = router.statistics.now()
                    assert taken.counts_e is not None
                    layer = int(name.split("layers.")[1].split(".")[0])
                    found[layer, :4] = taken.counts_e
                    found[layer, 4] = taken.totals["dropped"]
                    found[layer, 5] = taken.totals["tokens"]
            torch.distributed.all_reduce(found)
            sums.append(found)

    trainer = quiet_trainer(
        MegatronStrategy(**options),
        callbacks=[Watch()],
        num_sanity_val_steps=0,
    )
    trainer.fit(module)
    return losses, sums[0]


@cache
def alone(pool: WorkerPool, drop: str) -> tuple[list[float], torch.Tensor]:
    """What one process gives."""
    (expected, sums), *_ = pool.run(1, _train, drop, {})
    tokens = 3 * (8 + 8 + 5 + 1 + 8 + 3 + 7 + 6)
    assert sums[:, 5].tolist() == [tokens] * 4
    assert (sums[:, 4] > 0.2 * tokens).all()
    return expected, sums


@pytest.mark.parametrize(
    ("layout", "drop"),
    [
        ("dp, zero 3", "probability"),
        ("tp, ep", "probability"),
        *(
            pytest.param(name, drop, marks=pytest.mark.thorough)
            for drop in ("probability", "position")
            for name in LAYOUTS
            if (name, drop) not in (("tp, ep", "probability"), ("dp, zero 3", "probability"))
        ),
    ],
)
def test_same_tokens_are_dropped(pool: WorkerPool, layout: str, drop: str) -> None:
    expected, sums = alone(pool, drop)
    world, options = LAYOUTS[layout]
    for losses, found in pool.run(world, _train, drop, options):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert torch.equal(found, sums)
