"""Fused projections: their parts are split, and everything outside of a rank sees the whole."""

import functools
import math
import re
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor

from lightning_megatron import MegatronStrategy, gather
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.adoption.linear import LinearSplit, as_linear
from lightning_megatron.adoption.sharding import Part
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim import Adafactor, Muon
from lightning_megatron.topology.degrees import Degrees
from tests.adoption.families import FAMILIES
from tests.adoption.harness import (
    KeepDouble,
    Training,
    fit,
    job,
    largest_difference,
    reference,
)
from tests.layers.parity import make_topology

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
    "tp2 zero2": (4, {"tp": 2, "zero": 2}),
    "tp2 zero3": (4, {"tp": 2, "zero": 3}),
    "tp4": (4, {"tp": 4}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
}


FUSED = ("gpt2", "phi3", "glm", "gpt_bigcode", "bloom")
CASES = {
    ("gpt2", "tp2 sp", "causal", "sdpa"),
    ("phi3", "tp2 sp", "right", "eager"),
    ("glm", "tp4", "left", "sdpa"),
    ("gpt_bigcode", "tp2", "left", "eager"),
    ("bloom", "tp2", "left", "eager"),
}
"""Beside those that train, and go on from a checkpoint, below."""


def _cases() -> list[Any]:
    """Cases of every family; those that are not in `CASES` take their time."""
    found = [
        (family, layout, batch, attention)
        for family in FUSED
        for layout in LAYOUTS
        if layout != "pp2"
        for batch in ("causal", "right", "left")
        for attention in ("eager", "sdpa")
        if (family, attention) != ("bloom", "sdpa")  # it has none
    ]
    assert set(found) >= CASES
    return [
        case if case in CASES else pytest.param(*case, marks=pytest.mark.thorough) for case in found
    ]


@pytest.mark.parametrize(("family", "layout", "batch", "attention"), _cases())
def test_fused_projections_train_as_in_one_process(pool, family, layout, batch, attention):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world, batch, attention)[0]
    assert largest_difference(found, reference(family, batch, attention)) < 1e-9


class _ByPlace(torch.optim.Optimizer):
    """Takes larger steps on later elements, so it needs whole parameters in their own order."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.grad is not None:
                    state["sum"] = state.get("sum", torch.zeros_like(p)) * 0.5 + p.grad
                    place = torch.linspace(0, 1, p.numel(), dtype=p.dtype).view_as(p)
                    p -= group["lr"] * place * state["sum"] / state["sum"].norm()
        return loss


class _Optimized(Training):
    """Plain training with an optimizer of any kind."""

    def __init__(self, family: str, optimizer: str, copies: int = 1, adopted: bool = True) -> None:
        model = FAMILIES[family].build()
        super().__init__(adopt(model) if adopted else model, "causal", copies)
        self._optimizer = optimizer
        self.seen: float | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = _by_place(checkpoint["state_dict"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        if self._optimizer == "muon":
            return Muon(parameters, lr=1e-2)
        if self._optimizer == "adafactor":
            return Adafactor(parameters, lr=1e-2)
        if self._optimizer == "by place":
            return _ByPlace(parameters)
        return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def _fit(
    module: L.LightningModule, strategy: Any, devices: int, epochs: int, path: str | None
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with KeepDouble():
        trainer.fit(module, ckpt_path=path)
    return trainer


@functools.cache
def _one_process(family: str, optimizer: str, epochs: int) -> dict[str, Tensor]:
    module = _Optimized(family, optimizer, adopted=False)
    _fit(module, "auto", 1, epochs, None)
    return module.state_dict()


def _job(
    family: str,
    optimizer: str,
    layout: dict[str, Any],
    world: int,
    epochs: int = 1,
    load: str | None = None,
    save: str | None = None,
) -> Any:
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    module = _Optimized(family, optimizer, world // others)
    trainer = _fit(module, MegatronStrategy(**layout), world, epochs, load)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = gather(module)
    return (weights if trainer.global_rank == 0 else None), module.seen


@pytest.mark.parametrize(
    ("family", "optimizer"),
    # Keys' biases have no gradient but rounding, which Adafactor would blow up in GPT-2.
    [
        ("gpt2", "muon"),
        ("phi3", "adafactor"),
        ("gpt2", "by place"),
        pytest.param("phi3", "muon", marks=pytest.mark.thorough),
    ],
)
def test_optimizers_see_the_fused_parameter(pool, family, optimizer):
    found, _ = pool.run(2, _job, family, optimizer, {"tp": 2}, 2)[0]
    assert largest_difference(found, _one_process(family, optimizer, 1)) < 1e-9


@pytest.mark.parametrize(
    ("family", "optimizer", "first", "second"),
    [
        ("gpt2", "by place", "tp2 zero3", "pp2"),
        ("phi3", "adafactor", "tp2", "tp4"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ("gpt2", "adamw", "tp2 zero2", "pp2"),
                ("phi3", "by place", "tp2 zero3", "tp2"),
                ("gpt2", "adamw", "tp2 zero3", "tp2 pp2"),
                ("gpt2", "adamw", "tp2 zero3", "tp4"),
                ("phi3", "adamw", "tp2 zero2", "tp2 pp2"),
                ("phi3", "adamw", "pp2 zero3", "tp2 zero3"),
                ("phi3", "by place", "tp2 zero2", "tp4"),
                ("gpt2", "by place", "tp2 zero3", "tp2"),
            ]
        ),
    ],
)
def test_checkpoint_of_one_layout_goes_on_under_another(
    pool, tmp_path, family, optimizer, first, second
):
    path = str(tmp_path / "half.ckpt")
    (before, options), (world, others) = LAYOUTS[first], LAYOUTS[second]
    ranks = pool.run(before, _job, family, optimizer, options, before, 1, None, path)
    (half, _), expected = ranks[0], _one_process(family, optimizer, 1)
    assert largest_difference(half, expected) < 1e-9
    if "pp" not in options:  # hooks on checkpoints see the fused parameter on every rank
        seen = [each for _, each in ranks]
        assert seen == pytest.approx([_by_place(expected)] * before, rel=0, abs=1e-6)
    found, _ = pool.run(world, _job, family, optimizer, others, world, 2, path)[0]
    assert largest_difference(found, _one_process(family, optimizer, 2)) < 1e-9


def _by_place(state: dict[str, Tensor]) -> float:
    """A number in which each element of the first fused parameter counts by its place."""
    weight = next(v for name, v in state.items() if re.search(r"(qkv_proj|c_attn)\.weight$", name))
    return float((weight * torch.arange(weight.numel()).view_as(weight)).sum())


class _Crossing(Training):
    """Training of a decoder that reads states of an encoder."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        states = torch.sin(batch["input_ids"][:, :5, None].double() * torch.arange(32))
        return self.lm(**batch, encoder_hidden_states=states).loss


def _crossed(layout: dict[str, Any] | None, world: int) -> Any:
    model = FAMILIES["gpt2"].build(add_cross_attention=True)
    module = _Crossing(model if layout is None else adopt(model), "causal")
    with KeepDouble():
        fit(module, "auto" if layout is None else MegatronStrategy(**layout), world)
    return module.state_dict() if layout is None else gather(module)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2 pp2", marks=pytest.mark.thorough)])
def test_fused_keys_and_values_of_cross_attention(pool, layout):
    world, options = LAYOUTS[layout]
    found = pool.run(world, _crossed, options, world)[0]
    assert largest_difference(found, _crossed(None, 1)) < 1e-9


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_adopted_model_is_its_own_in_one_process(family):
    plain, adopted = FAMILIES[family].build(), adopt(FAMILIES[family].build())
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(plain(tokens).logits, adopted(tokens).logits)
    state = adopted.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert isinstance(adopted, type(plain))


TIED = {"attention_dropout": 0.0, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("gpt2", {"vocab_size": 65}, "tp2"),  # as odd as that of GPT-2
        ("gpt2 classes", {}, "pp2"),
        pytest.param("gpt2 classes", {}, "tp2 pp2", marks=pytest.mark.thorough),
        ("falcon", {}, "tp2"),
        pytest.param("falcon", {}, "tp2 pp2", marks=pytest.mark.thorough),
        *(
            pytest.param("falcon", changes, "tp2", marks=pytest.mark.thorough)
            for changes in (
                {"multi_query": False},
                {"new_decoder_architecture": True, "num_kv_heads": 2},
                {"alibi": True, "parallel_attn": False},
            )
        ),
        ("phi3", TIED, "pp2"),
        pytest.param("phi3", TIED, "tp2 pp2", marks=pytest.mark.thorough),
    ],
)
def test_variants_train_as_in_one_process(pool, family, changes, layout):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world, **changes)[0]
    assert largest_difference(found, reference(family, **changes)) < 1e-9


def test_layer_gives_each_rank_its_heads(pool):
    whole = _fused_layer()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    query, key, value = whole(x).split((16, 8, 8), -1)
    for tp in (2, 4):
        for rank, found in enumerate(pool.run(tp, _outputs, x, tp)):
            kv = rank * 2 // tp
            expected = torch.cat(
                [
                    query.chunk(tp, -1)[rank],
                    key.split(4, -1)[kv],
                    value.split(4, -1)[kv],
                ],
                -1,
            )
            assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def _fused_layer() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 32, dtype=torch.float64)
    parts = (Part(16, 4), Part(8, 2), Part(8, 2))
    as_linear(layer, LinearSplit(placement="column", parts=parts))
    return layer


def _outputs(x: Tensor, tp: int) -> Tensor:
    layer = _fused_layer()
    layer.distribute(make_topology(tp))
    return layer(x).detach()


def test_parts_must_be_all_features():
    split = LinearSplit(placement="column", parts=(Part(16, 4), Part(8, 2)))
    with pytest.raises(ConfigError, match=r"32 output features, but parts of \[16, 8\]"):
        as_linear(torch.nn.Linear(6, 32), split, "attn.qkv")


def test_style_of_a_module_that_cannot_be_fused_is_refused():
    model = FAMILIES["llama"].build()
    before = [type(module) for module in model.modules()]
    plan = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    plan["model.layers.*.self_attn.o_proj"] = "rowwise"
    with pytest.raises(ConfigError, match="32 output features, which are not queries"):
        adopt(model, tp_plan={**plan, "model.layers.*.self_attn.q_proj": "fused_qkv"})
    with pytest.raises(ConfigError, match="which is no attention of transformers; nearest valid"):
        adopt(model, tp_plan={"model.layers.*.mlp.gate_proj": "fused_qkv"})
    assert [type(module) for module in model.modules()] == before


def test_conv_with_a_forward_of_its_own_is_refused():
    class Scaled(transformers.pytorch_utils.Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = FAMILIES["gpt2"].build()
    model.transformer.h[1].mlp.c_fc = Scaled(48, 32)
    # Only tp needs it split, so tp > 1 is what is refused.
    (problem,) = adopt(model).tp_problems
    assert "h.1.mlp.c_fc is a Scaled" in problem
    assert "nearest valid: a plain Conv1D" in problem


def test_heads_that_tp_does_not_divide_are_refused():
    found = _fused_layer().problems(Degrees(tp=3))
    assert len(found) == 1
    assert "tp=3" in found[0]
    assert "nearest valid: tp=2" in found[0]
    assert _fused_layer().problems(Degrees(tp=4)) == []


def test_bloom_that_computes_with_slices_of_weights_is_refused():
    model = FAMILIES["bloom"].build(pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(ConfigError, match="slow_but_exact=True.*nearest valid"):
        adopt(model)
