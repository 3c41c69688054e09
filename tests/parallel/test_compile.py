"""What is compiled: the same numbers under every kind of layout, and that it can be taken back."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_megatron import ActivationConfig, CompileConfig, PipelineConfig, PipelineSequential
from lightning_megatron._torch.graphs import TorchDispatchMode, compile_with_callers_only
from lightning_megatron.layers import linear_functions
from lightning_megatron.layers.delayed_wgrad import WgradQueue, set_gemm_backend
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import build_trunk
from lightning_megatron.parallel.activations.config import blocks_to_recompute
from lightning_megatron.parallel.block_transforms import transform_blocks
from lightning_megatron.parallel.forward_wrapper import unwrap
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.meter import Meter
from lightning_megatron.whole.memory import own_graph
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.layers.parity import distribute, make_topology
from tests.parallel.counting import Counted
from tests.parity.jobs import whole_parameters
from tests.strategy.small import (
    WIDTH,
    Small,
    assert_same,
    dp_of,
    loader,
    make_trainer,
    merged,
)

LLAMA = TransformerConfig(
    vocab_size=32, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, max_seq_len=8
)
GPT = replace(LLAMA, norm="layernorm", activation="gelu", positions="learned", bias=True)
ROWS = 2
"""Samples of a microbatch; no weight has as many rows."""
CPU = torch.device("cpu")
PLAIN, EAGER = ActivationConfig(), CompileConfig()
FULL, SELECTIVE = ActivationConfig(recompute="full"), ActivationConfig(recompute="selective")
MODEL = CompileConfig(scope="model", backend="aot_eager")
BLOCK = CompileConfig(scope="block", backend="aot_eager")


class Block(nn.Module):
    """A norm, a pair of parallel layers, and a plain one whose weight gradient can wait as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.up(self.norm(x) * 0.5)) * 2
        return x + torch.tanh(self.plain(torch.sin(self.down(y))))


class Net(Small):
    """Blocks between two single layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = PipelineSequential(
            stem=nn.Linear(WIDTH, WIDTH),
            layers=[Block() for _ in range(4)],
            head=nn.Linear(WIDTH, WIDTH),
        ).double()


@dataclass
class Found:
    """What one rank found."""

    weights: dict[str, Tensor]
    graphs: int
    """How many the compiler was given."""
    deferred: int
    """Weight gradients that were left for later."""
    kept: int
    """Numbers that autograd kept of all microbatches; of weights, none."""


def compare(
    processes: int, options: dict[str, Any], memory: ActivationConfig, compiled: CompileConfig
) -> tuple[Found, int]:
    """What is found with compilation, and what is kept without it and without recomputation."""
    return train(processes, options, memory, compiled), train(processes, options).kept


def train(
    processes: int,
    options: dict[str, Any],
    memory: ActivationConfig = PLAIN,
    compiled: CompileConfig = EAGER,
) -> Found:
    """Two batches under a layout."""
    torch.compiler.reset()
    counters["stats"].clear()
    deferred: list[Any] = []
    limits = {"recompile_limit": 3, "fail_on_recompile_limit_hit": True}
    layout = {**options, "activations": memory, "compile": compiled}
    layout["zero"] = ShardingConfig(stage=1, min_numel=1)
    noting = patch.object(WgradQueue, "add", _noting(deferred))
    with noting, torch._dynamo.config.patch(limits):
        trainer, module = make_trainer(layout, processes, max_steps=2), Net()
        kept = count_kept(module)
        trainer.fit(module, loader(dp=dp_of(processes, options)))
    whole = whole_parameters(module.net, trainer.strategy.topology)
    return Found(whole, counters["stats"]["unique_graphs"], len(deferred), sum(kept))


def count_kept(module: Net) -> list[int]:
    """Note sizes of what autograd keeps in the steps of ``module``."""
    step, sizes, seen = module.training_step, [], set[int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] == (ROWS,) and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            sizes.append(tensor.numel())
        return tensor

    def counted(*args: Any) -> Any:
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return step(*args)

    compile_with_callers_only(pack)
    module.training_step = counted  # type: ignore[method-assign]
    return sizes


def _noting(deferred: list[Any]) -> Any:
    add = WgradQueue.add

    def noted(self: WgradQueue, targets: list[Tensor], compute: Any) -> None:
        deferred.append(targets)
        add(self, targets, compute)

    return noted


CASES: dict[str, tuple[int, dict[str, Any], ActivationConfig]] = {
    "model, pp=2 zb-h1, full": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 4},
        FULL,
    ),
    "model, pp=2, selective": (
        2,
        {"pp": 2, "num_microbatches": 4},
        SELECTIVE,
    ),
    "block, pp=2 zbv, full": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 4},
        FULL,
    ),
    "block, tp=2, selective": (
        2,
        {"tp": 2, "num_microbatches": 4},
        SELECTIVE,
    ),
    "block, tp=2 pp=2 zb-h1": (
        4,
        {"tp": 2, "pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 1},
        PLAIN,
    ),
}


THOROUGH = ("model, pp=2, selective", "block, pp=2 zbv, full", "block, tp=2 pp=2 zb-h1")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in THOROUGH)) for n in CASES]
)
def test_compiled_networks_train_as_others_do(pool: WorkerPool, name: str) -> None:
    processes, options, memory = CASES[name]
    plain = pool.run(1, train, 1, {})
    compiled = MODEL if name.startswith("model") else BLOCK
    by_rank = pool.run(processes, compare, processes, options, memory, compiled, timeout=300)
    found = [compiled for compiled, _ in by_rank]
    assert_same(merged([f.weights for f in found]), plain[0].weights)
    assert all(f.graphs for f in found)
    assert all(bool(f.deferred) == ("zb" in name) for f in found)
    if name == "block, tp=2, selective":
        assert all(f.graphs == 1 for f in found)
    if memory.recompute != "none":
        assert all(f.kept < 0.6 * plainly for f, plainly in by_rank), by_rank


@dataclass
class Ran:
    """A block, forward and backward."""

    tensors: list[Tensor]
    """The output and all gradients."""
    sent: float
    """Bytes that this rank sent over tp."""
    calls: int
    """Collectives."""


def run_block(sequence_parallel: bool, config: TransformerConfig) -> tuple[Ran, Ran]:
    """A block as it is, and as a single graph; a gathered input is gathered again, not kept."""
    topology = make_topology(2, sequence_parallel)
    block: Any = distribute(build_trunk(config).layers[0].double(), topology)
    shape = (2, 8 // (1 + sequence_parallel), config.hidden_size)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.compiler.reset()
    with patch.object(linear_functions, "regathers", lambda _: True):
        plain = run(block.forward, x, block, topology.tp.meter)
        whole = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        with own_graph():
            return plain, run(whole, x, block, topology.tp.meter)


def run(forward: Any, x: Tensor, block: nn.Module, meter: Meter) -> Ran:
    """Forward and backward."""
    block.zero_grad()
    x.grad, meter.calls, meter.bytes = None, 0, 0
    y = forward(x)
    y.square().sum().backward()
    grads = [p.grad for p in (x, *block.parameters()) if p.grad is not None]
    return Ran([y.detach(), *grads], meter.bytes, meter.calls)


@pytest.mark.parametrize(
    "sequence_parallel", [pytest.param(False, marks=pytest.mark.thorough), True]
)
def test_a_block_is_one_graph_under_tp(pool: WorkerPool, sequence_parallel: bool) -> None:
    """It sends what is sent without a compiler: nothing is left out, repeated or kept instead."""
    config = LLAMA if sequence_parallel else GPT
    for plain, whole in pool.run(2, run_block, sequence_parallel, config):
        assert (whole.sent, whole.calls) == (plain.sent, plain.calls)
        torch.testing.assert_close(whole.tensors, plain.tensors, rtol=1e-12, atol=1e-14)


class Order(TorchDispatchMode):
    """Notes products and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func) or "_sum" in str(func):
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def order_of_backward() -> list[str]:
    """What a compiled column-parallel layer does."""
    layer = distribute(ColumnParallelLinear(8, 8, bias=False), make_topology(2))
    torch.compiler.reset()

    def block(x: Tensor) -> Tensor:  # torch leaves out code that it has left out before
        y: Tensor = layer(x)
        return y

    with own_graph():
        y = torch.compile(block, backend="aot_eager")(torch.ones(2, 8, requires_grad=True))
    order = Order()
    with order:
        y.sum().backward()
    return order.seen


def test_a_graph_multiplies_while_it_sums(pool: WorkerPool) -> None:
    for order in pool.run(2, order_of_backward):
        assert order == ["mm", "start_sum", "mm", "finish_sum"]


class Halved:
    """GEMM backend of a layer's own."""

    def __init__(self) -> None:
        self.traced: list[bool] = []

    def output(self, x: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        self.traced.append(torch.compiler.is_compiling())
        return x @ weight.t() / 2, None

    def prepare_gradient(self, grad: Tensor, kept: None) -> Tensor:
        return grad / 2

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.t() @ x


def run_products() -> tuple[Ran, Ran, list[bool]]:
    """A block whose layers multiply in a way that may concern several ranks."""
    topology = make_topology(2)
    net: Any = nn.Sequential(distribute(MLP(8, 16).double(), topology))
    halved = Halved()
    for layer in net.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            set_gemm_backend(layer, halved)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    plain = run(net.forward, x, net, topology.tp.meter)
    halved.traced.clear()
    torch.compiler.reset()
    transform_blocks(net, [], PLAIN, CPU, compiled=BLOCK)
    return plain, run(net.forward, x, net, topology.tp.meter), halved.traced


def test_products_that_ranks_agree_on_stay_outside_of_graphs(pool: WorkerPool) -> None:
    for plain, compiled, traced in pool.run(2, run_products):
        torch.testing.assert_close(compiled.tensors, plain.tensors, rtol=1e-12, atol=1e-14)
        assert traced == [False] * 3


@pytest.mark.parametrize(("compiler", "graphs"), [(MODEL, 1), (BLOCK, 4)], ids=["model", "block"])
def test_one_graph_of_the_model_or_one_of_each_block(
    monkeypatch: pytest.MonkeyPatch, compiler: CompileConfig, graphs: int
) -> None:
    """The compiler itself is left out."""
    compiled: list[Any] = []

    def compile_(run: Any, **options: Any) -> Any:
        compiled.append((run, options["backend"]))
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    module, plain = Net(), Net()
    transform_blocks(module, [], PLAIN, CPU, compiled=compiler)
    for ours, theirs in zip(gradients(module), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert len(compiled) == graphs
    assert {backend for _, backend in compiled} == {"aot_eager"}
    unwrap(module)
    gradients(module)
    assert len(compiled) == graphs
    stage = module.net.stage_items[0]
    assert all("forward" not in m.__dict__ for m in (stage, *module.modules()))


def gradients(module: Net) -> list[Tensor]:
    torch.manual_seed(1)
    module.net(torch.randn(8, WIDTH, dtype=torch.float64)).square().sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


class Random(nn.Module):
    """Draws, counts batches, writes in place, and may break the graph in the middle."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.up(torch.sin(self.norm(x) * 0.5)))
        if self.breaks:
            torch._dynamo.graph_break()
        return nn.functional.dropout(torch.tanh(self.down(y).mul_(0.5)), 0.3).add_(x)


class Breaking(Random):
    """The same in two graphs."""

    breaks = True


@dataclass
class Pass:
    """A forward and a backward."""

    gradients: list[Tensor]
    buffers: list[Tensor]
    kept: int
    """Bytes of the activations that the forward kept."""
    products: int
    """Products of linear layers that the backward computed again."""


def one_pass(
    kind: type[Random], memory: ActivationConfig = PLAIN, compiled: CompileConfig = EAGER
) -> Pass:
    """Through a network of three blocks."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = PipelineSequential(layers=[kind() for _ in range(3)], head=nn.Linear(WIDTH, 2)).double()
    transform_blocks(net, blocks_to_recompute(net, memory), memory, CPU, compiled=compiled)
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The place of the generator, which a compiler saves where others do, is no activation.
        if storage.data_ptr() not in own and tensor.dtype == torch.float64:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    x = torch.randn(16, WIDTH, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(x).square().sum()
    torch.rand(3)  # the recomputation must not depend on where the generator is by then
    # What runs outside of graphs in the forward would, under a mode, do so in the backward as well.
    counted = Counted(torch.ops.aten.addmm.default)
    with nullcontext() if kind.breaks else counted:
        loss.backward()
    tensors = [x, *net.parameters()]
    gradients = [t.grad for t in tensors if t.grad is not None]
    return Pass(gradients, list(net.buffers()), sum(kept.values()), counted.count)


INSIDE = {
    "full": (FULL, 1, 6),
    "every 2nd": (replace(FULL, every=2), 1.8, 4),
    "group of 3": (replace(FULL, group=3), 0.6, 6),
    "selective": (SELECTIVE, 3.1, 0),
    "selective, of each block": (SELECTIVE, 3.1, 0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n == "every 2nd")) for n in INSIDE]
)
def test_a_compiler_recomputes_what_it_is_told_to(name: str) -> None:
    memory, more, products = INSIDE[name]
    found = one_pass(Random, memory, BLOCK if "block" in name else MODEL)
    plain, forgetful = one_pass(Random), one_pass(Random, FULL)
    same_numbers(found, plain)
    assert found.kept <= more * forgetful.kept < plain.kept, (
        found.kept,
        forgetful.kept,
        plain.kept,
    )
    assert found.products == products


@pytest.mark.parametrize("memory", [pytest.param(FULL, marks=pytest.mark.thorough), SELECTIVE])
def test_a_block_that_breaks_the_graph_is_recomputed_outside(memory: ActivationConfig) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = one_pass(Breaking, memory, MODEL)
    same_numbers(found, one_pass(Breaking))
    assert found.kept == one_pass(Breaking, memory).kept
    ours = {str(w.message) for w in told if "breaks the graph" in str(w.message)}
    assert len(ours) == (1 if memory.kept else 0)


def test_one_graph_serves_all_blocks_whose_parts_were_changed() -> None:
    """Linear layers that multiply in another way, and parts that are recomputed."""
    torch.compiler.reset()
    counters["stats"].clear()
    net = nn.Sequential(*(Random() for _ in range(3))).double()
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            set_gemm_backend(layer, None)
    parts = ActivationConfig(recompute="full", blocks=["*.up"])
    transform_blocks(net, blocks_to_recompute(net, parts), parts, CPU, compiled=BLOCK)
    net(torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def same_numbers(ours: Pass, theirs: Pass) -> None:
    for found, expected in zip(
        ours.gradients + ours.buffers, theirs.gradients + theirs.buffers, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


class Unpiped(nn.Module):
    """A network that no pipeline cuts: its parts are in lists, and it has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)])
        self.loss = nn.MSELoss()


def test_without_a_trunk_the_parts_that_can_be_called_are_compiled() -> None:
    net = Unpiped()
    transform_blocks(net, [], PLAIN, CPU, compiled=CompileConfig(scope="model"))
    changed = {name for name, m in net.named_modules() if "forward" in m.__dict__}
    assert changed == {"body", "heads.0", "heads.1"}
