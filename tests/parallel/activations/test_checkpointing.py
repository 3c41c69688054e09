"""Blocks that forget their activations: the same numbers, fewer bytes."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import (
    ActivationConfig,
    MegatronStrategy,
    PipelineConfig,
    PipelineSequential,
    ShardingConfig,
)
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.models.transformer import TransformerBlock
from lightning_megatron.parallel.activations.checkpointing import recompute
from lightning_megatron.parallel.activations.config import blocks_to_recompute, find_blocks
from lightning_megatron.parallel.block_transforms import transform_blocks
from lightning_megatron.pipeline.timing import saved_bytes
from lightning_megatron.testing import WorkerPool
from tests.parallel.counting import Counted
from tests.parity import reference
from tests.parity.jobs import (
    Outcome,
    ParityModule,
    Recorder,
    quiet_trainer,
    transformer_config,
    whole_parameters,
)
from tests.parity.reference import Data

CPU = torch.device("cpu")
WIDTH = 8


class Block(nn.Module):
    """Counts its forwards; random, and with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.runs += 1
        y = nn.functional.dropout(torch.tanh(self.norm(self.linear(x))), 0.3, self.training)
        return x + scale * torch.sin(y)


def network() -> PipelineSequential:
    torch.manual_seed(0)
    return PipelineSequential(
        embedding=nn.Sequential(nn.Linear(WIDTH, WIDTH)),
        layers=[Block() for _ in range(4)],
        head=nn.Linear(WIDTH, WIDTH),
    ).double()


def gradients(net: PipelineSequential) -> tuple[list[Tensor], int]:
    """Gradients and input gradient of a step, and what autograd kept for it."""
    torch.manual_seed(1)
    x = torch.randn(16, WIDTH, dtype=torch.float64, requires_grad=True)
    with saved_bytes() as kept:
        loss = net(x, scale=0.5).square().sum()
    torch.rand(3)  # the recomputation must not depend on where the generator is by then
    loss.backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    return [g.clone() for g in found if g is not None], kept[0]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_same_numbers_from_fewer_bytes(every: int) -> None:
    plain, net = network(), network()
    expected, all_bytes = gradients(plain)
    recompute(net, blocks_to_recompute(net, ActivationConfig(recompute="full", every=every)))
    found, few_bytes = gradients(net)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), "running statistics count the batch once"
    assert [b.runs for b in net.layers] == [2 if i % every == 0 else 1 for i in range(4)]
    assert few_bytes < all_bytes * (0.5 if every == 1 else 0.9)
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize("group", [2, 3, 8])
def test_a_group_of_blocks_keeps_one_input(group: int) -> None:
    plain, single, net = network(), network(), network()
    expected, _ = gradients(plain)
    config = ActivationConfig(recompute="full")
    transform_blocks(single, blocks_to_recompute(single, config), config, CPU)
    _, each = gradients(single)
    config = ActivationConfig(recompute="full", group=group)
    transform_blocks(net, blocks_to_recompute(net, config), config, CPU)
    found, together = gradients(net)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), "running statistics count the batch once"
    assert [b.runs for b in net.layers] == [2] * 4
    inputs = 4 - -(-4 // group)
    assert each - together == inputs * 16 * WIDTH * 8
    transform_blocks(net, [], ActivationConfig(), CPU)
    gradients(net)
    assert [b.runs for b in net.layers] == [3] * 4


def test_groups_that_are_watched_run_item_by_item() -> None:
    net, seen = network(), []
    expected, _ = gradients(network())
    config = ActivationConfig(recompute="full", group=2)
    transform_blocks(net, blocks_to_recompute(net, config), config, CPU)
    net.stage_items[0].observer = lambda position, output: seen.append(position)
    found, _ = gradients(net)
    assert seen == [-1, 0, 1, 2, 3, 4, 5]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_evaluation_runs_once_and_a_copy_runs_its_own_weights() -> None:
    net = network()
    recompute(net, find_blocks(net, None))
    with torch.no_grad():
        net(torch.ones(4, WIDTH, dtype=torch.float64))
    assert [b.runs for b in net.layers] == [1] * 4
    other = copy.deepcopy(net).eval()
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    before = other(x)
    nn.init.zeros_(net.layers[0].linear.weight)
    assert torch.equal(other(x), before)
    nn.init.zeros_(other.layers[0].linear.weight)
    assert not torch.equal(other(x), before)


def test_can_be_taken_back() -> None:
    net = network()
    recompute(net, find_blocks(net, None))
    recompute(net, [net.layers[1]])
    gradients(net)
    assert [b.runs for b in net.layers] == [1, 2, 1, 1]


class Constants(nn.Module):
    """Makes a tensor in the default format."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * torch.full((WIDTH,), 0.1))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_default_format_is_that_of_the_forward(mode: Any) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Constants()).double()
    recompute(net, [net[1]], ActivationConfig(recompute=mode))
    with patch_default(torch.float64):
        loss = net(torch.ones(2, WIDTH)).sum()
    loss.backward()
    assert torch.get_default_dtype() == torch.float32
    with patch_default(torch.float64):
        expected = torch.cos(net[0](torch.ones(2, WIDTH)) * 0.1).sum(0) * 0.1
    assert torch.equal(net[0].bias.grad, expected)


@contextmanager
def patch_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(2, 2), nn.ModuleList([Block(), nn.ReLU(), Block()])


FINDABLE: dict[str, tuple[Callable[[], nn.Module], Sequence[str] | None, list[str]]] = {
    "members of the trunk's list": (network, None, [f"layers.{i}" for i in range(4)]),
    "items where there is no list": (
        lambda: PipelineSequential(nn.Linear(2, 2), Block(), Block()),
        None,
        ["1", "2"],
    ),
    "lists of any module": (Listed, None, ["blocks.0", "blocks.2"]),
    "outermost": (
        lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.ReLU()),
        None,
        ["0"],
    ),
    "by class": (Listed, ["Linear"], ["stem", "blocks.0.linear", "blocks.2.linear"]),
    "by name": (Listed, ["*.2", "*.norm"], ["blocks.0.norm", "blocks.2"]),
    "single layers gain nothing": (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None, []),
}


@pytest.mark.parametrize("name", FINDABLE)
def test_blocks_are_found(name: str) -> None:
    make, classes, expected = FINDABLE[name]
    module = make()
    names = {child: n for n, child in module.named_modules()}
    assert [names[b] for b in find_blocks(module, classes)] == expected


@pytest.mark.parametrize(
    ("keep", "products", "attentions"),
    [(["attention", "matmul"], 0, 0), (["matmul"], 0, 1), (["attention"], 5, 0)],
)
def test_what_is_kept_is_not_computed_again(
    keep: list[Any], products: int, attentions: int
) -> None:
    """A block with five products before its last one, whose result no backward needs."""
    config = transformer_config("gpt")
    blocks = nn.ModuleList([TransformerBlock(config, None)])
    x = torch.randn(2, 4, config.hidden_size, requires_grad=True)
    memory = ActivationConfig(recompute="selective", keep=keep)
    forward, found = torch.ops.aten, []
    ran = (forward.addmm.default, forward._scaled_dot_product_flash_attention_for_cpu.default)
    for mode in (ActivationConfig(), memory):
        recompute(blocks, blocks_to_recompute(blocks, mode), mode)
        y = blocks[0](x).sum()
        counts = []
        for func in ran:
            with Counted(func) as counted:
                y.backward(retain_graph=mode is not memory)
            counts.append(counted.count)
            if mode is memory:
                y = blocks[0](x).sum()
        found.append(counts)
    assert found[0] == [0, 0]
    assert found[1] == [products, attentions]


def test_a_second_backward_needs_a_block_that_keeps_nothing() -> None:
    net = network()
    recompute(net, find_blocks(net, None))
    loss = net(torch.randn(4, WIDTH, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    for p, gradient in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * gradient)
    config = ActivationConfig(recompute="selective")
    recompute(net, blocks_to_recompute(net, config), config)
    loss = net(torch.randn(4, WIDTH, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute='full' allows"):
        loss.backward()


def train(
    options: dict[str, Any],
    architecture: Any,
    dropout: float,
    memory: ActivationConfig,
    precision: str,
) -> Outcome:
    """Two steps with dropout everywhere."""
    L.seed_everything(1, verbose=False)
    zero = ShardingConfig(stage=options.get("zero", 1), min_numel=1)
    strategy = MegatronStrategy(**{**options, "zero": zero}, activations=memory)
    recorder = Recorder(1)
    module = ParityModule(architecture, Data(steps=2))
    for child in module.modules():
        if isinstance(child, Dropout):
            child.p = dropout
        elif isinstance(child, CausalSelfAttention):
            child.dropout = dropout
    if precision != "64-true":
        module.float()
    trainer = quiet_trainer(
        strategy,
        callbacks=[recorder],
        gradient_clip_val=reference.CLIP,
        precision=precision,
    )
    trainer.fit(module)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, whole_parameters(module.model, strategy.topology))


MODES = (
    ActivationConfig(recompute="full"),
    ActivationConfig(recompute="selective", offload=True, offload_min_bytes=0),
    ActivationConfig(recompute="selective", keep=["attention"], blocks=["*.mlp", "*.attention"]),
    ActivationConfig(recompute="full", group=2),
)
WHOLE = (*MODES[:2], MODES[3])
"""Without parts of blocks."""


def compare_job(
    options: dict[str, Any],
    architecture: str,
    dropout: float,
    precision: str = "64-true",
    modes: Sequence[ActivationConfig] = MODES,
) -> None:
    plain = train(options, architecture, dropout, ActivationConfig(), precision)
    for memory in modes:
        replicated = options.get("tp", 1) > 1 and not options.get("sequence_parallel")
        if replicated and memory.group == 1:
            memory = replace(memory, distribute_inputs=True)
        other = train(options, architecture, dropout, memory, precision)
        assert other.losses == plain.losses
        assert other.norms == plain.norms
        for name, value in plain.weights.items():
            assert torch.equal(other.weights[name], value), name


LAYOUTS: dict[str, tuple[int, str, float, dict[str, Any]]] = {
    "alone": (1, "gpt", 0.2, {"num_microbatches": 2}),
    "tp=2": (2, "gpt", 0.2, {"tp": 2}),
    "pp=2": (2, "deep", 0.2, {"pp": 2, "num_microbatches": 2}),
    "pp=2 zbv": (
        2,
        "deep",
        0.2,
        {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2},
    ),
    "pp=2 zbv tp=2": (
        4,
        "gpt",
        0.2,
        {"pp": PipelineConfig(degree=2, schedule="zbv"), "tp": 2, "num_microbatches": 2},
    ),
    "dp=2 zero 3": (2, "gpt", 0.2, {"zero": 3, "num_microbatches": 2}),
    "dp=2 zero 2": (2, "llama", 0.0, {"zero": 2, "num_microbatches": 2}),
}


THOROUGH = ("pp=2", "pp=2 zbv tp=2", "dp=2 zero 2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in THOROUGH)) for n in LAYOUTS]
)
def test_dropout_and_all_are_the_same_to_the_bit(pool: WorkerPool, name: str) -> None:
    world, architecture, dropout, options = LAYOUTS[name]
    modes = WHOLE if name in ("pp=2 zbv", "dp=2 zero 3") else MODES
    pool.run(world, compare_job, options, architecture, dropout, modes=modes)


@pytest.mark.thorough
def test_the_same_under_bfloat16(pool: WorkerPool) -> None:
    options = {"tp": 2, "sequence_parallel": True, "zero": 3}
    pool.run(4, compare_job, options, "llama", 0.2, "bf16-mixed", MODES[:-1])


@pytest.mark.parametrize(
    ("keep", "func"),
    [
        (["norm"], torch.ops.aten.native_layer_norm.default),
        (["activation"], torch.ops.aten.gelu.default),
        (["aten.gelu"], torch.ops.aten.gelu.default),
        (["aten.silu"], torch.ops.aten.silu.default),
    ],
)
def test_other_operations_can_be_kept(keep: list[str], func: Any) -> None:
    config = transformer_config("gpt" if "layer" in str(func) or "gelu" in str(func) else "llama")
    blocks = nn.ModuleList([TransformerBlock(config, None)])
    x = torch.randn(2, 4, config.hidden_size, requires_grad=True)
    counts = []
    for memory in (
        ActivationConfig(recompute="full"),
        ActivationConfig(recompute="selective", keep=keep),
    ):
        recompute(blocks, [blocks[0]], memory)
        y = blocks[0](x).sum()
        with Counted(func) as counted:
            y.backward()
        counts.append(counted.count)
    assert counts[0] > counts[1] == 0
