"""What a user writes around an adopted model: plain Lightning's numbers, or an error of ours."""

import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import lightning as L
import pytest

from lightning_megatron import MegatronStrategy, gather
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.adoption.habits import HABITS
from tests.adoption.harness import KeepDouble, fit
from tests.parity.comparison import Found, check_found

USUAL = {
    # Logits are split, parts of the model called, and weights read.
    "tp": (
        *("OwnLoss", "OfProbabilities", "PartOfLogits", "Embedded", "Twice", "Teacher"),
        *("ValueHead", "Hooked", "NotesNorms", "ByHand", "ResizedLate", "Skips"),
    ),
    # Stages have some of the blocks; the last one has the loss.
    # Hooks see the weights of all.
    "pp": (
        *("OwnLoss", "AsTuple", "PartOfLogits", "Frozen", "Recomputes", "Resized", "Evaluates"),
        *("Normalises", "NotesNorms"),
    ),
    # Positions matter.
    "cp": (
        *("OwnLoss", "AsTuple", "PartOfLogits", "Embedded", "Hidden", "Twice"),
        *("ValueHead", "Evaluates"),
    ),
}
"""Habits that meet code of their own under a layout; every one is here or in `REFUSED`."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tp": 2}),
    "tp sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp": (2, {"pp": 2, "num_microbatches": 1}),
    "zero 3": (2, {"zero": 3}),
    "cp": (2, {"cp": 2}),
}
REFUSED: dict[str, dict[str, str]] = {
    "cp": {"Hooked": r"self\.sizes: items of the PipelineSequential leave tensors there"},
    "pp": {
        "Embedded": r"calls its item 'model\.layers\.0' where 'model\.embed_tokens' would be next",
        "Hidden": r"output_hidden_states=True: a pipeline stage has the outputs of its own layers",
        "Hooked": r"self\.sizes: items of the PipelineSequential on pipeline rank 0 leave tensors",
        "Twice": r"called its PipelineSequential twice",
        "Teacher": r"pp=2: the module holds 2 PipelineSequentials \(lm, teacher\)",
        "ValueHead": r"is on pipeline stage 1; it can only be reached",
        "ByHand": r"pp=2, automatic_optimization=False",
        "Skips": r"calls its item 'model\.norm' where 'model\.layers\.2' would be next",
    },
}


def _trained(name: str, strategy: Any, world: int, copies: int, *, adopted: bool) -> Found:
    L.seed_everything(5, verbose=False)
    module = HABITS[name](adopted, copies)
    with KeepDouble():
        trainer = fit(module, strategy, world)
    weights = gather(module) if adopted else module.state_dict()
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return weights, module.notes, logged


def job(names: list[str], options: dict[str, Any], world: int) -> dict[str, Found]:
    """What each module trained, noted and logged."""
    copies = world // math.prod(options.get(axis, 1) for axis in ("tp", "pp", "cp"))
    return {
        name: _trained(name, MegatronStrategy(**options), world, copies, adopted=True)
        for name in names
    }


@functools.cache
def expected(name: str) -> Found:
    return _trained(name, "auto", 1, 1, adopted=False)


@pytest.mark.parametrize(
    ("layout", "habits"),
    [
        *USUAL.items(),
        *(
            pytest.param(
                layout,
                [name for name in HABITS if name not in USUAL.get(layout, ())],
                marks=pytest.mark.thorough,
            )
            for layout in LAYOUTS
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_habits_train_as_in_one_process(
    layout: str, habits: Iterable[str], pool: WorkerPool
) -> None:
    world, options = LAYOUTS[layout]
    names = [name for name in habits if name not in REFUSED.get(layout, {})]
    found = pool.run(world, job, names, options, world)[0]
    for name in names:
        check_found(name, found[name], expected(name), 1e-9)


def test_every_habit_is_usual_under_some_layout() -> None:
    usual = {name for names in USUAL.values() for name in names}
    assert usual | {name for names in REFUSED.values() for name in names} == set(HABITS)


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout, names in REFUSED.items() for name in names]
)
def test_other_habits_end_in_an_error_that_says_what_to_do(
    layout: str, name: str, pool: WorkerPool
) -> None:
    world, options = LAYOUTS[layout]
    with pytest.raises(WorkerError) as info:
        pool.run(world, job, [name], options, world, grace=1.0)  # peers only wait
    said = " ".join(failure.summary for failure in info.value.failures)
    said += " ".join(failure.traceback or "" for failure in info.value.failures)
    assert re.search(REFUSED[layout][name], said, re.DOTALL)
