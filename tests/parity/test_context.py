"""The cp axis trains as one process does: gradients, ZeRO, norms and tokens, without attention."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import ActivationConfig, ContextConfig
from lightning_megatron.testing import WorkerPool
from tests.parity.context_jobs import dropout_job, noisy_job, positionwise_job
from tests.parity.jobs import Outcome, merge_stages
from tests.parity.layouts import Layout
from tests.parity.reference import Data
from tests.parity.test_matrix import TOLERANCE, close

LAYOUTS = (
    (Layout(cp=2, zero=0), False, 1),
    (Layout(cp=2, zero=2, num_microbatches=2), True, 1),
    (Layout(cp=2, dp=2, zero=1), True, 2),
    (Layout(cp=2, pp=2, zero=3, num_microbatches=2), True, 1),
)
FURTHER = (
    (Layout(cp=2, dp=2, dp_replicate=2, zero=3), False, 1),
    (Layout(cp=2, dp=2, zero=2, num_microbatches=2), True, 1),
    (Layout(cp=2, dp=2, zero=3), True, 1),
    (Layout(cp=2, dp=2, dp_replicate=2, zero=1), True, 1),
    (Layout(cp=4, tp=2, zero=1), False, 1),
)
"""Of `make test-all`."""


def check(found: Sequence[Outcome], plain: Outcome) -> None:
    for rank, outcome in enumerate(found):
        close(f"losses on rank {rank}", outcome.losses, plain.losses[-len(outcome.losses) :])
        close(f"norms on rank {rank}", outcome.norms, plain.norms[-len(outcome.norms) :])
        close(f"norm of weights on rank {rank}", [outcome.extra], [plain.extra])
    weights = merge_stages(found)
    for name, weight in plain.weights.items():
        error = (weights[name] - weight).abs().max() / weight.abs().max()
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("layout", "by_token", "accumulate"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.thorough) for case in FURTHER)],
    ids=str,
)
def test_parts_of_sequences_train_as_whole_ones(
    pool: WorkerPool, layout: Layout, by_token: bool, accumulate: int
) -> None:
    data = Data(steps=3 * accumulate, ignored=by_token, lengths=(8, 7))
    [plain] = pool.run(1, positionwise_job, {}, data, by_token, accumulate)
    options = layout.strategy_options()
    check(pool.run(layout.world_size, positionwise_job, options, data, by_token, accumulate), plain)


@pytest.mark.parametrize(
    ("layout", "optimizer", "others"),
    [
        (Layout(cp=2, zero=3), "muon", (Layout(), Layout(tp=2))),
        (Layout(dp=2, zero=1), "adafactor", (Layout(cp=2, dp=2, dp_replicate=2, zero=2),)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (Layout(cp=2, dp=2, zero=3), "muon", (Layout(cp=2, zero=1), Layout(tp=2))),
                (Layout(cp=2, dp=2), "muon", (Layout(dp=4, zero=3), Layout(cp=4, zero=0))),
                (
                    Layout(cp=2, pp=2, zero=1, num_microbatches=2),
                    "adafactor",
                    (Layout(cp=2, zero=3),),
                ),
            )
        ),
    ],
    ids=["muon", "adafactor", "muon, four ranks", "muon, replicas", "adafactor, pp"],
)
def test_runs_go_on_in_other_parts(
    pool: WorkerPool, tmp_path: Path, layout: Layout, optimizer: str, others: Sequence[Layout]
) -> None:
    data, path = Data(steps=3), str(tmp_path / "file")

    def run(where: Layout, **files: str) -> list[Outcome]:
        options = where.strategy_options()
        found: list[Outcome] = pool.run(
            where.world_size, positionwise_job, options, data, optimizer=optimizer, **files
        )
        return found

    [plain] = run(Layout())
    check(run(layout, save=path), plain)
    for other in others:
        check(run(other, load=path), plain)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, zero=1),
        Layout(cp=2, zero=3),
        *(
            pytest.param(layout, marks=pytest.mark.thorough)
            for layout in (Layout(cp=2, dp=2, zero=3), Layout(cp=2, zero=0))
        ),
    ],
    ids=str,
)
def test_two_optimizers_step_by_hand(pool: WorkerPool, layout: Layout) -> None:
    data = Data(steps=2)
    [plain] = pool.run(1, positionwise_job, {}, data, optimizer="manual")
    options = layout.strategy_options()
    check(pool.run(layout.world_size, positionwise_job, options, data, optimizer="manual"), plain)


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        (Layout(cp=2, dp=2, zero=3), "aabb"),
        *(
            pytest.param(layout, nodes, marks=pytest.mark.thorough)
            for layout, nodes in (
                (Layout(cp=2, dp=2), "aabb"),
                (Layout(cp=4, zero=2, num_microbatches=2), "abab"),
            )
        ),
    ],
    ids=str,
)
def test_parts_on_several_nodes(pool: WorkerPool, layout: Layout, nodes: str) -> None:
    data, options = Data(steps=2), layout.strategy_options()
    [plain] = pool.run(1, positionwise_job, {}, data)
    check(pool.run(layout.world_size, positionwise_job, options, data, nodes=nodes), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"cp": 2},
        pytest.param({"cp": 2, "pp": 2, "num_microbatches": 1}, marks=pytest.mark.thorough),
    ],
    ids=["cp=2", "pp=2 cp=2"],
)
def test_parts_draw_other_numbers_inside_of_the_trunk(
    pool: WorkerPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """And the same around it, also after an interruption."""
    path, world = str(tmp_path / "file"), 2 * options.get("pp", 1)
    found = pool.run(world, noisy_job, options, save=path)
    held = [inside for inside, _ in found if inside]
    assert len(held) == 2
    assert len({number for inside in held for number in inside}) == 6
    assert all(outside == found[0][1] for _, outside in found)
    again = pool.run(world, noisy_job, options, load=path)
    for (inside, outside), (later, around) in zip(found, again, strict=True):
        assert (later, around) == (inside[len(inside) * 2 // 3 :], outside[2:])


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"cp": ContextConfig(degree=2, kind="gather")}),
        *(
            pytest.param(4, {"cp": 2, **options}, marks=pytest.mark.thorough)
            for options in (
                {"pp": 2, "num_microbatches": 2},
                {"tp": 2, "sequence_parallel": True, "zero": 3},
            )
        ),
    ],
    ids=str,
)
def test_recomputed_blocks_drop_what_they_dropped(
    pool: WorkerPool, world: int, options: dict[str, Any]
) -> None:
    kept = pool.run(world, dropout_job, options)
    for recompute in ("full", "selective"):
        activations = ActivationConfig(recompute=recompute)  # type: ignore[arg-type]
        again = pool.run(world, dropout_job, {**options, "activations": activations})
        close("losses", again[0].losses, kept[0].losses)
        close("norms", again[0].norms, kept[0].norms)
    others = pool.run(world, dropout_job, options, seed=2)
    assert others[0].losses != kept[0].losses
