"""Values that ``configure_model`` gives to weights are kept, however they are written.

Every way is held against plain Lightning, and in every layout against one process.
"""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import Outcome, merge_stages, quiet_trainer, whole_parameters


class Part(nn.Module):
    """What one way writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.start: nn.Module = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            [ColumnParallelLinear(8, 12), RowParallelLinear(12, 8), nn.LayerNorm(8)]
        )
        self.end = nn.Linear(8, 4)


def values(shape: tuple[int, ...], at: int = 0) -> numpy.ndarray[Any, Any]:
    """Numbers that nothing but the shape decides."""
    count = int(numpy.prod(shape))
    return numpy.sin(numpy.arange(count) + at).reshape(shape).astype("f4")


def pretrained(module: nn.Module) -> dict[str, Tensor]:
    """What a file holds for ``module``."""
    file = io.BytesIO()
    state = {
        name: torch.from_numpy(values(tuple(p.shape), at=len(name)))
        for name, p in module.state_dict().items()
    }
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file)
    return loaded


def init_transformer(module: nn.Module) -> None:
    """As GPT-2 begins, but for what is random."""
    if isinstance(module, (nn.Linear, ColumnParallelLinear, RowParallelLinear)):
        nn.init.constant_(module.weight, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class LowRank(nn.Module):
    """An adapter that begins as nothing: its constructor writes to a part of it."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.up.weight)


class Modulated(nn.Linear):
    """Writes to what the constructor of its base class has drawn."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("mask", torch.ones(width, width).tril().bool())
        with torch.no_grad():
            self.weight *= self.mask
            self.bias.fill_(0.5)


def load_all(net: Any) -> None:
    net.load_state_dict(pretrained(net))


def load_part(net: Any) -> None:
    net.layers[0].load_state_dict(pretrained(net.layers[0]))


def load_and_assign(net: Any) -> None:
    net.end.load_state_dict(pretrained(net.end), assign=True)


def initialisers(net: Any) -> None:
    column, row, norm = net.layers
    nn.init.constant_(column.weight, 0.25)
    nn.init.zeros_(row.weight)
    nn.init.ones_(norm.bias)
    nn.init.eye_(net.start.weight)


@torch.no_grad()
def in_place(net: Any) -> None:
    column, row, norm = net.layers
    column.weight.copy_(torch.from_numpy(values((12, 8))))
    column.bias.zero_().add_(torch.linspace(0, 1, 12))
    row.weight.fill_(0.125).mul_(2)
    norm.weight.copy_(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))
    net.end.weight.copy_(torch.full((4, 8), 0.5).triu())


def through_data(net: Any) -> None:
    column, row, norm = net.layers
    column.weight.data.fill_(0.5)
    column.weight.data[1:3] = 2.0
    row.weight.data = torch.arange(96.0).view(8, 12) / 96
    norm.bias.data[:] = torch.from_numpy(values((8,)))
    net.end.weight = nn.Parameter(torch.full((4, 8), 0.75))


def applied(net: Any) -> None:
    net.apply(init_transformer)


def as_vector(net: Any) -> None:
    parameters = list(net.layers.parameters())
    count = sum(p.numel() for p in parameters)
    vector_to_parameters(torch.from_numpy(values((count,))), parameters)
    vector = parameters_to_vector(net.end.parameters())
    vector_to_parameters(torch.zeros_like(vector) + 0.5, net.end.parameters())


def reads_values(net: Any) -> None:
    if float(net.start.weight.abs().sum()) > 0:
        nn.init.constant_(net.end.weight, 0.5)


def swallows_errors(net: Any) -> None:
    try:
        scale = float(net.start.weight.abs().max())
    except RuntimeError:
        scale = 0.0
    with torch.no_grad():
        net.end.weight.fill_(scale)


def seeds_torch(net: Any) -> None:
    torch.manual_seed(11)
    nn.init.normal_(net.layers[0].weight)
    nn.init.xavier_uniform_(net.end.weight)


def own_generator(net: Any) -> None:
    nn.init.normal_(net.layers[1].weight, generator=torch.Generator().manual_seed(4))


def random(net: Any) -> None:
    column, row, _ = net.layers
    nn.init.trunc_normal_(column.weight, std=0.02)
    nn.init.orthogonal_(net.end.weight)
    nn.init.sparse_(net.start.weight, 0.5)
    with torch.no_grad():
        row.weight.mul_(0.5)
        row.bias[:] = torch.randn(8)


def copied(net: Any) -> None:
    """Two linear layers begin alike, and one of them with a row of its own."""
    net.start = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
    net.start.append(copy.deepcopy(net.start[1]))
    with torch.no_grad():
        net.start[2].weight[0] = 3.0


def narrowed(net: Any) -> None:
    nn.init.constant_(net.start.weight, 1 / 3)
    net.to(torch.bfloat16).requires_grad_(False)


WAYS: dict[str, tuple[Callable[[Any], None], str]] = {
    "load_state_dict": (load_all, "start layers end"),
    "load_state_dict of a part": (load_part, "layers.0"),
    "assign=True": (load_and_assign, "end"),
    "nn.init": (initialisers, "layers.0.weight layers.1.weight layers.2.bias start.weight"),
    "in place": (in_place, "layers.0 layers.1.weight layers.2.weight end.weight"),
    "data": (through_data, "layers.0.weight layers.1.weight layers.2.bias end.weight"),
    "apply": (applied, "start layers.0 layers.1 end"),
    "vectors": (as_vector, "layers end"),
    "reads": (reads_values, "start layers end"),
    "swallows": (swallows_errors, "start layers end"),
    "seeds": (seeds_torch, "start layers end"),
    "generator": (own_generator, "start layers end"),
    "random": (random, ""),
    "copied": (copied, ""),
    "narrowed": (narrowed, "start.weight"),
}
"""How weights are written, and which then are those of plain Lightning."""
REAL = ("reads", "swallows", "seeds", "generator")
"""Ways that need values, so that the module is built with real ones."""
RUNS = (tuple(way for way in WAYS if way not in REAL), *((way,) for way in REAL))
"""Ways that are tried in one run."""


class Written(L.LightningModule):
    """Builds and writes its network in ``configure_model``."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.ways, self.calls, self.was_on_meta = ways, 0, False
        self.blocks = nn.ModuleList()
        self.scale = nn.Parameter(torch.ones(3))

    def configure_model(self) -> None:
        self.calls += 1
        if hasattr(self, "net"):
            return
        parts = [Part() for _ in self.ways]
        self.was_on_meta = all(p.is_meta for part in parts for p in part.parameters())
        for way, part in zip(self.ways, parts, strict=True):
            WAYS[way][0](part)
        self.net = PipelineSequential(layers=[*parts, nn.Identity()])
        self.blocks.append(LowRank(Modulated(3), 3))
        with torch.no_grad():
            self.scale *= 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("no step is run")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Found = dict[str, Outcome]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
}


def written_job(options: dict[str, Any] | None) -> Found:
    """Begin a run of every way; plain Lightning for None."""
    found = {}
    for ways in RUNS:
        L.seed_everything(7, verbose=False)
        strategy: Any = "auto" if options is None else MegatronStrategy(**options)
        trainer = quiet_trainer(strategy, max_steps=0, precision="32-true")
        module = Written(ways)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.zeros(4, 1)))
        assert module.calls == 1
        expected = options is not None and ways[0] not in REAL
        assert module.was_on_meta == expected, [str(w.message) for w in said]
        weights = (
            dict(module.named_parameters())
            if options is None
            else whole_parameters(module, strategy.topology)
        )
        weights |= dict(module.named_buffers())
        for place, way in enumerate(ways):
            own = f"net.layers.{place}."
            found[way] = Outcome(
                weights={
                    name.removeprefix(own): value
                    for name, value in weights.items()
                    if name.startswith(own) or not name.startswith("net.")
                }
            )
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Found:
    """What one process begins with under the strategy."""
    return pool.run(1, written_job, {})[0]  # type: ignore[no-any-return]


def test_are_those_of_plain_lightning(pool: WorkerPool, alone: Found) -> None:
    plain = pool.run(1, written_job, None)[0]
    for way, (_, kept) in WAYS.items():
        ours, theirs = alone[way].weights, plain[way].weights
        assert ours.keys() == theirs.keys(), way
        for name, value in theirs.items():
            where = (
                "scale",
                "mask",
                "inner.bias",
                "up.weight",
                *(f"{k}" for k in kept.split()),
            )
            if way in REAL or name.startswith(where) or name.endswith(where):
                assert torch.equal(ours[name], value), f"{way}: {name}"
            assert ours[name].dtype == value.dtype, f"{way}: {name}"


def test_that_are_random_are_so_as_written(alone: Found) -> None:
    for outcome in alone.values():
        weight = outcome.weights["blocks.0.inner.weight"]
        assert torch.equal(weight, weight.tril())
        assert weight.tril().count_nonzero() == 6
    weights = alone["random"].weights
    assert 0.01 < weights["layers.0.weight"].std() < 0.03
    end = weights["end.weight"]
    torch.testing.assert_close(end @ end.T, torch.eye(4))
    assert ((weights["start.weight"] == 0).sum(0) == 4).all()
    assert len(set(weights["layers.1.bias"].tolist())) == 8
    copied = alone["copied"].weights
    one, other = copied["start.1.weight"], copied["start.2.weight"]
    assert one.std() > 0
    assert torch.equal(one[1:], other[1:])
    assert (other[0] == 3).all()


@pytest.mark.parametrize(
    "layout", ["tp", "pp", "zero 3", pytest.param("zero 0", marks=pytest.mark.thorough)]
)
def test_are_the_same_in_every_layout(pool: WorkerPool, alone: Found, layout: str) -> None:
    by_rank = pool.run(LAYOUTS[layout][0], written_job, LAYOUTS[layout][1])
    for way, outcome in alone.items():
        found = merge_stages([outcomes[way] for outcomes in by_rank])
        assert found.keys() == outcome.weights.keys(), way
        for name, value in outcome.weights.items():
            assert torch.equal(found[name], value), f"{way}: {name}"
