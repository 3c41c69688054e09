"""Gradients of many microbatches are added up in float32, whatever the precision."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import PipelineConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import local
from tests.strategy import small

MICROBATCHES = 16


class Counter(small.Small):
    """A weight whose gradient is 1 in the first microbatch and 2**-9 in each later one.

    One in bfloat16 has its next neighbour at 1 + 2**-7: added one by one, the others are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = small.PipelineSequential(
            layers=[nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
        )
        self.seen: list[Tensor] = []

    def configure_model(self) -> None:
        for parameter in self.parameters():
            if not hasattr(self, "built"):
                nn.init.ones_(parameter)
        self.built = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].to(torch.bfloat16)).float().sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [local(p.grad).double().sum() for p in self.parameters() if p.numel()]
        self.kinds = {str(p.grad.dtype) for p in self.parameters() if p.numel()}


class ValidatedCounter(Counter):
    """Runs before the first batch, when gradients are not in float32 yet."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def gradient_job(
    precision: str,
    options: dict[str, Any],
    devices: int,
    accumulate: int,
    module_class: type[Counter] = Counter,
) -> tuple[float, set[str]]:
    values = torch.full((devices, MICROBATCHES, 1), 2.0**-9)
    values[:, 0] = 1.0
    batches = [[piece] for piece in values.flatten(0, 1).chunk(accumulate * devices)]
    trainer = small.make_trainer(
        options, devices, precision=precision, accumulate_grad_batches=accumulate
    )
    module = module_class()
    data = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]
    trainer.fit(module, data, data if isinstance(module, ValidatedCounter) else None)
    # Every microbatch weighs the same; undo their mean.
    (total, *_), kinds = module.seen, module.kinds
    return float(total) * MICROBATCHES, kinds


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one process": (1, {"num_microbatches": MICROBATCHES}, 1),
    "one process, accumulated batches": (1, {"num_microbatches": MICROBATCHES // 8}, 8),
    "pp=2": (2, {"pp": 2, "num_microbatches": MICROBATCHES}, 1),
    "pp=2 zb-h1": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": MICROBATCHES},
        1,
    ),
    **{
        f"dp=2 zero {zero}": (2, {"zero": zero, "num_microbatches": MICROBATCHES}, 1)
        for zero in range(4)
    },
}


PAIRS = [("bf16-true", name) for name in LAYOUTS if name != "dp=2 zero 1"]
PAIRS += [("bf16-mixed", name) for name in ("one process", "pp=2 zb-h1", "dp=2 zero 1")]
PAIRS += [("bf16-mixed", "dp=2 zero 3")]


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        pytest.param(*pair, marks=[pytest.mark.thorough] * (pair not in PAIRS))
        for pair in itertools.product(("bf16-true", "bf16-mixed"), LAYOUTS)
    ],
)
def test_small_gradients_count(pool: WorkerPool, precision: str, name: str) -> None:
    devices, options, accumulate = LAYOUTS[name]
    expected = 1 + (MICROBATCHES - 1) * 2.0**-9
    found = pool.run(devices, gradient_job, precision, options, devices, accumulate)
    kept = "torch.bfloat16" if precision == "bf16-true" else "torch.float32"
    totals = [total for total, _ in found if total]
    assert totals
    for total in totals:
        assert total == pytest.approx(expected, rel=2.0**-8)
    assert all(kinds == {kept} for _, kinds in found)


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_small_gradients_count_after_a_validation(pool: WorkerPool, zero: int) -> None:
    """FSDP2 of torch 2.15 reads the format of gradients before the first forward of any kind."""
    devices, options, accumulate = LAYOUTS[f"dp=2 zero {zero}"]
    job = (gradient_job, "bf16-true", options, devices, accumulate, ValidatedCounter)
    found = pool.run(devices, *job)
    totals = [total for total, _ in found if total]  # a rank may own no row
    assert totals
    for total in totals:
        assert total == pytest.approx(1 + (MICROBATCHES - 1) * 2.0**-9, rel=2.0**-8)
    assert all(kinds == {"torch.bfloat16"} for _, kinds in found)
