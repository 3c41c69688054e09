"""Decoders of transformers under layouts against the unmodified model."""

from collections.abc import Iterator

import pytest

from tests.adoption.families import FAMILIES
from tests.adoption.harness import job, largest_difference, reference

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),  # fewer key-value heads than ranks
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
}
DECODERS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
    "cohere",
    "cohere2",
    "starcoder2",
    "gpt_neox",
)
BATCHES = ("causal", "right", "left")
ATTENTION = ("eager", "sdpa")
ALL = [
    (family, layout, batch, attention)
    for family in DECODERS
    for layout in LAYOUTS
    for batch in BATCHES
    for attention in ATTENTION
    if attention == FAMILIES[family].options.get("attn_implementation", attention)
]


def _usual() -> Iterator[tuple[str, str, str, str]]:
    """Cases of every decoder under tp2, and of all pairs of the other values."""
    for number, family in enumerate(DECODERS):
        own = FAMILIES[family].options.get("attn_implementation", ATTENTION[number % 2])
        yield family, "tp2", BATCHES[number // 2 % 3], own
    for number, layout in enumerate(("tp4", "tp2 pp2", "pp2 zero3")):
        for turn, batch in enumerate(BATCHES):
            yield DECODERS[4 * turn + number + 1], layout, batch, ATTENTION[(number + turn) % 2]


USUAL = set(_usual())


@pytest.mark.parametrize(
    ("family", "layout", "batch", "attention"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.thorough) for case in ALL],
)
def test_adopted_model_trains_as_the_unmodified_one(pool, family, layout, batch, attention):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world, batch, attention)[0]
    assert largest_difference(found, reference(family, batch, attention)) < 1e-9


def test_usual_cases_hold_every_pair():
    assert {case[0] for case in USUAL} == set(DECODERS)
    assert set(ALL) >= USUAL
    for first, second in ((1, 2), (1, 3), (2, 3)):
        pairs = {(case[first], case[second]) for case in ALL}
        assert {(case[first], case[second]) for case in USUAL} == pairs


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", {"tp": 2, "pp": 2, "sequence_parallel": True}),  # mla_kv_a_proj
        ("granite_swa", {"tp": 2}),  # colwise for a parameter, local_params
        pytest.param("deepseek_v3", {"tp": 2}, marks=pytest.mark.thorough),
        pytest.param("granite_swa", {"tp": 4}, marks=pytest.mark.thorough),
        pytest.param("granite_swa", {"tp": 2, "pp": 2}, marks=pytest.mark.thorough),
    ],
)
def test_rarer_styles_train_as_the_unmodified_model(pool, family, layout):
    world = layout["tp"] * layout.get("pp", 1)
    found = pool.run(world, job, family, layout, world)[0]
    assert largest_difference(found, reference(family)) < 1e-9
