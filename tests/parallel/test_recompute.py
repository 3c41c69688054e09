"""Blocks that forget their activations: the same numbers, fewer bytes."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.recomputation import LiveBytes
from lightning_megatron import MegatronStrategy, MemoryConfig, PipelineSequential, ShardingConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.models.transformer import TransformerBlock
from lightning_megatron.parallel.blocks import transform_blocks
from lightning_megatron.parallel.knapsack import needed
from lightning_megatron.parallel.memory import blocks_to_recompute, find_blocks
from lightning_megatron.parallel.recompute import recompute
from lightning_megatron.pipeline.measure import saved_bytes
from lightning_megatron.strategies.adaptive_memory import AdaptiveMemory
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
PLAIN = MemoryConfig()
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
    recompute(net, blocks_to_recompute(net, MemoryConfig(recompute="full", every=every)))
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
    config = MemoryConfig(recompute="full")
    transform_blocks(single, blocks_to_recompute(single, config), config, CPU)
    _, each = gradients(single)
    config = MemoryConfig(recompute="full", group=group)
    transform_blocks(net, blocks_to_recompute(net, config), config, CPU)
    found, together = gradients(net)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), "running statistics count the batch once"
    assert [b.runs for b in net.layers] == [2] * 4
    inputs = 4 - -(-4 // group)
    assert each - together == inputs * 16 * WIDTH * 8
    transform_blocks(net, [], MemoryConfig(), CPU)
    gradients(net)
    assert [b.runs for b in net.layers] == [3] * 4


def test_groups_that_are_watched_run_item_by_item() -> None:
    net, seen = network(), []
    expected, _ = gradients(network())
    config = MemoryConfig(recompute="full", group=2)
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
    recompute(net, [net[1]], MemoryConfig(recompute=mode))
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
    memory = MemoryConfig(recompute="selective", keep=keep)
    forward, found = torch.ops.aten, []
    ran = (forward.addmm.default, forward._scaled_dot_product_flash_attention_for_cpu.default)
    for mode in (MemoryConfig(), memory):
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
    config = MemoryConfig(recompute="selective")
    recompute(net, blocks_to_recompute(net, config), config)
    loss = net(torch.randn(4, WIDTH, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute='full' allows"):
        loss.backward()


def train(
    options: dict[str, Any], architecture: Any, dropout: float, memory: MemoryConfig, precision: str
) -> Outcome:
    """Two steps with dropout everywhere."""
    L.seed_everything(1, verbose=False)
    sharding = ShardingConfig(min_numel=1)
    strategy = MegatronStrategy(**options, sharding=sharding, memory=memory)
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
    MemoryConfig(recompute="full"),
    MemoryConfig(recompute="selective", offload_activations=True, offload_min_bytes=0),
    MemoryConfig(recompute="selective", keep=["attention"], blocks=["*.mlp", "*.attention"]),
    MemoryConfig(recompute="full", group=2),
)
GROUPED = ("alone", "tp=2", "pp=2", "dp=2 zero 3")
"""Layouts that are tried with groups too."""


def compare_job(
    options: dict[str, Any],
    architecture: str,
    dropout: float,
    precision: str = "64-true",
    modes: Sequence[MemoryConfig] = MODES,
) -> None:
    plain = train(options, architecture, dropout, MemoryConfig(), precision)
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
    "pp=2": (2, "deep", 0.2, {"pp": 2, "num_microbatches": 4}),
    "pp=2 zbv tp=2": (
        4,
        "gpt",
        0.2,
        {"pp": 2, "schedule": "zbv", "tp": 2, "num_microbatches": 4},
    ),
    "dp=2 zero 3": (2, "gpt", 0.2, {"zero": 3, "num_microbatches": 2}),
    "dp=2 zero 2": (2, "llama", 0.0, {"zero": 2, "num_microbatches": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_and_all_are_the_same_to_the_bit(pool: WorkerPool, name: str) -> None:
    world, architecture, dropout, options = LAYOUTS[name]
    modes = MODES if name in GROUPED else MODES[:-1]
    pool.run(world, compare_job, options, architecture, dropout, modes=modes)


class Kept(L.Callback):
    """Bytes that autograd keeps of each batch, parameters excluded."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        step = module.training_step

        def counted(*args: Any) -> Any:
            with saved_bytes() as kept:
                try:
                    return step(*args)
                finally:  # a stage ends by an exception
                    self.sizes.append(kept[0])

        module.training_step = counted


def adaptive_run(options: dict[str, Any], memory: MemoryConfig) -> tuple[Any, ...]:
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options, memory=memory)
    module, kept = ParityModule("deep", Data(steps=4)), Kept()
    quiet_trainer(strategy, callbacks=[kept]).fit(module)
    return strategy, whole_parameters(module.model, strategy.topology), kept.sizes


def adaptive_job(options: dict[str, Any]) -> tuple[Any, ...]:
    """Without, with much, with some and with too little memory; what is recomputed with some."""
    _, expected, all_bytes = adaptive_run(options, MemoryConfig())
    much = MemoryConfig(recompute="adaptive", activation_gib=1.0)
    strategy, weights, kept_bytes = adaptive_run(options, much)
    assert kept_bytes[-1] == all_bytes[-1] > kept_bytes[0]
    assert set(strategy.adaptive_memory.ways.values()) == {"none"}
    needs, rank = [], strategy.topology.pp.rank
    for stages in range(strategy.topology.pp.size):
        own = [b.costs for b in strategy.adaptive_memory.measured.values() if b.rank == stages]
        full, none = ["full"] * len(own), ["none"] * len(own)
        when = strategy.adaptive_memory.moments[stages]
        needs.append((needed(own, full, when), needed(own, none, when)))
    limit = (max(least for least, _ in needs) + max(most for _, most in needs)) / 2
    some = MemoryConfig(recompute="adaptive", activation_gib=limit / 2**30)
    strategy, others, few_bytes = adaptive_run(options, some)
    for name, value in expected.items():
        assert torch.equal(weights[name], value)
        assert torch.equal(others[name], value)
    ways, table = strategy.adaptive_memory.ways, strategy.adaptive_memory.measured
    chosen = [name for name, way in ways.items() if way != "none"]
    mine = {name: block.costs for name, block in table.items() if block.rank == rank}
    assert 0 < len(chosen) < len(table)
    # The results that a block keeps are not in autograd's hands.
    saved = sum(c.kept - c.input for name, c in mine.items() if name in chosen)
    passes = len(few_bytes) // 4  # the step runs once for every microbatch and stage
    assert sum(all_bytes[-passes:]) - sum(few_bytes[-passes:]) == pytest.approx(
        saved * options.get("num_microbatches", 1), rel=0.1
    )
    if "pp" in options:
        little = MemoryConfig(recompute="adaptive", activation_gib=needs[0][0] / 2**31)
        with pytest.raises(ConfigError, match="nearest valid: activation_gib="):
            adaptive_run(options, little)
    return tuple(ways.items())


ADAPTIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2": (2, {"tp": 2, "num_microbatches": 2}),
    "pp=2 zbv": (2, {"pp": 2, "schedule": "zbv", "num_microbatches": 4}),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_recomputes_some_blocks(pool: WorkerPool, name: str) -> None:
    world, options = ADAPTIVE[name]
    plans = pool.run(world, adaptive_job, options)
    assert len(set(plans)) == 1, "all ranks know of the same plan"


def test_the_same_under_bfloat16(pool: WorkerPool) -> None:
    options = {"tp": 2, "sequence_parallel": True, "zero": 3}
    pool.run(4, compare_job, options, "llama", 0.2, "bf16-mixed", MODES[:-1])


class Peak(L.Callback):
    """The most bytes that are alive in the last of four steps, from its forward to its update."""

    most = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.live = LiveBytes()
            self.live.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 3:
            self.live.__exit__(None, None, None)
            self.most = self.live.most


@dataclass
class Held:
    """What a rank holds under a plan."""

    counted: int
    peak: int
    ways: list[str]
    weights: dict[str, Tensor]


def peak_of(options: dict[str, Any], memory: MemoryConfig) -> tuple[int, Any]:
    L.seed_everything(1, verbose=False)
    strategy, peak = MegatronStrategy(**options, memory=memory), Peak()
    module = ParityModule("deep", Data(steps=4, batch=32))
    quiet_trainer(strategy, callbacks=[peak]).fit(module)
    return peak.most, strategy


def peak_job(
    options: dict[str, Any], parts: Sequence[float], base: MemoryConfig = PLAIN
) -> list[Held]:
    """Of plans for parts of all memory, on this rank."""
    # Of each block: a forward of ten seconds, noting at no cost, and a repetition of one.
    clock = itertools.cycle([0.0, 10.0, 0.0, 10.0, 0.0, 1.0])
    with patch.object(AdaptiveMemory, "_now", lambda _: next(clock)):
        return peaks_under_limits(options, parts, base)


def peaks_under_limits(
    options: dict[str, Any], parts: Sequence[float], base: MemoryConfig
) -> list[Held]:
    most, strategy = peak_of(options, replace(base, recompute="adaptive", activation_fraction=0.5))
    plan = strategy.adaptive_memory
    by_rank = [[b.costs for b in plan.measured.values() if b.rank == rank] for rank in plan.moments]
    least, whole = (
        max(
            needed(costs, [way] * len(costs), plan.moments[rank])
            for rank, costs in enumerate(by_rank)
        )
        for way in ("full", "none")
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    costs, when = by_rank[rank], plan.moments[rank]
    outside = most - needed(costs, ["none"] * len(costs), when)
    found = []
    for part in parts:
        limit = int(least + part * (whole - least))
        memory = replace(base, recompute="adaptive", activation_gib=limit / 2**30)
        peak, strategy = peak_of(options, memory)
        plan = strategy.adaptive_memory
        ways = [plan.ways[name] for name, b in plan.measured.items() if b.rank == rank]
        assert peak - outside <= limit < whole
        trained = whole_parameters(strategy.lightning_module.model, strategy.topology)
        found.append(Held(needed(costs, ways, when), peak - outside, ways, trained))
    return found


def test_the_peak_stays_under_the_limit(pool: WorkerPool) -> None:
    """What is outside of the blocks, the backward's own tensors too, is the same in all modes."""
    little, more = pool.run(1, peak_job, {}, (0.1, 0.7))[0]
    assert "full" in little.ways
    assert set(more.ways) >= {"none", "selective"}


@pytest.mark.parametrize(
    ("schedule", "part", "ways"), [("1f1b", 0.7, {"none", "selective"}), ("zb-h1", 0.05, {"full"})]
)
def test_a_pipeline_holds_what_is_counted(
    pool: WorkerPool, schedule: str, part: float, ways: set[str]
) -> None:
    options = {"pp": 2, "num_microbatches": 4, "schedule": schedule}
    first = pool.run(2, peak_job, options, (part,))[0]
    for held in first:
        assert ways <= set(held.ways)
        # The halves of a backward leave less to be kept than all of it, which is counted.
        least = 0.97 if schedule == "1f1b" else 0.8
        assert least * held.counted < held.peak < 1.01 * held.counted


def compiled_job() -> list[str]:
    """The ways in which compiled blocks are recomputed, whose weights have been compared."""
    compiled = MemoryConfig(compile="block", compile_backend="aot_eager")
    _, plainly = peak_of({}, MemoryConfig())
    torch.compiler.reset()
    # One graph serves all blocks, whether they are measured, recomputed or neither.
    limits = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        [found] = peak_job({}, (0.4,), compiled)
    expected = whole_parameters(plainly.lightning_module.model, plainly.topology)
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-13)
    return found.ways


def test_compiled_blocks_are_measured(pool: WorkerPool) -> None:
    ways = pool.run(1, compiled_job)[0]
    assert set(ways) == {"none", "full"}


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
    for memory in (MemoryConfig(recompute="full"), MemoryConfig(recompute="selective", keep=keep)):
        recompute(blocks, [blocks[0]], memory)
        y = blocks[0](x).sum()
        with Counted(func) as counted:
            y.backward()
        counts.append(counted.count)
    assert counts[0] > counts[1] == 0
