"""Mixtures of experts train the same weights under every layout as a plain loop in one process.

With losses for balance and z-loss; losses that are logged do not contain them.
"""

import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import ReplicaCheck
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.whole.memory import weights_in_parts
from lightning_megatron.zero.data_parallel import ShardingConfig
from lightning_megatron.zero.gradients import local
from tests.callbacks.test_replica_check import Flip
from tests.parity.expert_layouts import (
    EXPERT_LAYOUTS,
    FURTHER,
    SMALL,
    VALUES,
    ExpertLayout,
    legal_expert_layouts,
)
from tests.parity.jobs import Outcome, ParityModule, train_job
from tests.parity.layouts import MOST_PROCESSES
from tests.parity.reference import EXPERTS, HIDDEN, LAYERS, MLP, Data, reference_curve
from tests.parity.test_matrix import check
from tests.parity.test_precision import close as within
from tests.parity.test_repartition import MOVES_BEFORE, fit, forced, measured

HYBRID = {"ep": 2, "zero": ShardingConfig(stage=2, dp_replicate=2), "num_microbatches": 2}


@pytest.mark.parametrize(
    "layout",
    [*EXPERT_LAYOUTS, *(pytest.param(one, marks=pytest.mark.thorough) for one in FURTHER)],
    ids=str,
)
def test_trains_as_a_plain_loop_does(pool: WorkerPool, layout: ExpertLayout) -> None:
    """Under cp also with lengths that no rank number divides."""
    data = Data(lengths=(8,) if layout.cp == 1 else (8, 7))
    outcomes = pool.run(layout.world_size, train_job, layout.strategy_options(), "mixture", data)
    check(outcomes, reference_curve("mixture", data))


def test_layouts_cover_all_pairs() -> None:
    for layouts, values, most in (
        (EXPERT_LAYOUTS, SMALL, 4),
        (EXPERT_LAYOUTS + FURTHER, VALUES, MOST_PROCESSES),
    ):
        legal = legal_expert_layouts(values, most)
        possible = set().union(*(layout.combinations() for layout in legal))
        covered = set().union(*(layout.combinations() for layout in layouts))
        assert not sorted(possible - covered, key=str)
        assert all(layout.legal for layout in layouts)
        assert len(set(layouts)) == len(layouts)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"ep": 2, "zero": 0}),
        (4, {"ep": 4, "tp": 2, "zero": 3}),
        *(
            pytest.param(4, {"ep": 4, "tp": 2, "zero": zero}, marks=pytest.mark.thorough)
            for zero in (0, 1, 2)
        ),
    ],
    ids=str,
)
def test_experts_without_a_token_take_part(
    pool: WorkerPool, world: int, options: dict[str, Any]
) -> None:
    """AdamW decays them, and moments of earlier steps move them."""
    data = Data(alike=True)
    outcomes = pool.run(world, train_job, options, "mixture", data)
    check(outcomes, reference_curve("mixture", data))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"ep": 2, "tp": 2, "zero": 1}),
        (4, {"ep": 2, "zero": 3}),
        pytest.param(4, HYBRID, marks=pytest.mark.thorough),
    ],
    ids=["tp=2 zero 1", "zero 3", "hybrid zero 2"],
)
def test_gradients_accumulate_over_batches(
    pool: WorkerPool, world: int, options: dict[str, Any]
) -> None:
    data = Data(steps=4)
    outcomes = pool.run(world, train_job, options, "mixture", data, accumulate=2)
    check(outcomes, reference_curve("mixture", data, 2))


def moving_job(options: dict[str, Any], data: Data) -> Outcome:
    L.seed_everything(1, verbose=False)
    with forced([1, 4]):
        return fit(ParityModule("mixture", data), options)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_experts_move_to_another_stage(pool: WorkerPool, zero: int) -> None:
    data = Data(steps=MOVES_BEFORE + 2)
    options = {"pp": measured(), "num_microbatches": 2, "ep": 2, "zero": zero}
    outcomes = pool.run(4, moving_job, options, data)
    check(outcomes, reference_curve("mixture", data))
    assert outcomes[0].extra.after == (1, 4)


class Formats(ParityModule):
    """In number formats of its precision; Adam would divide roundings by themselves."""

    def __init__(self) -> None:
        super().__init__("mixture", Data())
        self.float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def precision_job(precisions: Sequence[Any], options: dict[str, Any]) -> dict[str, Outcome]:
    L.seed_everything(1, verbose=False)
    return {one: fit(Formats(), options, precision=one) for one in precisions}


PRECISIONS = {"bf16-mixed": (6e-3, 5e-2), "bf16-true": (6e-3, 5e-2), "32-true": (1e-6, 1e-5)}
"""Relative tolerances of losses and norms, see `test_precision`. Wider than there, as a rounding
may send a token to another expert; dp=4 without ep is as far from one process."""


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Outcome]:
    found: dict[str, Outcome] = pool.run(1, precision_job, list(PRECISIONS), {})[0]
    return found


_ALL = tuple(PRECISIONS)
_ZERO_2 = {"zero": ShardingConfig(stage=2, offload_optimizer=True)}
_ZERO_3 = {"zero": ShardingConfig(stage=3, offload_optimizer=True), "tp": 2}


@pytest.mark.parametrize(
    ("options", "precisions"),
    [
        pytest.param(_ZERO_2, ("bf16-true",), id="zero 2 offloaded, bf16-true"),
        *(
            pytest.param(options, _ALL, marks=pytest.mark.thorough, id=name)
            for name, options in {
                "zero 2 offloaded": _ZERO_2,
                "tp=2 zero 3 offloaded": _ZERO_3,
                "zero 0": {"zero": 0},
                "zero 1": {"zero": 1},
                "zero 3 offloaded": {"zero": ShardingConfig(stage=3, offload_parameters=True)},
            }.items()
        ),
    ],
)
def test_lower_precisions_are_close_to_one_process(
    pool: WorkerPool,
    alone: dict[str, Outcome],
    options: dict[str, Any],
    precisions: Sequence[str],
) -> None:
    for found in pool.run(4, precision_job, precisions, {**options, "ep": 2}):
        for precision in precisions:
            loss_tolerance, norm_tolerance = PRECISIONS[precision]
            expected, outcome = alone[precision], found[precision]
            within(precision, outcome.losses, expected.losses, loss_tolerance)
            within(precision, outcome.norms, expected.norms, norm_tolerance)


EXPERT = "model.trunk.layers.0.mlp.experts.up"


class Unseen(Flip):
    def on_train_batch_end(self, *args: Any) -> None:
        with weights_in_parts():
            super().on_train_batch_end(*args)


def replica_job(options: dict[str, Any]) -> tuple[bool, str]:
    """Whether copies are equal while none is touched, and what is said of one that rank 2 has."""
    check = ReplicaCheck(every=1)
    flip = Unseen(2, EXPERT)
    try:
        fit(ParityModule("mixture", Data()), options, callbacks=[flip, check])
    except RuntimeError as error:
        return check.checks == 2, str(error)
    return check.checks == 3, ""


@pytest.mark.parametrize(
    ("world", "options", "found"),
    [
        (4, {"ep": 2, "tp": 2, "zero": 0}, "rank 0 and rank 2"),
        (4, {"ep": 2, "zero": ShardingConfig(stage=3, dp_replicate=2)}, "rank 0 and rank 2"),
        (4, {"ep": 4, "zero": 0}, "^$"),
        pytest.param(
            *(4, {"tp": 2, "zero": 0}, "rank 2 differ from the majority"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["ep=2 tp=2", "hybrid", "no copies", "tp=2"],
)
def test_copies_of_experts_are_compared(
    pool: WorkerPool, world: int, options: dict[str, Any], found: str
) -> None:
    for equal, text in pool.run(world, replica_job, options):
        assert equal
        assert re.search(found, text), text


class AtRest(L.Callback):
    """Elements of experts that this rank keeps: as shards, and in a moment of the optimizer."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with weights_in_parts():
            data, roles = trainer.strategy.parallel.data, trainer.strategy.gradients.roles
            data.come_to_rest()
            experts = [role for role in roles if ".experts." in role.name]
            state = trainer.optimizers[0].state
            self.held = sum(local(role.parameter).numel() for role in experts)
            self.moments = sum(local(state[r.parameter]["exp_avg"]).numel() for r in experts)


def at_rest_job(options: dict[str, Any]) -> tuple[int, int]:
    counts = AtRest()
    fit(ParityModule("mixture", Data(steps=1)), options, callbacks=[counts])
    return counts.held, counts.moments


@pytest.mark.parametrize(
    ("world", "options", "held", "moments"),
    [
        (4, {"tp": 2, "ep": 4, "zero": 2}, 4, 4),
        (4, {"tp": 2, "zero": 1}, 1, 4),
        (2, {"tp": 2, "zero": 3}, 2, 2),
        (8, {"ep": 2, "zero": 2}, 2, 8),
        *(
            pytest.param(8, options, held, held, marks=pytest.mark.thorough)
            for options, held in (
                ({"tp": 2, "ep": 2, "zero": 3}, 8),
                ({"ep": 2, "zero": ShardingConfig(stage=3, dp_replicate=2)}, 4),
                ({"tp": 2, "zero": 3}, 8),
            )
        ),
    ],
    ids=str,
)
def test_every_rank_keeps_an_equal_part(
    pool: WorkerPool, world: int, options: dict[str, Any], held: int, moments: int
) -> None:
    """Also where there are more ranks with the same experts than experts."""
    whole = 3 * LAYERS["mixture"] * EXPERTS * MLP * HIDDEN
    for found in pool.run(world, at_rest_job, options):
        assert found == (whole // held, whole // moments)


class Sent(L.Callback):
    """Bytes that this rank has sent over data-parallel axes by the end of the training."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.bytes = trainer.strategy.topology.meters["dp"].bytes


def sent_job(options: dict[str, Any]) -> int:
    sent = Sent()
    fit(ParityModule("mixture", Data(steps=1)), options, callbacks=[sent])
    return int(sent.bytes)


def test_a_recomputation_gathers_experts_once(pool: WorkerPool) -> None:
    """What it gathered for its forward serves the backward."""
    options: dict[str, Any] = {"ep": 2, "zero": 3}
    plain = pool.run(4, sent_job, options)
    options |= {"activations": ActivationConfig(recompute="full")}
    assert pool.run(4, sent_job, options) == plain
