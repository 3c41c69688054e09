"""Activations that wait in host memory: the same numbers, fewer bytes on the device."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.recomputation import LiveBytes
from lightning_megatron import ActivationConfig, PipelineSequential
from lightning_megatron.parallel.activations.config import blocks_to_recompute
from lightning_megatron.parallel.activations.offload import Offloader
from lightning_megatron.parallel.block_transforms import transform_blocks

WIDTH, BLOCKS = 32, 6
CPU = torch.device("cpu")


class Block(nn.Module):
    """Random, masked, with running statistics, and with views and results among what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        one, other = self.up(self.norm(x)).chunk(2, dim=-1)
        y = nn.functional.dropout(torch.sigmoid(one) * other, 0.3, self.training)
        y = self.down(y) if mask is None else self.down(y) * mask
        return x + y.expand(2, -1, -1)[0]


def network() -> PipelineSequential:
    torch.manual_seed(0)
    return PipelineSequential(layers=[Block() for _ in range(BLOCKS)], head=nn.Linear(WIDTH, 1))


def offloaded(config: ActivationConfig) -> tuple[PipelineSequential, Offloader]:
    net = network()
    transform_blocks(net, blocks_to_recompute(net, config), config, CPU)
    return net, net.layers[0].forward.__self__._offloader


def step(net: PipelineSequential, offloader: Offloader | None = None) -> tuple[list[Tensor], int]:
    """Gradients, and bytes on the device between forward and backward."""
    torch.manual_seed(1)
    x = torch.randn(64, WIDTH, requires_grad=True)
    mask = torch.rand(64, WIDTH)
    with LiveBytes() as live:
        loss = net(x, mask=mask).square().sum()
        held = live.now - (0 if offloader is None else offloader.held)
        loss.backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    return [g.clone() for g in found if g is not None], held


MODES = {
    "all that blocks keep": ActivationConfig(offload=True, offload_min_bytes=0),
    "inputs": ActivationConfig(offload=True, offload_min_bytes=0, recompute="full"),
    "inputs and results": ActivationConfig(
        offload=True, offload_min_bytes=0, recompute="selective"
    ),
    "of each second block the input": ActivationConfig(
        offload=True, offload_min_bytes=0, recompute="full", every=2
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers_from_fewer_bytes_on_the_device(mode: str) -> None:
    config = MODES[mode]
    plain = network()
    expected, _ = step(plain)
    here = network()
    kept = ActivationConfig(recompute=config.recompute, every=config.every)
    transform_blocks(here, blocks_to_recompute(here, kept), kept, CPU)
    _, on_device = step(here)
    net, offloader = offloaded(config)
    for _ in range(2):
        for p in net.parameters():
            p.grad = None
        found, held = step(net, offloader)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    # What the last block keeps, and what lies outside of blocks, stays.
    assert held < on_device * (0.3 if config.recompute == "none" else 0.5)
    assert offloader.held == 0, "the backward has freed everything"
    assert offloader.most > 0.5 * on_device


ALL = ActivationConfig(offload=True, offload_min_bytes=0)


def test_small_tensors_weights_and_shared_inputs_stay() -> None:
    found = []
    for samples, mask in ((64, None), (128, torch.rand(128, WIDTH))):
        net, offloader = offloaded(replace(ALL, offload_min_bytes=64 * WIDTH))
        net(torch.randn(samples, WIDTH, requires_grad=True), mask=mask)
        found.append(offloader.most)
    assert 0 < 2 * found[0] == found[1], "only what grows with the batch, and not the mask"


def test_a_graph_that_no_backward_uses_leaves_nothing() -> None:
    net, offloader = offloaded(ALL)
    loss = net(torch.randn(4, WIDTH)).sum()
    assert offloader.held
    with torch.no_grad():
        net(torch.randn(4, WIDTH))
    del loss
    assert offloader.held == 0


def test_backward_can_run_twice_and_after_other_forwards() -> None:
    net, _ = offloaded(ALL)
    plain = network()
    plain.load_state_dict(net.state_dict())
    found = []
    for model in (plain.eval(), net.eval()):
        torch.manual_seed(2)
        losses = [model(torch.randn(4, WIDTH)).square().sum() for _ in range(3)]
        for i in (1, 0, 2):
            losses[i].backward(retain_graph=i == 0)
        losses[0].backward()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, theirs)


def test_the_order_of_a_device_with_streams() -> None:
    """On it, what leaves is freed one block later; on a CPU nothing can be seen of the waiting."""
    expected, at_once = step(*offloaded(ALL))
    net, offloader = offloaded(ALL)
    offloader.instant = False
    for _ in range(2):
        for p in net.parameters():
            p.grad = None
        found, later = step(net, offloader)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert at_once < later < 3 * at_once
    assert offloader.held == 0


def test_a_copy_runs_its_own_weights() -> None:
    net, _ = offloaded(ALL)
    loss = net(torch.randn(4, WIDTH)).sum()
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert other(torch.ones(4, WIDTH)).abs().max() == 0
    loss.backward()
    assert net.head.weight.grad is not None
    assert other.head.weight.grad is None


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        y = self.norm(x)
        x.add_(1.0)
        return x + y


@pytest.mark.parametrize("place", [0, 1])
def test_a_change_of_what_is_needed_is_noticed(place: int) -> None:
    blocks: list[nn.Module] = [Block(), Block()]
    blocks[place] = ChangesItsInput()
    net = PipelineSequential(layers=blocks)
    transform_blocks(net, [], ALL, CPU)
    with pytest.raises(RuntimeError, match="changed in place"):  # noqa: PT012
        loss = net(torch.randn(4, WIDTH)).sum()
        loss.backward()
