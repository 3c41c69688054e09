"""Each tensor-parallel rank keeps a part of a recomputed block's input."""

import time
from typing import Any

import lightning as L
import pytest

from benchmarks.recomputation import LiveBytes
from lightning_megatron import ActivationConfig, MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.parity import reference
from tests.parity.jobs import ParityModule, quiet_trainer
from tests.parity.reference import Data


class Kept(ParityModule):
    """Note what is alive when the forward of its second batch ends."""

    kept = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with LiveBytes() as live:
            loss = super().training_step(batch, batch_idx)
            self.kept = settled(live)
        return loss


def settled(live: LiveBytes) -> int:
    """Bytes, once they stay: gloo's threads let go of what was sent a moment after it arrived."""
    found = [live.now]
    while len(found) < 20 or len(set(found[-20:])) > 1:
        time.sleep(0.01)  # in which other threads have their turn, however long that takes
        found.append(live.now)
    return found[-1]


def kept_job(memory: ActivationConfig) -> int:
    L.seed_everything(1, verbose=False)
    module = Kept("deep", Data(steps=2))
    quiet_trainer(MegatronStrategy(tp=2, activations=memory)).fit(module)
    return module.kept


def test_half_of_every_input_is_kept(pool: WorkerPool) -> None:
    whole = pool.run(2, kept_job, ActivationConfig(recompute="full"))
    parts = pool.run(2, kept_job, ActivationConfig(recompute="full", distribute_inputs=True))
    data = Data(steps=2)
    tokens, _ = data.batches()[-1]
    one_input = tokens.numel() * reference.HIDDEN * 8
    for before, after in zip(whole, parts, strict=True):
        saved = (before - after) / one_input
        assert saved == pytest.approx(reference.LAYERS["deep"] / 2)


def refused_job() -> str:
    memory = ActivationConfig(
        recompute="full", distribute_inputs=True, blocks=["RowParallelLinear"]
    )
    with pytest.raises(ConfigError) as caught:
        kept_job(memory)
    return str(caught.value)


def test_an_input_that_differs_is_refused(pool: WorkerPool) -> None:
    messages = pool.run(2, refused_job)
    assert messages[0] == messages[1]
    assert "RowParallelLinear differs between tensor-parallel ranks" in messages[0]
