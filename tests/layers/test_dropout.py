"""Who drops the same elements, and who drops others."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.testing import WorkerPool
from tests.layers.parity import distribute, make_topology
from tests.parity.jobs import quiet_trainer
from tests.parity.plain_modules import FromMemory


def _residual_streams() -> tuple[Tensor, Tensor, Tensor]:
    """What `Dropout` leaves of a whole stream, of a part, and the generator's next number."""
    found = []
    for sequence_parallel in (False, True):
        layer = distribute(Dropout(0.5), make_topology(2, sequence_parallel))
        torch.manual_seed(3)
        found.append(layer(torch.ones(2, 8, 16)))
    return found[0], found[1], torch.rand(())


def test_parts_of_the_residual_stream_drop_different_elements(pool: WorkerPool) -> None:
    (whole, part, after), (other_whole, other_part, other_after) = pool.run(2, _residual_streams)
    assert torch.equal(whole, other_whole)
    assert not torch.equal(part, other_part)
    assert torch.equal(after, other_after)


def _heads() -> tuple[Tensor, Tensor]:
    """The heads of this rank, whose weights all ranks have alike, with and without dropout."""
    topology = make_topology(2)
    torch.manual_seed(0)
    layer = CausalSelfAttention(16, 4, dropout=0.5)
    with torch.no_grad():
        for projection in (layer.wq, layer.wk, layer.wv):
            projection.weight[8:] = projection.weight[:8]
    distribute(layer, topology)
    layer.wo = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(2, 8, 16)
    return layer.eval()(x).detach(), layer.train()(x).detach()


def test_heads_of_two_ranks_drop_different_weights(pool: WorkerPool) -> None:
    (kept, dropped), (other_kept, other_dropped) = pool.run(2, _heads)
    assert torch.equal(kept, other_kept)
    assert not torch.equal(dropped, other_dropped)


class Notes(nn.Module):
    """Notes what it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(4, 6), 0.5)
        self.seen.append(kept)
        return x * self.weight


class TwoStages(FromMemory):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = PipelineSequential(Notes(), Notes())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.trunk(batch[0])
        return out.square().mean()


def _stages() -> list[Tensor]:
    L.seed_everything(1, verbose=False)
    module = TwoStages()
    quiet_trainer(MegatronStrategy(pp=2, num_microbatches=2)).fit(module)
    return [seen for item in module.trunk.items() for seen in getattr(item, "seen", [])]


def test_equal_stages_drop_different_elements(pool: WorkerPool) -> None:
    first, second = pool.run(2, _stages)
    assert len(first) == len(second) == 4
    assert not any(torch.equal(a, b) for a in first for b in second)
    assert not any(torch.equal(a, b) for a, b in zip(first, first[1:], strict=False))
