"""The balance of cp ranks is logged as the documents of the batch make it."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import (
    CommunicationMonitor,
    ContextMonitor,
    MegatronStrategy,
    PipelineSequential,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.monitoring.context_monitor import pairs_by_rank, seen_by_position
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context_layout import ContextLayout
from tests.parity import reference
from tests.parity.context_jobs import CutEmbedding, PositionwiseModule, WholeLoss
from tests.parity.jobs import quiet_trainer
from tests.parity.reference import Data


def documents_like(tokens: Tensor) -> Tensor:
    """One document in the first row, as many as tokens in the others."""
    numbers = torch.arange(tokens.shape[1]).expand(tokens.shape).clone()
    numbers[0] = 0
    return numbers


class Packed(PositionwiseModule):
    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.trunk = PipelineSequential(
            embedding=CutEmbedding(),
            blocks=[CausalSelfAttention(reference.HIDDEN, 2) for _ in range(2)],
            loss=WholeLoss(),
        ).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        documents = documents_like(tokens)
        total, counted = self.trunk(tokens, targets=targets, documents=documents)
        return total * self.scale.prod() * self.temperature / counted.detach()


def logged_job(options: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """What was logged in the last batch, and the imbalance where sequences are split."""
    monitors = [ContextMonitor(every=2), CommunicationMonitor(every=2)]
    trainer = quiet_trainer(MegatronStrategy(**options), callbacks=monitors)
    data = Data(steps=2, lengths=(8, 7))
    module = Packed(data)
    trainer.fit(module)
    tokens = data.batches()[1][0]
    seen = seen_by_position(tokens.shape[1], documents=documents_like(tokens))
    pairs = pairs_by_rank(seen, ContextLayout(tokens.shape[1], 2))
    assert not module.trunk._forward_pre_hooks
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return logged, 2 * max(pairs) / sum(pairs)


def test_cp_ranks_are_compared_by_the_pairs_they_attend_to(pool: WorkerPool) -> None:
    for logged, expected in pool.run(2, logged_job, {"cp": 2, "zero": 1}):
        assert logged["cp/imbalance"] == pytest.approx(expected)
        assert expected > 1.0
        assert logged["comm/mib/cp"] > 0
        assert logged["comm/calls/cp"] >= 2 * 2 * 2, "forward and backward of two layers"
    [(logged, _)] = pool.run(1, logged_job, {})
    assert not [name for name in logged if "cp" in name]


def test_every_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        ContextMonitor(every=0)
