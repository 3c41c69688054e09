"""An encoder-decoder and a vision transformer train as those of torch do in a plain loop."""

import pytest

from lightning_megatron.testing import WorkerPool
from tests.parity.encoders import Kind, curve, encoder_job
from tests.parity.jobs import merge_stages
from tests.parity.layouts import Layout
from tests.parity.test_matrix import TOLERANCE, close


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("padded", Layout()),
        ("padded", Layout(tp=2, cp=2, kind="ulysses", sequence_parallel=True)),
        ("padded", Layout(pp=2, num_microbatches=2)),
        ("translator", Layout(cp=2)),
        ("translator", Layout(pp=2, num_microbatches=2)),
        ("vision", Layout(cp=2, zero=2)),
        *(
            pytest.param(kind, layout, marks=pytest.mark.thorough)
            for kind, layout in (
                ("padded", Layout(pp=2, cp=2, kind="gather", zero=3, num_microbatches=2)),
                ("padded", Layout(pp=2, cp=2, dp=2, kind="gather", zero=3, num_microbatches=2)),
                ("translator", Layout(tp=2, pp=2, cp=2, num_microbatches=2)),
                ("vision", Layout(cp=2, dp=2, zero=2)),
                ("vision", Layout(tp=2, pp=2, cp=2, kind="gather", num_microbatches=2)),
                ("vision", Layout(pp=4, cp=2)),
                ("translator", Layout(cp=4, dp=2)),
            )
        ),
    ],
    ids=str,
)
def test_trains_as_layers_of_torch_do(pool: WorkerPool, kind: Kind, layout: Layout) -> None:
    expected = curve(kind)
    outcomes = pool.run(layout.world_size, encoder_job, layout.strategy_options(), kind)
    for rank, outcome in enumerate(outcomes):
        close(f"losses on rank {rank}", outcome.losses, expected.losses)
        close(f"norms on rank {rank}", outcome.norms, expected.norms)
    weights = merge_stages(outcomes)
    assert weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        error = (weights[name] - weight).abs().max() / weight.abs().max()
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"
