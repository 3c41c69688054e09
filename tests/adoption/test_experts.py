"""Mixtures of experts of transformers under layouts against the unmodified model."""

import filecmp
import os
import re

import pytest
import torch
from torch import nn

from lightning_megatron import MegatronStrategy, gather
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.adoption.experts import AdoptedExperts
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.expert_mlp import expert_mlp
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.testing import WorkerError
from tests.adoption.families import FAMILIES
from tests.adoption.harness import (
    KeepDouble,
    Training,
    job,
    largest_difference,
    problems,
    problems_of,
    reference,
)
from tests.adoption.test_saving import saved
from tests.parity.jobs import quiet_trainer

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp2 ep2": (2, {"tp": 2, "ep": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2 pp2 ep2": (4, {"tp": 2, "pp": 2, "ep": 2}),
    "pp2 ep2 zero3": (4, {"pp": 2, "ep": 2, "zero": 3, "microbatch_size": 1}),
    "tp2 ep4 zero2": (4, {"tp": 2, "ep": 4, "zero": 2}),
    "tp2 ep2 zero3": (4, {"tp": 2, "ep": 2, "zero": 3}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 ep2 sp": (2, {"tp": 2, "ep": 2, "sequence_parallel": True, "microbatch_size": 1}),
    "tp2 sp single": (
        4,
        {"tp": 2, "ep": 2, "sequence_parallel": True, "microbatch_size": 1},
    ),
    "tp2 pp2 ep2 sp": (4, {"tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True}),
    "cp2 ep2": (2, {"cp": 2, "ep": 2}),
    "pp2 ep2 zbv": (4, {"pp": PipelineConfig(degree=2, schedule="zbv"), "ep": 2}),
}
USUAL = {
    ("mixtral", "tp2 ep2"),
    ("mixtral", "pp2 ep2 zero3"),
    ("qwen3 moe", "tp2"),
    ("mixtral", "tp2 ep2 sp"),
    ("mixtral", "cp2 ep2"),
    ("gpt-oss", "tp2 ep2"),
}
"""Pairs that meet every family, and every axis with ep; the others are thorough."""
PAIRS = [
    pytest.param(family, layout, marks=[pytest.mark.thorough] * ((family, layout) not in USUAL))
    for family in ("mixtral", "qwen3 moe", "gpt-oss")
    for layout in LAYOUTS
    if (family, layout) != ("gpt-oss", "cp2 ep2")  # its attention has sinks, which cp refuses
]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_mixture_trains_as_the_unmodified_one(pool, family, layout):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world)[0]
    assert largest_difference(found, reference(family)) < 1e-9


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ("ep2", "uneven"),
        pytest.param("tp2 ep2 zero3", "uneven", marks=pytest.mark.thorough),
        pytest.param("tp2 ep2", "causal", marks=pytest.mark.thorough),
    ],
)
def test_balancing_loss_is_that_of_all_samples(pool, layout, batch):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, "mixtral balanced", options, world, batch)[0]
    expected = reference("mixtral balanced", batch)
    assert largest_difference(found, expected) < 1e-9
    assert largest_difference(reference("mixtral", batch), expected) > 1e-5  # it counts


@pytest.mark.parametrize(
    ("options", "said"),
    [({"pp": 2}, "pp=2"), ({"num_microbatches": 2}, "num_microbatches=2")],
)
def test_balancing_loss_of_parts_is_refused(pool, options, said):
    with pytest.raises(WorkerError, match=f"output_router_logits=True, {said}"):
        pool.run(2, job, "mixtral balanced", options, 2, grace=1.0)  # peers only wait


def test_ep_without_experts_is_refused():
    assert "ep=2: the module holds no MixtureOfExperts" in problems("llama", {"ep": 2}, 2)


def test_indivisible_experts_are_refused():
    found = problems("mixtral", {"ep": 8}, 8)
    assert re.search("num_experts=4, ep=8.*nearest valid: ep=4", found)


def test_only_experts_of_known_arithmetic_leave_their_own_code():
    known = {"mixtral": True, "qwen3 moe": True, "gpt-oss": False}
    for family, expected in known.items():
        model = adopt(FAMILIES[family].build())
        layers = [part for part in model.modules() if isinstance(part, AdoptedExperts)]
        assert layers
        assert all(bool(layer.matrices) is expected for layer in layers)


def test_experts_whose_code_a_user_has_changed_keep_it():
    model = FAMILIES["mixtral"].build()
    experts = model.model.layers[0].mlp.experts

    class Mine(type(experts)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    experts.__class__ = Mine
    adopt(model)
    assert not experts.matrices
    assert model.model.layers[1].mlp.experts.matrices


def test_module_that_is_no_stack_is_refused():
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)])})
    with pytest.raises(ConfigError, match="tp_plan: experts .*moe_tp_experts.*nearest valid"):
        adopt(model, tp_plan={"experts": "moe_tp_experts"})


def test_packed_gate_and_up_are_those_apart():
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down, scale = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 4), (2, 6, 4), (2, 6, 4), (2, 4, 6), (7,))
    )
    packed = torch.cat((gate, up), 1)
    found = []
    for weights in ([gate, up, down], [packed, down]):
        leaves = [t.clone().requires_grad_() for t in (x, scale, *weights)]
        y = expert_mlp(
            leaves[0],
            leaves[2:],
            [3, 4],
            "swiglu",
            scale_n=leaves[1],
            gradient_factor=2.0,
            packed=len(weights) == 2,
        )
        y.square().sum().backward()
        grads = [leaf.grad for leaf in leaves]
        found.append([y, *grads[:2], torch.cat(grads[2:-1], 1), grads[-1]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "tp2 ep2"),
        pytest.param("qwen3 moe", "pp2 ep2 zero3", marks=pytest.mark.thorough),
        pytest.param("gpt-oss", "ep2", marks=pytest.mark.thorough),
    ],
)
def test_saved_experts_are_those_of_one_process(pool, tmp_path, family, layout):
    world, options = LAYOUTS[layout]
    pool.run(world, saved, family, options, world, str(tmp_path))
    files = os.listdir(tmp_path / "one")
    assert files
    same, *_ = filecmp.cmpfiles(tmp_path / "hook", tmp_path / "one", files, shallow=False)
    assert sorted(same) == sorted(files)


def _epochs(family, layout, world, epochs, path, resumed=False):
    """Train for some epochs, the first of them perhaps under another layout."""
    others = layout.get("tp", 1) * layout.get("pp", 1)
    module = Training(adopt(FAMILIES[family].build()), "causal", world // others)
    options = {"devices": world, "max_epochs": epochs, "use_distributed_sampler": True}
    trainer = quiet_trainer(MegatronStrategy(**layout), **options)
    with KeepDouble():
        trainer.fit(module, ckpt_path=path if resumed else None)
    trainer.save_checkpoint(f"{path}.next" if resumed else path)
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2 ep2", "ep2"),
        pytest.param("ep2", "pp2 ep2 zero3", marks=pytest.mark.thorough),
        pytest.param("pp2 ep2 zero3", "tp2", marks=pytest.mark.thorough),
    ],
)
def test_checkpoints_of_experts_continue_under_another_layout(pool, tmp_path, first, second):
    path = str(tmp_path / "first.ckpt")
    world, options = LAYOUTS[first]
    pool.run(world, _epochs, "mixtral", options, world, 1, path)
    world, options = LAYOUTS[second]
    found = pool.run(world, _epochs, "mixtral", options, world, 2, path, resumed=True)[0]
    expected = pool.run(1, _epochs, "mixtral", {}, 1, 2, str(tmp_path / "one.ckpt"))[0]
    assert largest_difference(found, expected) < 1e-9


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_adapters_of_split_experts_are_refused(axis):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    model = adopt(peft.get_peft_model(FAMILIES["mixtral"].build(), config))
    said = f"ParamWrapper of PEFT's LORA on MixtralExperts, which {axis}=2 splits, has no rule"
    assert said in problems_of(Training(model, "causal"), {axis: 2}, 2)
