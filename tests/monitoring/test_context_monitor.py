"""The balance of cp ranks is logged as the documents of the batch make it."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ContextMonitor, MegatronStrategy, PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.context_pairs import pairs_by_rank, seen_by_position
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context_layout import ContextLayout
from tests.parity import reference
from tests.parity.context_jobs import CutEmbedding, PositionwiseModule, WholeLoss
from tests.parity.jobs import quiet_trainer
from tests.parity.reference import Data


class Attending(ParallelLayer):
    """Stands for attention: what is counted are its documents and window."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(reference.HIDDEN, reference.HIDDEN)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def documents_like(tokens: Tensor) -> Tensor:
    """One document in the first row, as many as tokens in the others."""
    numbers = torch.arange(tokens.shape[1]).expand(tokens.shape).clone()
    numbers[0] = 0
    return numbers


class Packed(PositionwiseModule):
    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.trunk = PipelineSequential(
            embedding=CutEmbedding(), blocks=[Attending(), Attending()], loss=WholeLoss()
        ).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        documents = documents_like(tokens)
        total, counted = self.trunk(tokens, targets=targets, documents=documents)
        return total * self.scale.prod() * self.temperature / counted.detach()


def logged_job(options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """What was logged in the last batch, and what it should be, where sequences are split."""
    monitor = ContextMonitor(every=2)
    trainer = quiet_trainer(MegatronStrategy(**options), callbacks=[monitor])
    data = Data(steps=2, lengths=(8, 7))
    module = Packed(data)
    trainer.fit(module)
    found = trainer.callback_metrics.get("cp/imbalance")
    tokens = data.batches()[1][0]
    seen = seen_by_position(tokens.shape[1], documents=documents_like(tokens))
    pairs = pairs_by_rank(seen, ContextLayout(tokens.shape[1], 2))
    assert not module.trunk._forward_pre_hooks
    return None if found is None else float(found), 2 * max(pairs) / sum(pairs)


def test_cp_ranks_are_compared_by_the_pairs_they_attend_to(pool: WorkerPool) -> None:
    for found, expected in pool.run(2, logged_job, {"cp": 2, "zero": 1}):
        assert found == pytest.approx(expected)
        assert expected is not None
        assert expected > 1.0
    [(found, _)] = pool.run(1, logged_job, {})
    assert found is None


def test_every_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        ContextMonitor(every=0)
