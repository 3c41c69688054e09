"""Recomputation of blocks that hold parts of sequences."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ActivationConfig, MegatronStrategy, PipelineConfig
from lightning_megatron.testing import WorkerPool
from tests.parity.context_jobs import PositionwiseModule
from tests.parity.jobs import quiet_trainer, whole_parameters
from tests.parity.reference import Data


class Dropping(PositionwiseModule):
    """Drops elements in every block, and notes which."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        for block in self.trunk.blocks:
            block.insert(1, Drop())


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.4, self.training)
        self.masks.append(kept)
        return x * kept


def dropping_job(options: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Masks of this rank's blocks in two steps, and the weights afterwards."""
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options)
    module = Dropping(Data(steps=2, lengths=(8, 7)))
    quiet_trainer(strategy).fit(module)
    masks = [m for child in module.modules() if isinstance(child, Drop) for m in child.masks]
    return masks, whole_parameters(module, strategy.topology)


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ({"cp": 2, "num_microbatches": 2}, 2),
        ({"cp": 2, "pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2}, 4),
    ],
)
def test_masks_differ_over_cp_and_come_again_when_blocks_are_recomputed(
    pool: WorkerPool, layout: dict[str, Any], processes: int
) -> None:
    plain = pool.run(processes, dropping_job, layout)
    again = {**layout, "activations": ActivationConfig(recompute="full")}
    for rank, (masks, weights) in enumerate(pool.run(processes, dropping_job, again)):
        once, expected = plain[rank]
        assert len(masks) == 2 * len(once)
        found = sorted(mask.flatten().tolist() for mask in masks)
        assert found == sorted(mask.flatten().tolist() for mask in once * 2)
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
    for one, other in zip(plain[0][0], plain[1][0], strict=True):
        assert not torch.equal(one, other)
