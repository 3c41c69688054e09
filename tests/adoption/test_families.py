"""Decoders of transformers under layouts against the unmodified model."""

import pytest

from tests.adoption.families import FAMILIES
from tests.adoption.harness import job, largest_difference, reference

LAYOUTS = {
    "tp4": (4, {"tp": 4}),  # fewer key-value heads than ranks
    "tp2": (2, {"tp": 2}),
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


def _cases() -> list[tuple[str, str, str, str]]:
    """All decoders, layouts, batches and kinds of attention that work together."""
    return [
        (family, layout, batch, attention)
        for family in DECODERS
        for layout in LAYOUTS
        for batch in BATCHES
        for attention in ATTENTION
        if attention == FAMILIES[family].options.get("attn_implementation", attention)
    ]


def _chosen() -> set[tuple[str, str, str, str]]:
    """Cases of every decoder with tp4 and with one more layout, and of all other pairs of values.

    The further layout, batch and attention go round, so that each meets each.
    """
    found = set()
    for number, family in enumerate(DECODERS):
        others = list(LAYOUTS)[1:]
        for turn, layout in enumerate(("tp4", others[number % 3])):
            fits = [c for c in _cases() if c[:2] == (family, layout)]
            found.add(fits[(number * 2 + turn * 3 + number // 3) % len(fits)])
    return found


@pytest.mark.parametrize(
    ("family", "layout", "batch", "attention"),
    [
        case if case in _chosen() else pytest.param(*case, marks=pytest.mark.thorough)
        for case in _cases()
    ],
)
def test_adopted_model_trains_as_the_unmodified_one(pool, family, layout, batch, attention):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world, batch, attention)[0]
    assert largest_difference(found, reference(family, batch, attention)) < 1e-9


def test_default_cases_hold_every_pair():
    chosen = _chosen()
    assert {case[0] for case in chosen} == set(DECODERS)
    for first, second in ((1, 2), (1, 3), (2, 3)):
        pairs = {(case[first], case[second]) for case in _cases()}
        assert {(case[first], case[second]) for case in chosen} == pairs


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", {"tp": 2}),  # mla_kv_a_proj
        ("deepseek_v3", {"tp": 2, "sequence_parallel": True}),
        ("granite_swa", {"tp": 4}),  # colwise for a parameter, local_params
        pytest.param("deepseek_v3", {"tp": 2, "pp": 2}, marks=pytest.mark.thorough),
        pytest.param("granite_swa", {"tp": 2, "pp": 2}, marks=pytest.mark.thorough),
    ],
)
def test_rarer_styles_train_as_the_unmodified_model(pool, family, layout):
    world = layout["tp"] * layout.get("pp", 1)
    found = pool.run(world, job, family, layout, world)[0]
    assert largest_difference(found, reference(family)) < 1e-9
