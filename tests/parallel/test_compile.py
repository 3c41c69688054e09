"""What is compiled: the same numbers under every kind of layout, and that it can be taken back."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_megatron import MemoryConfig, PipelineSequential
from lightning_megatron.layers.deferral import WeightGradients
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.parallel.blocks import transform_blocks
from lightning_megatron.parallel.data import ShardingConfig
from lightning_megatron.parallel.wrapping import unwrap
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import whole_parameters
from tests.strategies.small import (
    WIDTH,
    Small,
    assert_same,
    dp_of,
    loader,
    make_trainer,
    merged,
)

CPU = torch.device("cpu")


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


def train(processes: int, options: dict[str, Any], memory: MemoryConfig) -> Found:
    """Two batches under a layout."""
    torch.compiler.reset()
    counters["stats"].clear()
    deferred: list[Any] = []
    limits = {"recompile_limit": 3, "fail_on_recompile_limit_hit": True}
    layout = {**options, "memory": memory, "sharding": ShardingConfig(min_numel=1)}
    noting = patch.object(WeightGradients, "add", _noting(deferred))
    with noting, torch._dynamo.config.patch(limits):
        trainer, module = make_trainer(layout, processes, max_steps=2), Net()
        trainer.fit(module, loader(dp=dp_of(processes, options)))
    whole = whole_parameters(module.net, trainer.strategy.topology)
    return Found(whole, counters["stats"]["unique_graphs"], len(deferred))


def _noting(deferred: list[Any]) -> Any:
    add = WeightGradients.add

    def noted(self: WeightGradients, targets: list[Tensor], compute: Any) -> None:
        deferred.append(targets)
        add(self, targets, compute)

    return noted


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "model, pp=2 zb-h1": (
        2,
        {"pp": 2, "num_microbatches": 4, "schedule": "zb-h1"},
        {"compile": "model"},
    ),
    "model, dp=2 zero 3": (2, {"zero": 3, "num_microbatches": 2}, {"compile": "model"}),
    "block, pp=2 zbv, full": (
        2,
        {"pp": 2, "num_microbatches": 2, "schedule": "zbv"},
        {"compile": "block", "recompute": "full"},
    ),
    "block, tp=2 pp=2 zb-h1": (
        4,
        {"tp": 2, "pp": 2, "num_microbatches": 1, "schedule": "zb-h1"},
        {"compile": "block"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_networks_train_as_others_do(pool: WorkerPool, name: str) -> None:
    processes, options, memory = CASES[name]
    plain = pool.run(1, train, 1, {}, MemoryConfig())
    compiled = MemoryConfig(compile_backend="aot_eager", **memory)
    found = pool.run(processes, train, processes, options, compiled, timeout=300)
    assert_same(merged([f.weights for f in found]), plain[0].weights)
    assert all(f.graphs for f in found)
    assert all(bool(f.deferred) == ("zb" in name) for f in found)


@pytest.mark.parametrize(("name", "graphs"), [("model", 1), ("block", 4)])
def test_one_graph_of_the_model_or_one_of_each_block(
    monkeypatch: pytest.MonkeyPatch, name: Any, graphs: int
) -> None:
    """The compiler itself is left out."""
    compiled: list[Any] = []

    def compile_(run: Any, **options: Any) -> Any:
        compiled.append((run, options["backend"]))
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    module, plain = Net(), Net()
    transform_blocks(module, [], MemoryConfig(compile=name, compile_backend="aot_eager"), CPU)
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


class Unpiped(nn.Module):
    """A network that no pipeline cuts: its parts are in lists, and it has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)])
        self.loss = nn.MSELoss()


def test_without_a_trunk_the_parts_that_can_be_called_are_compiled() -> None:
    net = Unpiped()
    transform_blocks(net, [], MemoryConfig(compile="model"), CPU)
    changed = {name for name, m in net.named_modules() if "forward" in m.__dict__}
    assert changed == {"body", "heads.0", "heads.1"}
