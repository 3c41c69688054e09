"""Mixtures of experts train the same weights under every layout as a plain loop in one process.

With losses for balance and z-loss; losses that are logged do not contain them.
"""

import os
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_megatron import ReplicaCheck
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.gradients import local
from lightning_megatron.parallel.whole_reductions import unseen
from lightning_megatron.parallel.zero import ShardingConfig
from lightning_megatron.testing import WorkerPool
from tests.fault_tolerance.replicas.test_check import Flip
from tests.parity.expert_layouts import EXPERT_LAYOUTS, ExpertLayout, legal_expert_layouts
from tests.parity.jobs import Outcome, ParityModule, train_job
from tests.parity.reference import EXPERTS, HIDDEN, LAYERS, MLP, Data, reference_curve
from tests.parity.test_matrix import check
from tests.parity.test_precision import close as within
from tests.parity.test_repartition import MOVES_BEFORE, fit, forced, measured

HYBRID = {"ep": 2, "zero": ShardingConfig(stage=2, dp_replicate=2), "num_microbatches": 2}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_trains_as_a_plain_loop_does(pool: WorkerPool, layout: ExpertLayout) -> None:
    """Under cp also with lengths that no rank number divides."""
    data = Data(lengths=(8,) if layout.cp == 1 else (8, 7))
    outcomes = pool.run(layout.world_size, train_job, layout.strategy_options(), "mixture", data)
    check(outcomes, reference_curve("mixture", data))


def test_layouts_cover_all_pairs() -> None:
    possible = set().union(*(layout.combinations() for layout in legal_expert_layouts()))
    covered = set().union(*(layout.combinations() for layout in EXPERT_LAYOUTS))
    assert not sorted(possible - covered, key=str)
    assert all(layout.legal for layout in EXPERT_LAYOUTS)
    assert len(set(EXPERT_LAYOUTS)) == len(EXPERT_LAYOUTS)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_without_a_token_take_part(pool: WorkerPool, zero: int) -> None:
    """AdamW decays them, and moments of earlier steps move them."""
    data = Data(alike=True)
    outcomes = pool.run(4, train_job, {"ep": 4, "tp": 2, "zero": zero}, "mixture", data)
    check(outcomes, reference_curve("mixture", data))


@pytest.mark.parametrize(
    ("world", "options"),
    [(4, HYBRID), (4, {"ep": 2, "tp": 2, "zero": 1}), (4, {"ep": 2, "zero": 3})],
    ids=["hybrid zero 2", "tp=2 zero 1", "zero 3"],
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


@pytest.mark.parametrize("zero", [1, 3])
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


@pytest.mark.parametrize(
    "options",
    [
        {"zero": ShardingConfig(stage=2, offload_optimizer=True)},
        {"zero": ShardingConfig(stage=3, offload_optimizer=True), "tp": 2},
        *(
            pytest.param(options, marks=pytest.mark.thorough)
            for options in (
                {"zero": 0},
                {"zero": 1},
                {"zero": ShardingConfig(stage=3, offload_parameters=True)},
            )
        ),
    ],
    ids=["zero 2 offloaded", "tp=2 zero 3 offloaded", "zero 0", "zero 1", "zero 3 offloaded"],
)
def test_lower_precisions_are_close_to_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], options: dict[str, Any]
) -> None:
    for found in pool.run(4, precision_job, list(PRECISIONS), {**options, "ep": 2}):
        for precision, (loss_tolerance, norm_tolerance) in PRECISIONS.items():
            expected, outcome = alone[precision], found[precision]
            within(precision, outcome.losses, expected.losses, loss_tolerance)
            within(precision, outcome.norms, expected.norms, norm_tolerance)


def nodes_job(options: dict[str, Any], data: Data) -> Outcome:
    with mock.patch("socket.gethostname", return_value="ab"[int(os.environ["RANK"]) // 4]):
        return train_job(options, "mixture", data)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_gradients_of_experts_are_summed_in_two_levels(pool: WorkerPool, zero: int) -> None:
    """Ranks with the same experts are on two nodes, two on each."""
    data = Data(steps=2)
    outcomes = pool.run(8, nodes_job, {"ep": 2, "zero": zero}, data)
    check(outcomes, reference_curve("mixture", data))


EXPERT = "model.trunk.layers.0.mlp.experts.up"


class Unseen(Flip):
    def on_train_batch_end(self, *args: Any) -> None:
        with unseen():
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
    ("options", "found"),
    [
        ({"ep": 2, "tp": 2, "zero": 0}, "rank 0 and rank 2"),
        ({"tp": 2, "zero": 0}, "rank 2 differ from the majority"),
        ({"ep": 2, "zero": ShardingConfig(stage=3, dp_replicate=2)}, "rank 0 and rank 2"),
        ({"ep": 4, "zero": 0}, "^$"),
    ],
    ids=["ep=2 tp=2", "tp=2", "hybrid", "no copies"],
)
def test_copies_of_experts_are_compared(
    pool: WorkerPool, options: dict[str, Any], found: str
) -> None:
    for equal, text in pool.run(4, replica_job, options):
        assert equal
        assert re.search(found, text), text


class AtRest(L.Callback):
    """Elements of experts that this rank keeps: as shards, and in a moment of the optimizer."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with unseen():
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
        (8, {"ep": 2, "zero": 2}, 2, 8),
        (8, {"tp": 2, "ep": 2, "zero": 3}, 8, 8),
        (8, {"ep": 2, "zero": ShardingConfig(stage=3, dp_replicate=2)}, 4, 4),
        (8, {"tp": 2, "zero": 3}, 8, 8),
        (2, {"tp": 2, "zero": 3}, 2, 2),
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
