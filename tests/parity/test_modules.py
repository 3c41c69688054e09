"""Modules as users write them give one process's numbers under every layout, or an error of ours.

The modules and layouts are those of `tests.parity.table`; `tests.parity.prove` says what is held.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import pytest
import torch

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.comparison import Found
from tests.parity.epoch_ends import NotedByRank
from tests.parity.prove import (
    Meeting,
    check_refused,
    check_trained,
    meetings,
    quiet_trainer,
    refuse_all,
    train_all,
)
from tests.parity.table import LAYOUTS, TABLE

IN_A_JOB = 12
"""Most modules of one job."""
MEETINGS = sorted(meetings(TABLE, LAYOUTS), key=lambda m: (m.thorough, m.layout, m.name))
References = Callable[[Iterable[str]], dict[str, Found]]


def jobs(chosen: Callable[[Meeting], bool]) -> list[Any]:
    """Layouts with the modules that meet them in one job, as parameters of a test."""
    found = [meeting for meeting in MEETINGS if chosen(meeting)]
    made = []
    for (thorough, layout), group in groupby(found, key=lambda m: (m.thorough, m.layout)):
        names = [meeting.name for meeting in group]
        for first in range(0, len(names), IN_A_JOB):
            part = names[first : first + IN_A_JOB]
            marks = [pytest.mark.thorough] * thorough
            title = f"{layout}: {' '.join(name.rpartition('/')[2] for name in part)}"
            made.append(pytest.param(layout, part, id=title, marks=marks))
    return made


@pytest.fixture(scope="session")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> References:
    """What plain Lightning gives in one process: one run of each module."""
    known: dict[str, Found] = {}

    def of(names: Iterable[str]) -> dict[str, Found]:
        entries = {name: TABLE[name] for name in names if name not in known}
        if entries:
            directory = str(tmp_path_factory.mktemp("alone"))
            [found] = pool.run(1, train_all, entries, "auto", directory, timeout=_limit(entries))
            known.update({name: left for name, (left, _) in found.items()})
        return known

    return of


def _limit(entries: Any) -> float:
    """Seconds that modules may take on a machine that does much else."""
    return 200 + 20 * len(entries)


@pytest.mark.parametrize(("layout", "names"), jobs(lambda m: m.refused is None))
def test_modules_train_as_in_one_process(
    pool: WorkerPool, alone: References, tmp_path: Any, layout: str, names: list[str]
) -> None:
    where, entries = LAYOUTS[layout], {name: TABLE[name] for name in names}
    expected = alone(names)
    job = (train_all, entries, where.options, str(tmp_path))
    for rank, found in enumerate(pool.run(where.ranks, *job, timeout=_limit(entries))):
        for name, entry in entries.items():
            check_trained(name, entry, (layout, where), found[name], expected[name], rank)


@pytest.mark.parametrize(("layout", "names"), jobs(lambda m: m.refused is not None and not m.apart))
def test_what_no_layout_can_keep_true_is_refused_by_name(
    pool: WorkerPool, tmp_path: Any, layout: str, names: list[str]
) -> None:
    """By every rank, so that none waits for another."""
    where, entries = LAYOUTS[layout], {name: TABLE[name] for name in names}
    words = {m.name: str(m.refused) for m in MEETINGS if m.layout == layout}
    job = (refuse_all, entries, where.options, str(tmp_path))
    for found in pool.run(where.ranks, *job, timeout=_limit(entries)):
        for name in names:
            check_refused(name, layout, words[name], found[name])


@pytest.mark.parametrize(
    "meeting",
    [
        pytest.param(m, id=f"{m.layout}: {m.name}", marks=[pytest.mark.thorough] * m.thorough)
        for m in MEETINGS
        if m.refused is not None and m.apart
    ],
)
def test_what_one_rank_refuses_ends_the_run(
    pool: WorkerPool, tmp_path: Any, meeting: Meeting
) -> None:
    where = LAYOUTS[meeting.layout]
    entries = {meeting.name: TABLE[meeting.name]}
    with pytest.raises(WorkerError) as failure:
        pool.run(where.ranks, train_all, entries, where.options, str(tmp_path))
    text = str(failure.value).splitlines()[0]
    check_refused(meeting.name, meeting.layout, str(meeting.refused), text)


def test_every_entry_says_something_of_a_layout() -> None:
    kinds = {layout.kind for layout in LAYOUTS.values()}
    for name, entry in TABLE.items():
        said = {*entry.also, *entry.without, *entry.refused, *entry.warned, *entry.aside}
        assert set(entry.kinds) <= kinds, name
        assert said <= kinds | LAYOUTS.keys(), name
        assert any(meeting.name == name for meeting in MEETINGS), name
    assert {meeting.layout for meeting in MEETINGS} == LAYOUTS.keys()


# What is not the same in one process --------------------------------------------------------------


def test_batch_norm_is_that_of_ddp(pool: WorkerPool, tmp_path: Any) -> None:
    """It sees the samples of one rank."""
    entries = {"classifier": TABLE["plain/classifier"]}
    [(ddp, _), _] = (
        found["classifier"] for found in pool.run(2, train_all, entries, "ddp", str(tmp_path))
    )
    for zero in (0, 1, 3):
        first, second = pool.run(2, train_all, entries, {"zero": zero}, str(tmp_path))
        for (weights, _, logged), _ in (first["classifier"], second["classifier"]):
            assert logged == pytest.approx(ddp[2], rel=1e-10)
            for name, value in weights.items():
                if "running" not in name or weights is first["classifier"][0][0]:
                    torch.testing.assert_close(value, ddp[0][name], rtol=1e-10, atol=1e-10)


def noted_job(options: dict[str, Any]) -> tuple[list[Any], bool]:
    """Notes of the module, and whether its Trainer has the callbacks that it began with."""
    module = NotedByRank()
    trainer = quiet_trainer(MegatronStrategy(**options))
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.fit(module)
    return module.notes, callbacks == trainer.callbacks  # type: ignore[attr-defined]


def test_what_only_hooks_fill_stays_that_of_each_rank(pool: WorkerPool) -> None:
    assert pool.run(2, noted_job, {"pp": 2}) == [([0] * 3, True), ([1] * 3, True)]


def test_what_steps_carry_from_batch_to_batch_is_warned_of_where_they_see_microbatches(
    pool: WorkerPool, tmp_path: Any
) -> None:
    entries = {"Centres": TABLE["strangers/Centres"]}
    options = {"pp": 2, "num_microbatches": 2}
    (_, texts), _ = (
        found["Centres"] for found in pool.run(2, train_all, entries, options, str(tmp_path))
    )
    found = [text for text in texts if "reads it before its trunk" in text]
    assert len(found) == 1
    assert "num_microbatches=1" in found[0]
