"""The cp axis trains as one process does: gradients, ZeRO, norms and tokens, without attention."""

import pytest

from lightning_megatron.testing import WorkerPool
from tests.parity.context_jobs import positionwise_job
from tests.parity.jobs import merge_stages
from tests.parity.layouts import Layout
from tests.parity.reference import Data
from tests.parity.test_matrix import TOLERANCE, close

LAYOUTS = (
    (Layout(cp=2, zero=0), False, 1),
    (Layout(cp=2, dp=2, zero=1), True, 2),
    (Layout(cp=2, dp=2, zero=2, num_microbatches=2), True, 1),
    (Layout(cp=2, dp=2, zero=3), True, 1),
    (Layout(cp=2, dp=2, dp_replicate=2, zero=3), False, 1),
    (Layout(cp=2, dp=2, dp_replicate=2, zero=1), True, 1),
    (Layout(cp=2, pp=2, zero=3, num_microbatches=2), True, 1),
    (Layout(cp=4, tp=2, zero=1), False, 1),
)


@pytest.mark.parametrize(("layout", "by_token", "accumulate"), LAYOUTS, ids=str)
def test_parts_of_sequences_train_as_whole_ones(
    pool: WorkerPool, layout: Layout, by_token: bool, accumulate: int
) -> None:
    data = Data(steps=3 * accumulate, ignored=by_token, lengths=(8, 7))
    [plain] = pool.run(1, positionwise_job, {}, data, by_token, accumulate)
    options = layout.strategy_options()
    found = pool.run(layout.world_size, positionwise_job, options, data, by_token, accumulate)
    for rank, outcome in enumerate(found):
        close(f"losses on rank {rank}", outcome.losses, plain.losses)
        close(f"norms on rank {rank}", outcome.norms, plain.norms)
    weights = merge_stages(found)
    for name, weight in plain.weights.items():
        error = (weights[name] - weight).abs().max() / weight.abs().max()
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"
