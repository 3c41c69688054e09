"""The front of the pipeline schedules: their names, their rules, and how to make one.

A schedule is one list of actions per rank (`schedules.actions`) that respects what actions need of
each other. The runner executes the list, receiving before an action what it needs and sending
afterwards what it made, and `schedules.simulate` predicts what the list costs. All schedules
compute the same gradients. They differ in how long ranks stand idle (the *bubble*), in how many
microbatches they hold the activations of (the *live activations*, which set the peak memory), and
in how often messages cross from rank to rank.

For ``p`` ranks with ``v`` stages each, ``m >= p`` microbatches that take each rank the time ``T``
(forward and both halves of the backward a third each), and activations counted in those of one
microbatch on a whole rank:

=============  =========  ============  ============  ======================================
name           placement  bubble        peak live     for
=============  =========  ============  ============  ======================================
gpipe          1          (p-1) T       m             slow transfers, few microbatches
1f1b           1          (p-1) T       p             the default
interleaved    v looped   (p-1) T/v     p + (p-1)/v   smaller bubble, fast transfers
breadth-first  v looped   (p-1) T/v     m             ZeRO-3: each stage gathered once
zb-h1          1 (or v)   (p-1) T/3     p             a third of the bubble of 1f1b
zb-h2          1          (p-1) T/3     2p - 1        no bubble, if steps flow into each other
zbv            2, V       (p-1) T/6     p             the smallest bubble
v-half         2, V       (p-1) T/2     (p+2)//2      half the memory and bubble of 1f1b
v-min          2, V       2 (p-1) T/3   (p+4)//3      a third of the memory of 1f1b
dualpipev      2, V       (p-1) T/6     p + 1/2       pairs that can overlap (experts)
=============  =========  ============  ============  ======================================

The bubble is what the step takes beyond ``m T``; that of v-min is up to ``T/6`` longer.
``custom`` reads a table from a file (`schedules.custom`). Drawings, formulas and sources
stand in the files of `pipeline.schedules`.

**forward only** (validation, test, predict): gpipe without its second half, nothing stays live.

Any number of microbatches is legal for every schedule, fewer than ranks included; a bubble is then
unavoidable. On every stage, every kind of action takes the microbatches in ascending order
(``custom`` apart), so that gradients are summed in the same order everywhere.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.schedules.actions import Action, Kind, Rows, Schedule, looped, v_shaped
from lightning_megatron.schedules.breadth_first import breadth_first
from lightning_megatron.schedules.custom import load_schedule
from lightning_megatron.schedules.dual_pipe import dualpipev
from lightning_megatron.schedules.one_f_one_b import interleaved, one_f_one_b
from lightning_megatron.schedules.simulate import DeadlockError, simulate
from lightning_megatron.schedules.v_shaped import v_half, v_min, zbv
from lightning_megatron.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "default_stages_per_rank",
    "forward_only",
    "load_schedule",
    "make_schedule",
    "schedule_problems",
]


@dataclass(frozen=True)
class _Family:
    """Recipe of the schedules of one name."""

    rows: Callable[[int, int, int], Rows]
    """Rows of actions, from ranks, microbatches and stages per rank."""
    stages_per_rank: int = 1
    """Default number."""
    any_stages_per_rank: bool = False
    """Whether other numbers of stages per rank are legal."""
    placement: Callable[[int, int], tuple[int, ...]] = looped
    """Placement of stages, from ranks and stages per rank."""


def _v(rows: Callable[[int, int], Rows]) -> _Family:
    return _Family(lambda p, m, _: rows(p, m), 2, placement=lambda p, _: v_shaped(p))


_FAMILIES: dict[str, _Family] = {
    "gpipe": _Family(breadth_first),
    "1f1b": _Family(lambda p, m, _: one_f_one_b(p, m)),
    "interleaved": _Family(interleaved, 2, any_stages_per_rank=True),
    "breadth-first": _Family(breadth_first, 2, any_stages_per_rank=True),
    "zb-h1": _Family(zb_h1, any_stages_per_rank=True),
    "zb-h2": _Family(lambda p, m, _: zb_h2(p, m)),
    "zbv": _v(zbv),
    "v-half": _v(v_half),
    "v-min": _v(v_min),
    "dualpipev": _v(dualpipev),
}

SCHEDULES = tuple(_FAMILIES)
"""Names of the schedules that are generated; `make_schedule` knows ``"custom"`` besides."""

CUSTOM = "custom"
"""Name of a schedule that is read from a file."""
AUTO = "auto"
"""Name that stands for the fastest of `SCHEDULES`; `schedules.search` finds it."""


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    table: str | Path | None = None,
) -> Schedule:
    """Generate the schedule ``name``, or read it.

    Args:
        name: one of `SCHEDULES` or ``"custom"``.
        num_ranks: degree of pipeline parallelism.
        num_microbatches: pieces of the batch, any number of at least 1.
        stages_per_rank: parts of the network on each rank; `default_stages_per_rank` by default.
        table: for ``"custom"``, the file (`load_schedule`). Its ranks, microbatches and stages must
            be as many as the other arguments say.

    Raises:
        ConfigError: when `schedule_problems` finds a fault, or the actions of a table wait for each
            other in a circle.

    >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    >>> print(*schedule.row(0))
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    """
    raise_if_any(schedule_problems(name, num_ranks, num_microbatches, stages_per_rank, table))
    if name == CUSTOM and table is not None:
        schedule = load_schedule(table)
        raise_if_any(_table_problems(schedule, num_ranks, num_microbatches, stages_per_rank, table))
        try:
            simulate(schedule)
        except DeadlockError as error:
            raise ConfigError(
                f"table={str(table)!r}: {error}; nearest valid: actions in an order in which each "
                "stands behind those that it needs"
            ) from None
        return schedule
    family = _FAMILIES[name]
    count = stages_per_rank or default_stages_per_rank(name)
    rows = family.rows(num_ranks, num_microbatches, count)
    return Schedule(name, num_microbatches, family.placement(num_ranks, count), rows)


def default_stages_per_rank(name: str) -> int:
    """Stages per rank where the user names none: the fewest with which it is itself.

    >>> default_stages_per_rank("zbv"), default_stages_per_rank("1f1b")
    (2, 1)
    """
    return _FAMILIES[name].stages_per_rank if name in _FAMILIES else 1


def forward_only(
    num_ranks: int, num_microbatches: int, stage_ranks: Sequence[int] | None = None
) -> Schedule:
    """Schedule of an evaluation: every stage forwards every microbatch once.

    Args:
        num_ranks: degree of pipeline parallelism.
        num_microbatches: pieces of the batch; any number, it need not equal that of training.
        stage_ranks: rank of every stage, as in the `Schedule` used for training; one stage per
            rank by default. A rank with several stages finishes the earlier one first, which is
            free of deadlocks for every placement.
    """
    placement = tuple(range(num_ranks)) if stage_ranks is None else tuple(stage_ranks)
    actions = tuple(
        tuple(
            Action(Kind.FORWARD, stage, microbatch)
            for stage, owner in enumerate(placement)
            if owner == rank
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("forward_only", num_microbatches, placement, actions)


def schedule_problems(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    table: str | Path | None = None,
) -> list[str]:
    """Faults of a choice of schedule, found without making it (or reading ``table``).

    >>> print(*schedule_problems("zb-v", 4, 8)[:1])  # doctest: +ELLIPSIS
    schedule='zb-v': the schedule is one of gpipe, 1f1b, ...; nearest valid: schedule='zbv'
    """
    problems = [
        f"{option}={value!r}: {what} is a whole number of at least 1; nearest valid: {option}=1"
        for option, value, what in (
            ("pp", num_ranks, "the number of pipeline ranks"),
            ("num_microbatches", num_microbatches, "the number of microbatches"),
            ("stages_per_rank", stages_per_rank, "the number of stages on a rank"),
        )
        if value is not None
        and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
    ]
    known = (*SCHEDULES, CUSTOM)
    if name not in known:
        choices = known if name == AUTO else (*known, AUTO)  # who knows it has taken it out
        problems.append(
            f"schedule={name!r}: the schedule is one of {', '.join(choices)}; "
            f"nearest valid: schedule={_nearest_name(name)!r}"
        )
    elif (name == CUSTOM) != (table is not None):
        problems.append(
            f"schedule={name!r}, table={table and str(table)!r}: a table belongs to "
            f"schedule='custom' and only to it; nearest valid: "
            + ("a path to a .csv or .json file" if table is None else "schedule='custom'")
        )
    elif name != CUSTOM and not problems and stages_per_rank is not None:
        family = _FAMILIES[name]
        only = family.stages_per_rank
        if not family.any_stages_per_rank and stages_per_rank != only:
            problems.append(
                f"schedule={name!r}, stages_per_rank={stages_per_rank}: {name} runs "
                f"{'one stage' if only == 1 else 'two stages'} per rank; "
                f"nearest valid: stages_per_rank={only}"
            )
    return problems


def _table_problems(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None,
    table: str | Path,
) -> list[str]:
    return [
        f"table={str(table)!r}, {option}={asked}: the table is made for {found}; "
        f"nearest valid: {option}={found}"
        for option, asked, found in (
            ("pp", num_ranks, schedule.num_ranks),
            ("num_microbatches", num_microbatches, schedule.num_microbatches),
            ("stages_per_rank", stages_per_rank, schedule.stages_per_rank),
        )
        if asked not in (None, found)
    ]


def _nearest_name(name: object) -> str:
    close = difflib.get_close_matches(str(name).lower(), (*SCHEDULES, AUTO), n=1, cutoff=0.4)
    return close[0] if close else "1f1b"
