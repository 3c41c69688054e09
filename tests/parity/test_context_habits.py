"""What a user writes around a split sequence gives one process's numbers, or an error of ours."""

import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest

import lightning_megatron
from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.comparison import Found, check_found
from tests.parity.context_habits import KEPT, REFUSED
from tests.parity.jobs import quiet_trainer

TOLERANCE = 1e-10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1": (2, {"cp": 2}),
    "zero 3": (2, {"cp": 2, "zero": 3}),
    "tp": (4, {"cp": 2, "tp": 2}),
    "pp": (4, {"cp": 2, "pp": 2, "num_microbatches": 1}),
}
_UNDER_PP = {"ByHand", "LooksAtGradients", "Contrasts", "Attacks"}
_UNDER_ZERO_3 = {"Attacks"}
"""Modules that a pipeline and ZeRO 3 refuse whatever cp is (`tests.parity.test_strangers`)."""


def job(options: dict[str, Any] | str, names: Sequence[str]) -> dict[str, Found]:
    """What each module trained, noted and logged."""
    found: dict[str, Found] = {}
    for name in names:
        L.seed_everything(5, verbose=False)
        module = KEPT[name]().double()
        strategy = options if isinstance(options, str) else MegatronStrategy(**options)
        trainer = quiet_trainer(strategy, max_epochs=1)
        trainer.fit(module)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found[name] = lightning_megatron.gather(module), module.notes, logged
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Found]:
    """What plain Lightning gives in one process."""
    found: dict[str, Found] = pool.run(1, job, "auto", list(KEPT))[0]
    return found


@pytest.mark.parametrize(
    "layout",
    # Some here, the rest in `make test-all`.
    ["zero 1", "pp", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("zero 3", "tp"))],
)
def test_strangers_train_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Found], layout: str
) -> None:
    ranks, options = LAYOUTS[layout]
    refused = _UNDER_PP if "pp" in options else _UNDER_ZERO_3 if "zero" in options else set()
    names = [name for name in KEPT if name not in refused]
    for found in pool.run(ranks, job, options, names):
        for name in names:
            check_found(name, found[name], alone[name], TOLERANCE)


def refused_job(name: str) -> None:
    quiet_trainer(MegatronStrategy(cp=2)).fit(REFUSED[name][0]().double())


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_part_can_keep_true_is_refused_by_name(pool: WorkerPool, name: str) -> None:
    with pytest.raises(WorkerError) as failure:
        pool.run(2, refused_job, name)
    text = str(failure.value).splitlines()[0]
    assert re.search(REFUSED[name][1], text), text
    assert "nearest valid" in text
