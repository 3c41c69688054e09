"""What a user writes around experts that are spread gives one process's numbers, or an error."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest

import lightning_megatron
from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.comparison import Found, check_found
from tests.parity.expert_habits import MIXED, NEVER, OWN
from tests.parity.jobs import quiet_trainer
from tests.parity.test_strangers import COUNTS
from tests.parity.test_strangers import REFUSED as OF_ALL

TOLERANCE = 1e-10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"ep": 2}),
    "ep zero 0": (2, {"ep": 2, "zero": 0}),
    "ep zero 3": (4, {"ep": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
    "ep tp": (4, {"ep": 4, "tp": 2, "zero": 2}),
    "ep pp": (4, {"ep": 2, "pp": 2, "num_microbatches": 1}),
}
_OF_STAGES = OF_ALL["pp"]
KINDS: dict[str, type[Any]] = {**MIXED, **OWN}
_CUT = {
    "StackedNorms": r"cat was called .* of which each of (ep|tp)=\d ranks",
    "Vectors": r"cat was called .* of which each of (ep|tp)=\d ranks",
    "RecomputedPenalty": r"norm of a parameter .*within torch\.utils\.checkpoint",
    "NoisyWeights": r"add combines .*of which each of (ep|tp)=\d ranks holds a part",
}
REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys(LAYOUTS, _CUT),
    "ep zero 3": {
        **_CUT,
        "NoisyWeights": r"NoisyWeights\.on_train_batch_end: .*zero=2 or lower keeps parameters",
        "TensorHooks": r"Tensor\.register_hook was called .*under ZeRO 3.*nearest valid: zero=2",
    },
    # What a pipeline refuses whatever ep is: `tests.parity.test_strangers`. The others have none.
    "ep pp": dict.fromkeys((*_OF_STAGES, *_CUT, *OWN, COUNTS), ""),
}
_QUICK = {
    "ep tp": (*OWN, "ClipsByHand", "PenaltyTimesLoss", "NormOfEach", "SavesWeights", "NotesState"),
    "ep zero 3": (*OWN, "ClipsByHand", "PenaltyTimesLoss", "ByHand"),
}
"""Of each kind under the layouts with most in them; all others in `make test-all`."""
_SECOND_EPOCH = ("Unfreezes", "RateByHand", "RateOfLoss", "SavesWeights", "Freezes")


def train(name: str, options: dict[str, Any] | str) -> Found:
    L.seed_everything(5, verbose=False)
    module = KINDS[name]().double()
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = quiet_trainer(strategy, max_epochs=2 if name in _SECOND_EPOCH else 1)
    trainer.fit(module)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return lightning_megatron.gather(module), module.notes, logged


def job(options: dict[str, Any] | str, names: Sequence[str]) -> dict[str, Found | str]:
    """What each module trained, noted and logged, or the error in which it ended."""
    found: dict[str, Found | str] = {}
    for name in names:
        try:
            found[name] = train(name, options)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Found]:
    """What plain Lightning gives in one process."""
    found: dict[str, Found] = pool.run(1, job, "auto", list(KINDS))[0]
    return found


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        *_QUICK.items(),
        *(pytest.param(layout, tuple(KINDS), marks=pytest.mark.thorough) for layout in LAYOUTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_strangers_train_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Found], layout: str, kinds: Sequence[str]
) -> None:
    ranks, options = LAYOUTS[layout]
    names = [name for name in kinds if name not in REFUSED[layout]]
    for found in pool.run(ranks, job, options, names):
        assert {name: text for name, text in found.items() if isinstance(text, str)} == {}
        for name in names:
            check_found(name, found[name], alone[name], TOLERANCE)


def refused_job(name: str, options: dict[str, Any]) -> None:
    train(name, options)


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("ep", "ep zero 3") for name in REFUSED[layout]],
)
def test_what_no_layout_can_keep_true_is_refused_by_name(
    pool: WorkerPool, layout: str, name: str
) -> None:
    ranks, options = LAYOUTS[layout]
    with pytest.raises(WorkerError) as failure:
        pool.run(ranks, refused_job, name, options)
    text = str(failure.value).splitlines()[0]
    assert re.search(REFUSED[layout][name], text), text
    assert "nearest valid" in text or "zero=2 or lower" in text


def never_job(name: str) -> None:
    quiet_trainer(MegatronStrategy(ep=2)).fit(NEVER[name][0]().double())


@pytest.mark.parametrize("name", NEVER)
def test_experts_of_which_a_rank_has_others_are_refused(pool: WorkerPool, name: str) -> None:
    with pytest.raises(WorkerError) as failure:
        pool.run(2, never_job, name)
    text = str(failure.value).splitlines()[0]
    assert re.search(NEVER[name][1], text), text
    assert "nearest valid" in text


def hook_job(options: dict[str, Any]) -> list[str]:
    module = OWN["SharesBias"]().double()
    module.mix.router.register_forward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(MegatronStrategy(**options), max_steps=2).fit(module)
    return [str(w.message) for w in caught if "forward hook of a router" in str(w.message)]


def test_hooks_that_get_a_part_of_the_tokens_are_warned_of(pool: WorkerPool) -> None:
    for said in pool.run(2, hook_job, {"tp": 2, "ep": 2}):
        assert len(said) == 1
        assert "a part of those of tp=2" in said[0]
    assert pool.run(2, hook_job, {"ep": 2}) == [[], []]
