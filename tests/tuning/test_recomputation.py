"""When adaptive recomputation measures and chooses, whatever the first batches are like."""

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_megatron import ActivationConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from lightning_megatron.tuning.recomputation import AdaptiveMemory
from tests.strategy.small import WIDTH, Small, loader, make_trainer, samples, tuner_of

ROW = WIDTH * 8
"""Bytes of a sample in a block."""
ADAPTIVE = {"recompute": "adaptive", "limit_gib": 1.0}


class Skipping(Small):
    """Leaves out every batch of the first epoch after the first, and validates in between."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Shared(Small):
    """Runs a block twice, and one of its blocks never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
        self.net = nn.Identity()

    def loss(self, batch: Any) -> Tensor:
        first, second, _ = self.blocks
        return nn.functional.mse_loss(first(second(first(batch[0]))), batch[1])


def measured(module: Small, data: Any, **options: Any) -> dict[str, Any]:
    """The costs of blocks by name, in a run that has chosen."""
    layout = {"activations": ActivationConfig(**ADAPTIVE), **options.pop("layout", {})}
    trainer = make_trainer(layout, **options)
    trainer.fit(module, data, loader())
    adaptive = tuner_of(trainer.strategy, AdaptiveMemory)
    assert adaptive.ways is not None, "it chose"
    assert set(adaptive.ways.values()) == {"none"}
    return {name: block.costs for name, block in adaptive.measured.items()}


def job() -> None:
    eight = {"num_sanity_val_steps": 1, "max_epochs": 2}
    found = measured(Skipping(), loader(), **eight)
    assert [costs.input for costs in found.values()] == [8 * ROW] * 4
    assert all(costs.kept > costs.input and costs.seconds > 0 for costs in found.values())
    # The second batch is what is left over: the first one counts.
    found = measured(Small(), loader(samples(10)), max_epochs=2)
    assert [costs.input for costs in found.values()] == [8 * ROW] * 4
    # An epoch of a single batch.
    found = measured(Small(), loader(samples(8)), max_epochs=3, accumulate_grad_batches=2)
    assert [costs.input for costs in found.values()] == [8 * ROW] * 4
    found = measured(Shared(), loader(), layout={"num_microbatches": 2})
    # A microbatch is a part of the batch, whose bytes it keeps all.
    assert [costs.input for costs in found.values()] == [2 * 8 * ROW, 4 * ROW]


def test_the_first_batches_may_be_of_any_kind(pool: WorkerPool) -> None:
    pool.run(1, job)


def too_little_job() -> str:
    memory = ActivationConfig(recompute="adaptive", limit_fraction=1e-12)
    with pytest.raises(ConfigError) as error:
        make_trainer({"activations": memory}).fit(Small(), loader())
    return str(error.value)


def test_a_limit_is_told_as_it_was_given(pool: WorkerPool) -> None:
    message = pool.run(1, too_little_job)[0]
    assert "activations.limit_fraction=1e-12 (" in message
    assert "nearest valid: limit_fraction=" in message
    fraction = float(message.partition("nearest valid: limit_fraction=")[2].split(",")[0])
    assert 0 < fraction < 1e-4
