"""LoRA of PEFT on models made of this library's layers."""

import functools
import math
from typing import Any

import lightning as L
import peft
import pytest
import torch
from torch import Tensor

from lightning_megatron import LanguageModel, MegatronStrategy, TransformerConfig, gather
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.models.transformer import build_trunk
from tests.adoption.harness import fit, largest_difference

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 16,
}
TARGETS = ["wq", "wk", "wo", "gate", "down", "head"]

LAYOUTS = {
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2, "num_microbatches": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "num_microbatches": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
}


class Tuned(L.LightningModule):
    """Next-token step of a transformer with adapters, all of whose batches are one.

    Args:
        copies: data-parallel ranks.
    """

    def __init__(self, copies: int = 1) -> None:
        super().__init__()
        self._copies = copies
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            trunk = build_trunk(TransformerConfig(**SIZES))
            config = peft.LoraConfig(r=8, target_modules=TARGETS, init_lora_weights=False)
            self.trunk = peft.get_peft_model(adopt(trunk), config).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.trunk(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)

    def train_dataloader(self) -> Any:
        made = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 64, (12, 13), generator=made)
        return torch.utils.data.DataLoader(list(rows), batch_size=4 // self._copies)


@functools.cache
def reference() -> dict[str, Tensor]:
    module = Tuned()
    fit(module, "auto", 1)
    return module.state_dict()


def job(layout: dict[str, Any], world: int) -> Any:
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp"))
    module = Tuned(world // others)
    trainer = fit(module, MegatronStrategy(**layout), world)
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[pytest.mark.thorough] * (w > 2)) for n, (w, _) in LAYOUTS.items()],
)
def test_adapters_train_as_in_one_process(pool, layout):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, options, world)[0]
    assert largest_difference(found, reference()) < 1e-9


class Configured(LanguageModel):
    """LanguageModel with adapters, built on the meta device."""

    def configure_model(self) -> None:
        if not hasattr(self, "trunk"):
            super().configure_model()
            # Their dropouts take whole activations, and so draw what one process draws.
            targets = ["wq", "wk", "gate", "head"]
            config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.2)
            self.trunk = peft.get_peft_model(adopt(self.trunk), config)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)

    def train_dataloader(self) -> Any:
        rows = torch.randint(0, 64, (8, 13), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader([(r[:-1], r[1:]) for r in rows], batch_size=4)


def configured_job(layout: dict[str, Any], world: int) -> Any:
    L.seed_everything(3)
    module = Configured({k: v for k, v in SIZES.items() if k != "num_kv_heads"})
    trainer = fit(module, MegatronStrategy(**layout), world, precision="64-true")
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


def test_adapters_of_a_language_model_begin_alike_and_drop_alike(pool):
    one = pool.run(1, configured_job, {}, 1)[0]
    two = pool.run(2, configured_job, {"tp": 2}, 2)[0]
    assert len({n for n, v in one.items() if "lora_B" in n and v.abs().max() > 0}) == 7
    assert largest_difference(two, one) < 1e-9
