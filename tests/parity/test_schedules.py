"""Every pipeline schedule trains the same weights, on every placement, with ZeRO and recomputation.

The rows are chosen greedily so that every pair of values that some legal row has is covered, with
as few processes as possible; the choice depends on nothing but the values. Runs that neither cut
nor gather anything over data-parallel ranks meet every family of schedules, and in `make test-all`
every schedule.
"""

import itertools
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.parallel.zero import ShardingConfig
from lightning_megatron.schedules.custom import dump_schedule
from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule, schedule_problems
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context_layout import ContextConfig
from tests.parity.jobs import Outcome, train_job
from tests.parity.reference import Data, reference_curve
from tests.parity.test_matrix import check

MOST_PROCESSES = 8
DATA = Data()
WHOLE = ("dp=1", "zero 0")
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

    def pairs(self, thorough: bool) -> set[tuple[str, str]]:
        """The pairs of values that this row puts to the test."""
        values = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        found = set(itertools.combinations(values, 2))
        if self.data_parallel in WHOLE and not thorough:
            found -= {(values[0], f"data_parallel={self.data_parallel}")}
            found |= {(FAMILIES[self.schedule], self.data_parallel)}
        return found

    def __str__(self) -> str:
        parts = [self.schedule, f"pp={self.pp}", self.data_parallel, f"m={self.num_microbatches}"]
        parts += [f"x{self.stages_per_rank}"] * (self.stages_per_rank > 1)
        parts += ["tp=2"] * (self.tp > 1) + ["recompute"] * self.recompute
        return " ".join(parts)


@cache
def rows(thorough: bool = False) -> tuple[Row, ...]:
    """Legal rows that cover all pairs."""
    values = (
        SCHEDULES,
        (2, 3, 4),
        (1, 2),
        ("dp=1", "zero 0", "zero 1", "zero 3"),
        (False, True),
        (1, 2),
        (1, 3, 4),
    )
    legal = [row for row in itertools.starmap(Row, itertools.product(*values)) if row.legal]
    legal.sort(key=lambda row: row.world_size)
    pairs = {row: row.pairs(thorough) for row in legal}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        # Of rows that cover equally much, the first has the fewest processes.
        best = max(legal, key=lambda row: len(pairs[row] & missing) / (8 + row.world_size))
        chosen.append(best)
        missing -= pairs[best]
    return tuple(chosen)


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
    "the user's checkpointed blocks, zbv": (4, {**two("zbv"), "tp": 2}),
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
LONG = {
    "hybrid sharding, interleaved",
    "zero 2, zb-h1",
    "in parts over tp, zb-h1",
    "parts of sequences, zb-h1, in parts over tp",
    "in parts over tp, v-half, zero 3",
    "in parts over tp, dualpipev, recompute",
}
"""In `make test-all`: by default a schedule of another kind meets the same option."""


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


@pytest.mark.parametrize("source", ["zb-h1", "v-min"])
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
        *rows(),
        *(
            pytest.param(row, marks=pytest.mark.thorough)
            for row in rows(thorough=True)
            if row not in rows()
        ),
    ],
    ids=str,
)
def test_every_schedule_trains_as_a_plain_loop_does(pool: WorkerPool, row: Row) -> None:
    check(pool.run(row.world_size, schedule_job, row), reference_curve("deep", DATA))
