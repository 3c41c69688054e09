"""Sequences of adopted models that are split over tp and cp: the numbers of one process."""

import pytest

from lightning_megatron import ContextConfig
from lightning_megatron.testing import WorkerError
from tests.adoption.habits import HABITS
from tests.adoption.harness import largest_difference, problems, problems_of
from tests.adoption.sequence_cases import (
    InnerHook,
    habit_job,
    habit_reference,
    job,
    reference,
    regathering_job,
)

_SP = {"sequence_parallel": True}
LAYOUTS = {
    "tp2 sp": (2, {"tp": 2, **_SP}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "num_microbatches": 2, **_SP}),
    "tp2 zero3 sp": (4, {"tp": 2, "zero": 3, **_SP}),
    "tp4 sp": (4, {"tp": 4, **_SP}),
    "tp2 ep2 sp": (2, {"tp": 2, "ep": 2, **_SP}),
    "cp2": (2, {"cp": 2}),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}),
    "cp2 tp2 sp": (4, {"cp": 2, "tp": 2, **_SP}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
    "cp2 zero3": (4, {"cp": 2, "zero": 3}),
    "cp4": (4, {"cp": 4}),
}
DENSE = [layout for layout in LAYOUTS if "ep2" not in layout]
USUAL = [
    ("llama", "cp2 tp2 sp", "sided"),
    ("qwen3", "cp2 pp2", None),
    ("window", "cp2", "packed"),
]
THOROUGH = [
    *[(family, layout, None) for family in ("llama", "qwen3") for layout in DENSE],
    *[(family, layout, "sided") for family in ("llama", "window") for layout in DENSE],
    *[("window", layout, "packed") for layout in DENSE],
    *[("bert", layout, None) for layout in DENSE if "tp4" not in layout],
    *[(name, layout, None) for name in ("gemma2", "gpt-oss") for layout in ("cp2", "cp2 pp2")],
    *[("gemma3", layout, None) for layout in DENSE],
    *[
        (name, layout, None)
        for name in ("vit", "t5", "t5 gated")
        for layout in ("tp2 sp", "tp2 pp2 sp")
    ],
    *[
        (name, layout, None)
        for name in ("mixtral", "qwen3 moe")
        for layout in ("tp2 sp", "tp2 ep2 sp", "tp2 pp2 sp")
    ],
]

REGATHERED = ("tp2 pp2 sp", "tp2 zero3 sp", "cp2 tp2 sp")


@pytest.mark.parametrize(
    ("family", "layout", "batch"),
    [
        *USUAL,
        *(pytest.param(*c, marks=pytest.mark.thorough) for c in THOROUGH if c not in USUAL),
    ],
)
def test_adopted_model_trains_on_parts_as_the_unmodified_one_on_sequences(
    pool, family, layout, batch
):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, options, world, batch)[0]
    assert largest_difference(found, reference(family, batch)) < 1e-9


# Dropout draws other masks; the others are refused under these layouts, by name.
_OTHER = {"Dropped", "Normalises", "Hooked"}


_USUAL = [
    ("Cached", "tp2 sp"),
    ("Cached", "cp2"),
    ("Given", "cp2"),
    ("Hidden", "tp2 sp"),
    ("Trusted", "cp2"),
]


@pytest.mark.parametrize(
    ("habit", "layout"),
    [
        *_USUAL,
        *(
            pytest.param(habit, layout, marks=pytest.mark.thorough)
            for habit in ("Cached", "Given", *(h for h in HABITS if h not in _OTHER))
            for layout in ("tp2 sp", "cp2", "cp2 tp2 sp")
            if (habit, layout) not in _USUAL
        ),
    ],
)
def test_habits_of_users_give_the_numbers_of_one_process(pool, habit, layout):
    world, options = LAYOUTS[layout]
    found, notes = pool.run(world, habit_job, habit, options, world)[0]
    expected, expected_notes = habit_reference(habit)
    assert largest_difference(found, expected) < 1e-9
    assert notes == pytest.approx(expected_notes, abs=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2 sp",
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("tp2 pp2 sp", "tp2 zero3 sp", "cp2 tp2 sp")
        ),
    ],
)
def test_gathered_sequences_are_not_kept_for_the_backward(pool, layout):
    world, options = LAYOUTS[layout]
    found, kept, kept_before = pool.run(world, regathering_job, "qwen3", options, world)[0]
    assert largest_difference(found, reference("qwen3")) < 1e-9
    assert kept < 0.95 * kept_before


@pytest.mark.parametrize(
    ("layout", "rows"),
    [("tp2 sp", 6), ("cp2", 6), pytest.param("cp2 tp2 sp", 4, marks=pytest.mark.thorough)],
)
def test_blocks_see_a_part_and_nobody_makes_whole_logits(pool, layout, rows):
    world, options = LAYOUTS[layout]
    _, notes = pool.run(world, habit_job, "Watched", options, world)[0]
    assert set(notes) == {rows, False}


def test_logits_are_whole_for_who_reads_them(pool):
    world, options = LAYOUTS["tp2 sp"]
    _, notes = pool.run(world, habit_job, "Reads", options, world)[0]
    assert set(notes) == {6, True}


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        ("Attentions", "output_attentions=True"),
        ("Hooked", "self.sizes"),
        ("Counts", "counts positions itself"),
        ("Untried", "could not be tried(.|\\n)*exchanges_context = True in its class, or cp=1"),
    ],
)
def test_what_is_of_a_part_only_is_refused_under_cp(pool, habit, text):
    with pytest.raises(WorkerError, match=rf"ConfigError(.|\n)*{text}"):
        pool.run(2, habit_job, habit, {"cp": 2}, 2)


def test_hooks_inside_of_blocks_are_refused_under_cp():
    assert "model.layers.1.mlp" in problems_of(InnerHook(True, 1), {"cp": 2}, 2)


def test_attention_of_its_own_is_refused_under_cp():
    assert "computes attention itself" in problems("t5", {"cp": 2}, 2)


def test_masks_that_a_ring_cannot_have_are_refused(pool):
    with pytest.raises(WorkerError, match=r"ConfigError(.|\n)*mask"):
        pool.run(2, job, "llama", {"cp": ContextConfig(degree=2, kind="ring")}, 2, "sided")
