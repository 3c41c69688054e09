"""Where the copy of a block is tried, and what comes of one that cannot be."""

import torch
from torch import Tensor, nn

from lightning_megatron.adoption import block_trial
from lightning_megatron.adoption.block_trial import BlockTrial


class Fails(nn.Module):
    """Fails in its first calls."""

    def __init__(self, times: int, *, counts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.left, self.counts = times, counts

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("no kernel")
        y = self.linear(x) * self.scale
        return y * x.shape[1] if self.counts else y


def _fault(trial: BlockTrial) -> str | None:
    return trial.fault((torch.randn(2, 12, 4),), {}, lambda _: 1)


def test_a_block_that_the_cpu_cannot_run_is_tried_on_the_device_of_its_activations(monkeypatch):
    # Stands for a GPU: another device than "cpu", where tensors can be.
    monkeypatch.setattr(block_trial, "_device_of", lambda *_: torch.device("cpu:0"))
    assert _fault(BlockTrial(Fails(1))) is None
    assert "counts positions itself" in _fault(BlockTrial(Fails(1, counts=True)))


def test_a_block_that_cannot_be_tried_is_refused_whenever_it_is_called():
    trial = BlockTrial(Fails(1))
    for _ in range(2):
        assert "could not be tried" in _fault(trial)


def test_a_trial_leaves_random_numbers_alone():
    trial, x = BlockTrial(Fails(0)), torch.randn(2, 12, 4)
    before = torch.get_rng_state()
    assert trial.fault((x,), {}, lambda _: 1) is None
    assert torch.equal(torch.get_rng_state(), before)
