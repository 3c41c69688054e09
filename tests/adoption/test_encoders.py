"""Encoders, encoders with decoders, and models that transformers has no plan for."""

import pytest

from lightning_megatron.adoption.huggingface import plan_of
from lightning_megatron.adoption.plan import expanded
from tests.adoption.families import FAMILIES
from tests.adoption.harness import job, largest_difference, reference

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "pp2": (2, {"pp": 2, "num_microbatches": 2}),
    "zero3": (2, {"zero": 3}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
    "tp4": (4, {"tp": 4}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "num_microbatches": 2}),
    "cp2": (2, {"cp": 2}),
}
NAMES = (
    "bert",
    "bert classes",
    "bert pretraining",
    "roberta",
    "vit",
    "vit pixels",
    "t5",
    "t5 gated",
    "opt",
    "distilbert",
    "gptj",
    "electra",
    "bart",
)
_OFTEN = {
    ("bert", "cp2"),
    ("bert classes", "pp2"),
    ("bert pretraining", "tp2"),
    ("vit", "tp2 sp"),
    ("vit", "cp2"),
    ("vit pixels", "zero3"),
    ("t5", "tp2 pp2 sp"),
    ("t5 gated", "tp2 sp"),
    *((name, "tp2") for name in ("roberta", "opt", "distilbert", "gptj", "electra", "bart")),
}
"""Every family, and every axis; stacks of an encoder and a decoder over all that split them."""
_NOT_OVER_CP = {"t5", "t5 gated", "opt", "distilbert", "gptj", "electra", "bart"}
"""They compute attention with a bias, or by code of their own; see the test of the refusal."""


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family, layout, marks=() if (family, layout) in _OFTEN else pytest.mark.thorough
        )
        for family in NAMES
        for layout in LAYOUTS
        if layout != "cp2" or family not in _NOT_OVER_CP
    ],
)
def test_adopted_model_trains_as_the_unmodified_one(pool, family, layout):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world)[0]
    assert largest_difference(found, reference(family)) < 1e-9


def test_every_family_and_axis_is_often_tested():
    assert {family for family, _ in _OFTEN} == set(NAMES) <= FAMILIES.keys()
    assert {layout for _, layout in _OFTEN} >= {n for n, (world, _) in LAYOUTS.items() if world < 4}


PATTERNS = {
    "bert": {
        "bert.embeddings.word_embeddings": "embedding_rowwise",
        "bert.encoder.layer.*.attention.self.query": "colwise",
        "bert.encoder.layer.*.attention.self.key": "colwise",
        "bert.encoder.layer.*.attention.self.value": "colwise",
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
        "cls.predictions": "tied_bias",
        "cls.predictions.decoder": "colwise_gather_output",
    },
    "vit": {
        **{f"vit.layers.*.attention.{name}_proj": "colwise" for name in "qkv"},
        "vit.layers.*.attention.o_proj": "rowwise",
        "vit.layers.*.mlp.fc1": "colwise",
        "vit.layers.*.mlp.fc2": "rowwise",
    },
    "t5": {
        "shared": "embedding_rowwise",
        "encoder.embed_tokens": "embedding_rowwise",
        "decoder.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        **{
            f"{stack}.block.*.layer.0.SelfAttention.{name}": style
            for stack in ("encoder", "decoder")
            for name, style in (("q", "colwise"), ("k", "colwise"), ("v", "colwise"))
        },
        "encoder.block.*.layer.0.SelfAttention.o": "rowwise",
        "decoder.block.*.layer.0.SelfAttention.o": "rowwise",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "embedding_colwise",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias": "embedding_colwise",
        **{f"decoder.block.*.layer.1.EncDecAttention.{name}": "colwise" for name in "qkv"},
        "decoder.block.*.layer.1.EncDecAttention.o": "rowwise",
        "encoder.block.*.layer.1.DenseReluDense.wi": "colwise",
        "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise",
        "decoder.block.*.layer.2.DenseReluDense.wi": "colwise",
        "decoder.block.*.layer.2.DenseReluDense.wo": "rowwise",
    },
}
"""What our plans find in the installed version of transformers, which names modules."""


@pytest.mark.parametrize("family", PATTERNS)
def test_plan_of_ours_still_fits_the_installed_version(family):
    model = FAMILIES[family].build()
    assert dict(plan_of(model).styles) == expanded(model, PATTERNS[family])
