"""Schedules, partitions, recomputation and compilation of adopted models."""

import math
import re

import pytest
import torch

from lightning_megatron import MegatronStrategy, gather
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.compile import CompileConfig
from lightning_megatron.parallel.plan import PipelineConfig
from tests.adoption.families import FAMILIES
from tests.adoption.harness import (
    KeepDouble,
    Training,
    fit,
    job,
    largest_difference,
    problems,
    reference,
)

THOROUGH = pytest.mark.thorough


def _pp(**options):
    return {"pp": PipelineConfig(degree=2, **options)}


LAYERS = 4
"""So that stages have several, of which each has a place of its own."""
PIPELINES = {
    "interleaved": ("llama", 2, _pp(schedule="interleaved")),
    "zbv": ("llama", 2, _pp(schedule="zbv")),
    "zb-h1 tp2": ("qwen3", 4, {"tp": 2, **_pp(schedule="zb-h1")}),
    "auto": ("llama", 2, _pp(schedule="auto")),
    "flops": ("mixtral", 2, _pp(partition="flops", sequence_length=12)),
    "measured": ("qwen3", 2, _pp(partition="measured")),
    "list": ("llama", 2, _pp(partition=[2, 5])),
}
DEFAULT = {"zbv", "measured", "flops"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DEFAULT else THOROUGH) for n in PIPELINES]
)
def test_pipelines_train_as_one_process(pool, name):
    family, world, options = PIPELINES[name]
    found = pool.run(world, job, family, options, world, num_hidden_layers=LAYERS)[0]
    assert largest_difference(found, reference(family, num_hidden_layers=LAYERS)) < 1e-9


def _counting_job(family, layout, world, own_checkpoints=False):
    """Train; returns whole weights, runs of a norm for each of its block, and compiled graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = FAMILIES[family].build()
    if own_checkpoints:
        model.gradient_checkpointing_enable()
    adopt(model)
    runs = {"forward": 0, "norm": 0}

    def counted(name):
        def hook(layer, args, output):
            if not torch.compiler.is_compiling() and not output.is_meta:
                runs[name] += 1

        return hook

    model.model.layers[0].register_forward_hook(counted("forward"))
    model.model.layers[0].input_layernorm.register_forward_hook(counted("norm"))
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp"))
    module = Training(model, FAMILIES[family].batch, world // others)
    with KeepDouble():
        trainer = fit(module, MegatronStrategy(**layout), world)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    weights = gather(module)
    ratio = runs["norm"] / max(runs["forward"], 1)
    return (weights if trainer.global_rank == 0 else None), ratio, graphs


RECOMPUTED = {
    "full": ("llama", 2, {"tp": 2}, {"recompute": "full"}),
    "full zero3": ("llama", 2, {"zero": 3}, {"recompute": "full"}),
    "full pp2 zero3": (
        "llama",
        4,
        {"pp": 2, "zero": 3, "microbatch_size": 1},
        {"recompute": "full"},
    ),
    "selective pp2": ("llama", 2, {"pp": 2}, {"recompute": "selective"}),
    "inputs divided": ("qwen3", 2, {"tp": 2}, {"recompute": "full", "distribute_inputs": True}),
    "inputs divided pp2": (
        "qwen3",
        4,
        {"tp": 2, "pp": 2},
        {"recompute": "full", "distribute_inputs": True},
    ),
    "offloaded": (
        "llama",
        2,
        {"tp": 2},
        {"recompute": "full", "offload": True, "offload_min_bytes": 0},
    ),
    "experts": ("mixtral", 2, {"tp": 2, "ep": 2}, {"recompute": "full"}),
    "experts pp2": ("mixtral", 4, {"tp": 2, "ep": 2, "pp": 2}, {"recompute": "full"}),
    "experts selective": ("mixtral", 2, {"tp": 2, "ep": 2}, {"recompute": "selective"}),
}
DEFAULT_RECOMPUTED = {"full zero3", "inputs divided", "experts"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in DEFAULT_RECOMPUTED else THOROUGH) for n in RECOMPUTED],
)
def test_recomputed_blocks_train_as_one_process(pool, name):
    family, world, layout, options = RECOMPUTED[name]
    layout = {**layout, "activations": ActivationConfig(**options)}
    found = pool.run(world, _counting_job, family, layout, world)
    assert max(ratio for _, ratio, _ in found) == 2  # each block ran twice
    assert largest_difference(found[0][0], reference(family)) < 1e-9


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param({"pp": 2}, marks=THOROUGH)], ids=str)
def test_own_checkpoints_of_transformers_train_as_one_process(pool, layout):
    found = pool.run(2, _counting_job, "llama", layout, 2, own_checkpoints=True)
    assert max(ratio for _, ratio, _ in found) == 2
    assert largest_difference(found[0][0], reference("llama")) < 1e-9


COMPILED = {
    "tp2": ("llama", {"tp": 2}),
    "pp2": ("llama", {"pp": 2}),
    "zero3": ("llama", {"zero": 3}),
    "full": ("llama", {"tp": 2, "activations": ActivationConfig(recompute="full")}),
    "experts": ("mixtral", {"tp": 2, "ep": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=THOROUGH) for n in COMPILED])
def test_compiled_blocks_train_as_one_process(pool, name):
    family, layout = COMPILED[name]
    layout = {**layout, "compile": CompileConfig(scope="block", backend="aot_eager")}
    found, _, graphs = pool.run(2, _counting_job, family, layout, 2)[0]
    assert graphs >= 1
    assert largest_difference(found, reference(family)) < 1e-9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"activations": ActivationConfig(recompute="full", group=2)},
            "activations.group=2: the forward of the adopted LlamaForCausalLM.*group=1",
        ),
        (
            {"compile": CompileConfig(scope="model", backend="aot_eager")},
            "compile.scope='model': the forward of the adopted LlamaForCausalLM.*scope='block'",
        ),
    ],
    ids=["group", "model"],
)
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_what_its_forward_cannot_do_is_refused(axis, options, said):
    assert re.search(said, problems("llama", {axis: 2, **options}, 2))
