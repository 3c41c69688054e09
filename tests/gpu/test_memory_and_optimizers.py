"""Ways to save memory, optimizers and precisions with options, on one GPU, through the Trainer."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import (
    ActivationConfig,
    Bf16MixedPrecision,
    Bf16TruePrecision,
    CompileConfig,
    Fp8Precision,
    GradientMonitor,
    LanguageModel,
    MegatronStrategy,
)
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.optim.clip import PercentileClip, UnitClip, ZScoreClip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ACCELERATOR = "gpu"
MEMORY = {
    "full": ActivationConfig(recompute="full"),
    "every second": ActivationConfig(recompute="full", every=2),
    "groups": ActivationConfig(recompute="full", group=2),
    "selective": ActivationConfig(recompute="selective"),
    "selective, of parts": ActivationConfig(recompute="selective", keep=["matmul", "norm"]),
    "adaptive": ActivationConfig(recompute="adaptive", limit_gib=0.002),
    "a part of the device": ActivationConfig(recompute="adaptive", limit_fraction=0.5),
    "offload": ActivationConfig(offload=True, offload_min_bytes=0),
    "offload of few": ActivationConfig(recompute="selective", offload=True),
}


def fit(
    memory: ActivationConfig | None = None,
    model: dict[str, Any] | None = None,
    backend: Any = "sdpa",
    callbacks: Sequence[pl.Callback] = (),
    length: int = 16,
    num_heads: int = 4,
    compiled: CompileConfig | None = None,
    **options: Any,
) -> list[float]:
    """Losses of 16 steps on one sentence of 64 different letters."""
    pl.seed_everything(3, verbose=False)
    config = TransformerConfig(
        vocab_size=64, hidden_size=64, num_layers=4, num_heads=num_heads, attention_backend=backend
    )
    tokens = torch.randint(64, (1, length + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.expand(64, length + 1)
    losses = Losses()
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        strategy=MegatronStrategy(
            activations=memory or ActivationConfig(),
            compile=compiled or CompileConfig(),
            num_microbatches=2,
        ),
        max_steps=16,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, *callbacks],
        **options,
    )
    module = LanguageModel(config, **{"lr": 1e-2, "warmup_steps": 2, **(model or {})})
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4))
    assert losses.seen[-1] < losses.seen[0] / 2
    return losses.seen


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Backwards of attention add up in any order on a GPU, unless they are asked not to."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # some have no such variant
    yield
    torch.use_deterministic_algorithms(before)


def close_to(losses: list[float]) -> Any:
    """Late losses are small, and what is left of order shows in them."""
    return pytest.approx(losses, rel=5e-2, abs=5e-2)


class Losses(pl.Callback):
    """Of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", MEMORY)
def test_memory_changes_no_loss(name: str, precision: str) -> None:
    expected = fit(precision=precision)
    found = fit(MEMORY[name], precision=precision)
    assert found == close_to(expected)


@pytest.mark.parametrize("recompute", ["selective", "adaptive"])
def test_flex_attention_stays_compiled_in_recomputed_blocks(recompute: Any) -> None:
    limit = 0.002 if recompute == "adaptive" else None
    memory = ActivationConfig(recompute=recompute, limit_gib=limit)
    # A block of its kernel, in heads that tensor cores like.
    sizes = {"length": 128, "num_heads": 2}
    expected = fit(precision="bf16-mixed", backend="flex", **sizes)
    found = fit(memory, precision="bf16-mixed", backend="flex", **sizes)
    assert found == close_to(expected)


@pytest.mark.parametrize("name", ["muon", "lion", "adafactor", "adamw-bfloat16", "adamw-int8"])
def test_optimizers_learn(name: str) -> None:
    rates = {"lion": 2e-3, "adafactor": 5e-2}
    fit(model={"optimizer": name, "lr": rates.get(name, 1e-2)}, precision="bf16-mixed")


def test_a_chunked_loss_is_the_loss() -> None:
    expected = fit(precision="32-true")
    found = fit(model={"chunked_loss": True}, precision="32-true")
    assert found == close_to(expected)


@pytest.mark.parametrize(
    "plugin",
    [
        lambda: Bf16MixedPrecision(reduce_dtype="bf16"),
        lambda: Bf16TruePrecision(stochastic_rounding=True),
        lambda: Fp8Precision(plain_linear=True, keep_first=0, keep_last=0, include=["*.head"]),
    ],
    ids=["bf16 reduction", "stochastic rounding", "FP8 everywhere"],
)
def test_plugins_learn(plugin: Any) -> None:
    if "Fp8" in type(plugin()).__name__ and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    fit(plugins=[plugin()])


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs FP8 units",
)
def test_fp8_is_recomputed(recompute: Any) -> None:
    memory = ActivationConfig(recompute=recompute, offload=recompute != "none")
    fit(memory, plugins=[Fp8Precision("delayed")])


@pytest.mark.parametrize("rule", [PercentileClip(50), ZScoreClip(warmup=4), UnitClip()])
def test_rules_clip(rule: Any) -> None:
    fit(callbacks=[GradientMonitor(rule, nonfinite="skip")], precision="16-mixed")


@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_networks_learn(scope: Any) -> None:
    expected = fit(precision="bf16-mixed")
    found = fit(compiled=CompileConfig(scope=scope), precision="bf16-mixed")
    assert found == close_to(expected)
