"""What a user may write gives one process's numbers under every layout, or an error of ours.

Each module runs under each layout, and either everything it trained, noted and logged is what plain
Lightning gives in one process, or the run ends in an error that says what to write instead. A new
way to spread a model belongs in `LAYOUTS`, a new habit in `tests.parity.strangers`.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest

import lightning_megatron
from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.comparison import Found, check_found
from tests.parity.jobs import quiet_trainer
from tests.parity.strangers import PENALTIES, STRANGERS

TOLERANCE = 1e-10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1": (2, {"zero": 1}),
    "zero 3": (2, {"zero": 3}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "num_microbatches": 1}),
    "all": (8, {"tp": 2, "pp": 2, "zero": 1, "num_microbatches": 1}),
}
# What a layout refuses, and what the error says. In each the user finds what to write instead.
_TP = {
    "StackedNorms": r"net\.up\.weight: cat was called .* of which each of tp=2 ranks",
    "Vectors": r"net\.up\.weight: cat was called .* of which each of tp=2 ranks",
    "RecomputedPenalty": r"net\.up\.weight: norm of a parameter .*within torch\.utils\.checkpoint",
    "NoisyWeights": r"net\.up\.weight: add combines .* with a tensor of shape \(4, 6\)",
    "NormedWeight": r"net\.down\.weight: a parametrization .* of a parameter that tp=2 slices",
}
_PP = {
    "ByHand": r"pp=2, automatic_optimization=False",
    "LossesOfBlocks": r"self\.losses: items of the PipelineSequential on pipeline rank 0 leave",
    "HookedFeatures": r"self\.features: items of the PipelineSequential on pipeline rank 0 leave",
    "SetsInHook": r"item 'head' of the PipelineSequential is on pipeline stage 1",
    "PenaltyOfOne": r"item 'up' of the PipelineSequential is on pipeline stage 0",
    "PenaltyTimesLoss": r"item 'up' of the PipelineSequential is on pipeline stage 0",
    "NotesWeights": r"goes through all parameters and takes numbers of them \(float\)",
    "NotesState": r"goes through all parameters and takes numbers of them \(float\)",
    **dict.fromkeys(
        ("LogsNorms", "NormByHand", "StackedNorms", "Penalty", "RecomputedPenalty", "Vectors"),
        r"(unites values of several parameters \(net\.|goes through all).*with pp=2 each rank has",
    ),
}
# Of the habits, those in which values or layers of several ranks meet: only there tp, pp and ZeRO
# at once could do what neither does alone. One of each kind, and in `make test-all` the others.
_TOGETHER = ("LogitsByHand", "ClipsByHand", "Lars", "Unfreezes", "SavesWeights")
_TOGETHER_TOO = (
    *("ClipsInHook", "NormOfEach", "NormalisesWeights", "HeadOnly", "RateOfLoss", "Gathers"),
)
# Habits that change at the end of an epoch what the next one does.
_SECOND_EPOCH = ("Unfreezes", "RateByHand", "RateOfLoss", "SavesWeights")
REFUSED: dict[str, dict[str, str]] = {
    "zero 3": {
        "RecomputedPenalty": r"norm of a parameter .*within torch\.utils\.checkpoint",
        "NoisyWeights": r"NoisyWeights\.on_train_batch_end: .*zero=2 or lower keeps parameters",
        "TensorHooks": r"Tensor\.register_hook was called .*under ZeRO 3.*nearest valid: zero=2",
    },
    "tp": _TP,
    "pp": _PP,
    "all": _PP | _TP,
}
COUNTS = "CountsParameters"
"""Under a pipeline it is warned that it counts those of a stage, where each number is true."""


def job(options: dict[str, Any] | str, names: list[str]) -> dict[str, Found]:
    """What each module trained, noted and logged."""
    found: dict[str, Found] = {}
    for name in names:
        L.seed_everything(5, verbose=False)
        module = STRANGERS[name]()
        strategy = options if isinstance(options, str) else MegatronStrategy(**options)
        trainer = quiet_trainer(strategy, max_epochs=2 if name in _SECOND_EPOCH else 1)
        trainer.fit(module)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found[name] = lightning_megatron.gather(module), module.notes, logged
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Found]:
    """What plain Lightning gives in one process."""
    found: dict[str, Found] = pool.run(1, job, "auto", list(STRANGERS))[0]
    return found


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        *((layout, tuple(STRANGERS)) for layout in LAYOUTS if layout != "all"),
        ("all", _TOGETHER),
        pytest.param("all", _TOGETHER_TOO, marks=pytest.mark.thorough),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_strangers_train_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Found], layout: str, names: Sequence[str]
) -> None:
    ranks, options = LAYOUTS[layout]
    names = [
        name
        for name in names
        if name not in REFUSED.get(layout, ()) and not (name == COUNTS and "pp" in options)
    ]
    for found in pool.run(ranks, job, options, names):
        for name in names:
            check_found(name, found[name], alone[name], TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("zero 3", "tp", "pp") for name in REFUSED[layout]],
)
def test_what_no_layout_can_keep_true_is_refused_by_name(
    pool: WorkerPool, layout: str, name: str
) -> None:
    ranks, options = LAYOUTS[layout]
    with pytest.raises(WorkerError) as failure:
        pool.run(ranks, job, options, [name])
    text = str(failure.value).splitlines()[0]
    assert re.search(REFUSED[layout][name], text), text
    assert "nearest valid" in text or "zero=2 or lower" in text


def penalty_job(name: str) -> None:
    pp = PipelineConfig(degree=2, partition=[3, 1])
    quiet_trainer(MegatronStrategy(pp=pp, num_microbatches=2)).fit(PENALTIES[name]())


@pytest.mark.parametrize("name", PENALTIES)
def test_penalty_on_weights_of_several_stages_is_refused_on_a_stage_with_one(
    pool: WorkerPool, name: str
) -> None:
    text = r"goes through all parameters and takes numbers of them \(r?add\), and with pp=2"
    with pytest.raises(WorkerError, match=text):
        pool.run(2, penalty_job, name)


def warnings_job(options: dict[str, Any], name: str = COUNTS) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(MegatronStrategy(**options)).fit(STRANGERS[name]())
    return [str(warning.message) for warning in caught]


def test_counts_of_a_stage_are_warned_of(pool: WorkerPool) -> None:
    texts, _ = pool.run(2, warnings_job, {"pp": 2, "num_microbatches": 1})  # of the last stage
    found = [text for text in texts if "goes through all parameters" in text]
    assert len(found) == 1
    assert "(numel), and with pp=2 each rank has those of its own stages" in found[0]


def test_what_steps_carry_from_batch_to_batch_is_warned_of_where_they_see_microbatches(
    pool: WorkerPool,
) -> None:
    texts, _ = pool.run(2, warnings_job, {"pp": 2, "num_microbatches": 2}, "Centres")
    found = [text for text in texts if "reads it before its trunk" in text]
    assert len(found) == 1
    assert "num_microbatches=1" in found[0]
