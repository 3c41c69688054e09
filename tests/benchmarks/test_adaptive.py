"""The table of adaptive recomputation can still be made, and its plans keep to their limits."""

from benchmarks import adaptive
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

TINY = TransformerConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=256)


def test_a_plan_is_compared_with_what_fits(pool: WorkerPool) -> None:
    plan, control = pool.run(1, adaptive.compare, TINY, 2, 64, (0.6,))[0]
    assert plan.keys() == control.keys()
    assert plan["peak, MiB"] <= plan["limit, MiB"]
    assert plan["plan"] != "2 full"
    fitting = f"{plan['best by hand']}, {plan['others that fit, ms']}"
    assert "full" in fitting
    assert "none" not in fitting
    for clock in adaptive.CLOCKS:
        middle = float(plan[f"ratio, {clock}"].split(" +- ")[0])
        assert 0 < middle < 10
