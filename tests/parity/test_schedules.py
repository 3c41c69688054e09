"""Every pipeline schedule trains the same weights, on every placement, with ZeRO and recomputation.

The rows are data, chosen so that every pair of values that some legal row has is covered, with as
few processes as possible. By default that goes for families of schedules within four processes and
for fewer values, and every schedule runs; in `make test-all` every schedule meets every value.
"""

import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.schedules.custom import dump_schedule
from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule, schedule_problems
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity.jobs import Outcome, train_job
from tests.parity.reference import Data, reference_curve
from tests.parity.test_matrix import check

MOST_PROCESSES = 8
DATA = Data()
_SPLIT, _V = "splits backwards", "splits backwards, forms a V"
FAMILIES = dict.fromkeys(SCHEDULES, "backwards are whole")
FAMILIES |= dict.fromkeys(("zb-h1", "zb-h2"), _SPLIT)
FAMILIES |= dict.fromkeys(("zbv", "v-half", "v-min", "dualpipev"), _V)


@dataclass(frozen=True)
class Row:
    """One way to run a pipeline."""

    schedule: str
    pp: int
    stages_per_rank: int
    data_parallel: str
    """``dp=1``, or the ZeRO stage over two ranks."""
    recompute: bool
    tp: int
    num_microbatches: int

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * (1 if self.data_parallel == "dp=1" else 2)

    @property
    def legal(self) -> bool:
        return self.world_size <= MOST_PROCESSES and not schedule_problems(
            self.schedule, self.pp, 1, self.stages_per_rank
        )

    def options(self) -> dict[str, Any]:
        """Arguments of the strategy."""
        zero = 1 if self.data_parallel == "dp=1" else int(self.data_parallel[-1])
        return {
            "pp": PipelineConfig(
                degree=self.pp, schedule=self.schedule, stages_per_rank=self.stages_per_rank
            ),
            "tp": self.tp,
            "zero": ShardingConfig(stage=zero, min_numel=1),
            "num_microbatches": self.num_microbatches,
            "activations": ActivationConfig(recompute="full" if self.recompute else "none"),
        }

    def pairs(self, by_family: bool) -> set[tuple[str, str]]:
        """The pairs of values that this row puts to the test; of schedules or of their families."""
        schedule, *values = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        known = FAMILIES[self.schedule] if by_family else schedule
        return {*itertools.combinations([known, *values], 2), (schedule, schedule)}

    def __str__(self) -> str:
        parts = [self.schedule, f"pp={self.pp}", self.data_parallel, f"m={self.num_microbatches}"]
        parts += [f"x{self.stages_per_rank}"] * (self.stages_per_rank > 1)
        parts += ["tp=2"] * (self.tp > 1) + ["recompute"] * self.recompute
        return " ".join(parts)


def legal_rows(
    pp: tuple[int, ...],
    tp: tuple[int, ...],
    data_parallel: tuple[str, ...],
    num_microbatches: tuple[int, ...],
    most: int,
) -> list[Row]:
    values = (
        *(SCHEDULES, pp, (1, 2), data_parallel),
        *((False, True), tp, num_microbatches),
    )
    made = itertools.starmap(Row, itertools.product(*values))
    return [row for row in made if row.world_size <= most and row.legal]


ROWS = (
    Row("1f1b", 3, 1, "dp=1", False, 1, 3),
    Row("zbv", 3, 2, "dp=1", True, 1, 1),
    Row("zb-h2", 2, 1, "zero 1", True, 1, 1),
    Row("breadth-first", 2, 2, "dp=1", False, 1, 1),
    Row("interleaved", 2, 1, "zero 3", True, 1, 1),
    Row("v-half", 2, 2, "zero 1", False, 1, 3),
    Row("zb-h1", 3, 2, "dp=1", False, 1, 3),
    Row("v-min", 2, 2, "zero 3", False, 1, 1),
    Row("dualpipev", 2, 2, "dp=1", True, 1, 3),
    Row("gpipe", 2, 1, "zero 1", False, 1, 3),
    Row("zb-h1", 2, 1, "zero 3", False, 1, 3),
)
FURTHER = (
    Row("zb-h1", 2, 2, "dp=1", True, 1, 3),
    Row("zbv", 3, 2, "dp=1", False, 1, 4),
    Row("1f1b", 2, 1, "zero 0", True, 1, 4),
    Row("v-half", 2, 2, "zero 1", True, 1, 1),
    Row("zb-h2", 2, 1, "zero 3", False, 1, 3),
    Row("interleaved", 3, 1, "dp=1", True, 1, 3),
    Row("breadth-first", 2, 2, "zero 3", True, 1, 1),
    Row("v-min", 2, 2, "zero 0", False, 1, 3),
    Row("zb-h1", 2, 1, "zero 1", False, 1, 4),
    Row("zb-h1", 3, 1, "dp=1", False, 1, 1),
    Row("dualpipev", 2, 2, "zero 3", False, 1, 4),
    Row("zb-h1", 2, 1, "zero 0", False, 1, 1),
    Row("gpipe", 2, 1, "dp=1", False, 1, 1),
    Row("interleaved", 3, 2, "dp=1", True, 1, 3),
    Row("1f1b", 2, 1, "dp=1", True, 2, 4),
    Row("breadth-first", 2, 2, "zero 0", False, 1, 4),
    Row("zb-h1", 2, 1, "zero 1", False, 1, 3),
    Row("zbv", 2, 2, "zero 3", True, 1, 1),
    Row("zb-h2", 3, 1, "zero 3", False, 1, 4),
    Row("v-half", 4, 2, "dp=1", False, 1, 1),
    Row("v-min", 3, 2, "dp=1", False, 2, 1),
    Row("dualpipev", 2, 2, "zero 1", True, 1, 1),
    Row("gpipe", 4, 1, "zero 0", True, 1, 3),
    Row("interleaved", 2, 1, "zero 0", False, 1, 1),
    Row("breadth-first", 2, 1, "dp=1", True, 2, 3),
    Row("zb-h1", 4, 2, "dp=1", True, 1, 4),
    Row("v-min", 2, 2, "zero 1", True, 1, 4),
    Row("1f1b", 4, 1, "zero 3", False, 1, 3),
    Row("zb-h2", 2, 1, "dp=1", True, 2, 1),
    Row("zbv", 4, 2, "dp=1", False, 2, 3),
    Row("v-half", 2, 2, "zero 0", True, 2, 3),
    Row("dualpipev", 3, 2, "dp=1", False, 1, 3),
    Row("gpipe", 3, 1, "zero 1", False, 1, 4),
    Row("1f1b", 3, 1, "zero 0", False, 1, 1),
    Row("interleaved", 2, 1, "zero 1", False, 2, 4),
    Row("breadth-first", 4, 1, "zero 1", False, 1, 1),
    Row("zb-h1", 2, 1, "zero 3", False, 2, 1),
    Row("zbv", 3, 2, "zero 0", False, 1, 4),
    Row("v-half", 3, 2, "zero 1", False, 1, 4),
    Row("zb-h2", 4, 1, "zero 0", False, 1, 3),
    Row("v-min", 4, 2, "zero 0", False, 1, 3),
    Row("dualpipev", 2, 2, "zero 0", False, 2, 4),
    Row("breadth-first", 3, 1, "zero 3", False, 1, 1),
    Row("zb-h1", 3, 1, "zero 0", False, 1, 1),
    Row("gpipe", 2, 1, "zero 3", False, 2, 1),
    Row("interleaved", 4, 1, "zero 3", False, 1, 1),
    Row("dualpipev", 4, 2, "zero 3", False, 1, 1),
    Row("1f1b", 2, 1, "zero 1", False, 1, 1),
    Row("zb-h2", 2, 1, "zero 1", False, 1, 1),
    Row("zbv", 2, 2, "zero 1", False, 1, 1),
    Row("v-half", 2, 2, "zero 3", False, 1, 1),
)
"""Of `make test-all`."""


def test_rows_cover_all_pairs() -> None:
    for rows, by_family, legal in (
        (ROWS, True, legal_rows((2, 3), (1,), ("dp=1", "zero 1", "zero 3"), (1, 3), 4)),
        (
            ROWS + FURTHER,
            False,
            legal_rows(
                (2, 3, 4), (1, 2), ("dp=1", "zero 0", "zero 1", "zero 3"), (1, 3, 4), MOST_PROCESSES
            ),
        ),
    ):
        possible = set().union(*(row.pairs(by_family) for row in legal))
        covered = set().union(*(row.pairs(by_family) for row in rows))
        assert sorted(possible - covered) == []
        assert set(rows) <= set(legal)
        assert len(set(rows)) == len(rows)


OFFLOAD = ActivationConfig(offload=True, offload_min_bytes=0)


def two(schedule: str, *, in_parts: bool = False) -> dict[str, Any]:
    """A pipeline of two ranks; with ``in_parts`` also two tp ranks that send their parts."""
    if in_parts:
        return {"tp": 2, "pp": PipelineConfig(degree=2, schedule=schedule, scatter_gather=True)}
    return {"pp": PipelineConfig(degree=2, schedule=schedule)}


EXTRAS: dict[str, tuple[int, dict[str, Any]]] = {
    "hybrid sharding, zbv": (8, {**two("zbv"), "zero": ShardingConfig(stage=3, dp_replicate=2)}),
    "hybrid sharding, interleaved": (
        8,
        {**two("interleaved"), "zero": ShardingConfig(stage=1, dp_replicate=2)},
    ),
    "zero 2, zb-h1": (4, {**two("zb-h1"), "zero": 2}),
    "zero 2, dualpipev": (4, {**two("dualpipev"), "zero": 2}),
    "the user's checkpointed blocks, zbv": (2, two("zbv")),
    "the user's checkpointed blocks, zbv, tp": (4, {**two("zbv"), "tp": 2}),
    "offload, zbv": (2, {**two("zbv"), "activations": OFFLOAD}),
    "offload, zbv, zero 3": (4, {**two("zbv"), "zero": 3, "activations": OFFLOAD}),
    "offload, interleaved, tp": (4, {**two("interleaved"), "tp": 2, "activations": OFFLOAD}),
    "shards in host memory, v-min": (
        4,
        {**two("v-min"), "zero": ShardingConfig(stage=2, offload_optimizer=True)},
    ),
    "sequence parallel, v-half": (
        4,
        {**two("v-half"), "tp": 2, "sequence_parallel": True},
    ),
    "parts of sequences, zbv": (4, {**two("zbv"), "cp": 2}),
    "parts of sequences, interleaved, zero 3, recompute": (
        4,
        {
            **two("interleaved"),
            "cp": ContextConfig(degree=2, kind="ulysses"),
            "zero": 3,
            "activations": ActivationConfig(recompute="full"),
        },
    ),
    "parts of sequences, zb-h1, in parts over tp": (8, {**two("zb-h1", in_parts=True), "cp": 2}),
    "in parts over tp, 1f1b": (4, two("1f1b", in_parts=True)),
    "in parts over tp, interleaved": (4, two("interleaved", in_parts=True)),
    "in parts over tp, zb-h1": (4, {**two("zb-h1", in_parts=True), "zero": 0}),
    "in parts over tp, zbv": (4, two("zbv", in_parts=True)),
    "in parts over tp, v-half, zero 3": (8, {**two("v-half", in_parts=True), "zero": 3}),
    "in parts over tp, dualpipev, recompute": (
        4,
        {**two("dualpipev", in_parts=True), "activations": ActivationConfig(recompute="full")},
    ),
}
"""Processes and options of what the rows leave out."""
LONG = set(EXTRAS) - {
    "the user's checkpointed blocks, zbv",
    "offload, zbv",
    "in parts over tp, zbv",
}
"""In `make test-all`: by default a schedule of another kind meets the same option, and a mixture
parts of sequences."""


def extra_job(options: dict[str, Any], checkpointed: bool) -> Outcome:
    options = {"num_microbatches": 2, **options}
    return train_job(options, "deep", DATA, checkpointed=checkpointed)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in LONG)) for name in EXTRAS],
)
def test_other_layouts(pool: WorkerPool, name: str) -> None:
    world, options = EXTRAS[name]
    checkpointed = name.startswith("the user's")
    check(pool.run(world, extra_job, options, checkpointed), reference_curve("deep", DATA))


@pytest.mark.parametrize("source", [pytest.param("zb-h1", marks=pytest.mark.thorough), "v-min"])
def test_a_schedule_from_a_file(pool: WorkerPool, tmp_path: Path, source: str) -> None:
    table = tmp_path / "schedule.csv"
    dump_schedule(make_schedule(source, 2, 4), table)
    options = {
        "pp": PipelineConfig(degree=2, schedule="custom", table=str(table)),
        "num_microbatches": 4,
    }
    check(pool.run(2, train_job, options, "deep", DATA), reference_curve("deep", DATA))


def schedule_job(row: Row) -> Outcome:
    return train_job(row.options(), "deep", DATA)


@pytest.mark.parametrize(
    "row",
    [
        *ROWS,
        *(pytest.param(row, marks=pytest.mark.thorough) for row in FURTHER),
    ],
    ids=str,
)
def test_every_schedule_trains_as_a_plain_loop_does(pool: WorkerPool, row: Row) -> None:
    check(pool.run(row.world_size, schedule_job, row), reference_curve("deep", DATA))
