"""Decoders of transformers under layouts against the unmodified model."""

from collections.abc import Iterable, Iterator

import pytest

from tests.adoption.families import FAMILIES
from tests.adoption.harness import job, largest_difference, reference

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),  # fewer key-value heads than ranks
    "pp2": (2, {"pp": 2, "num_microbatches": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
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
    """Cases of every decoder under tp2, and one or two of each other layout."""
    for number, family in enumerate(DECODERS):
        own = FAMILIES[family].options.get("attn_implementation", ATTENTION[number % 2])
        yield family, "tp2", BATCHES[number // 2 % 3], own
    yield "qwen2", "tp4", "causal", "eager"
    yield "qwen3", "tp2 pp2", "causal", "sdpa"
    yield "olmo2", "pp2", "left", "eager"
    yield "granite", "pp2 zero3", "right", "sdpa"


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
    def pairs(cases: Iterable[tuple[str, ...]]) -> set[object]:
        """Pairs of values, in which it is one to a pipeline on which side a row is padded."""
        own = [("pp" in layout, batch == "causal", batch, kind) for _, layout, batch, kind in cases]
        return {(i, j, x[i], x[j]) for x in own for i, j in ((0, 1), (0, 3), (2, 3))}

    assert {case[0] for case in USUAL if case[1] == "tp2"} == set(DECODERS)
    assert {case[1] for case in USUAL} == set(LAYOUTS)
    assert set(ALL) >= USUAL
    assert pairs(USUAL) == pairs(ALL)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", {"tp": 2, "sequence_parallel": True}),  # mla_kv_a_proj
        ("granite_swa", {"tp": 2}),  # colwise for a parameter, local_params
        pytest.param("deepseek_v3", {"tp": 2}, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", {"tp": 2, "pp": 2}, marks=pytest.mark.thorough),
        pytest.param("granite_swa", {"tp": 4}, marks=pytest.mark.thorough),
        pytest.param("granite_swa", {"tp": 2, "pp": 2}, marks=pytest.mark.thorough),
    ],
)
def test_rarer_styles_train_as_the_unmodified_model(pool, family, layout):
    world = layout["tp"] * layout.get("pp", 1)
    found = pool.run(world, job, family, layout, world)[0]
    assert largest_difference(found, reference(family)) < 1e-9
