"""Parts of messages: what arrives is what was sent, to the bit, or an error."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron import PipelineConfig, PipelineSequential
from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.pipeline.links import Links, MessagePlan
from lightning_megatron.pipeline.scatter_gather import ScatterGather, scatters_to
from lightning_megatron.schedules.schedule import Kind, make_schedule
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import own_part
from tests.strategy.small import WIDTH, Small, loader, make_trainer, weights


def trees() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    return {
        "divisible": normal(4, 8).requires_grad_(),
        "odd": normal(3, 5, 7, dtype=torch.float32).requires_grad_(),
        "one element": normal(1),
        "number": normal(()),
        "strided": normal(6, 4).t(),
        "narrow": normal(5, 3, dtype=torch.bfloat16).requires_grad_(),
        "whole numbers": torch.arange(11),
        "truth": torch.arange(9) % 2 == 0,
        "eight bits": normal(9, dtype=torch.float8_e4m3fn),
        "none": [None, None],
        "empty": (normal(0, 4), normal(2)),
        "not a number": torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]),
        "nested": {
            "hidden": normal(2, 9, dtype=torch.float32).requires_grad_(),
            "rest": (torch.arange(5) > 2, [normal(3, dtype=torch.bfloat16), None, 3, "mask"]),
        },
    }


def make_parts(ranks: int) -> ScatterGather:
    dist.init_process_group("gloo")
    return ScatterGather(Topology(Degrees(tp=ranks), torch.device("cpu")).tp, least_bytes=1)


def round_trip(parts: ScatterGather, key: str, tree: Any) -> Any:
    found = parts.put_together(parts.take_apart(key, tree))
    parts.check()
    return found


def same(one: Any, other: Any) -> bool:
    (ours, spec), (theirs, other_spec) = tree_flatten(one), tree_flatten(other)
    return bool(spec == other_spec) and all(
        (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad)
        and a.shape == b.shape
        and a.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        == b.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        if isinstance(a, Tensor)
        else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def trees_job(ranks: int) -> tuple[list[str], int, int]:
    """Names of what came back changed, messages sent in parts, and bytes of one part."""
    parts = make_parts(ranks)
    wrong = []
    for name, tree in trees().items():
        for key in ("first", "again"):
            if not same(round_trip(parts, f"{name} {key}", tree), tree):
                wrong.append(name)
    part = parts.take_apart("divisible again", trees()["divisible"])["part"]
    return wrong, parts.sent_in_parts, part.numel()


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_what_arrives_is_what_was_sent(pool: WorkerPool, ranks: int) -> None:
    for wrong, in_parts, size in pool.run(ranks, trees_job, ranks):
        assert wrong == []
        assert in_parts == 2 * (len(trees()) - 1) + 1  # there is nothing to divide in Nones
        assert size == -(-4 * 8 * 8 // ranks)


def differing_job() -> dict[str, Any]:
    parts, rank = make_parts(2), dist.get_rank()
    found: dict[str, Any] = {}
    own = torch.arange(64.0) + rank
    found["own part"] = same(round_trip(parts, "own", (own, torch.ones(3))), (own, torch.ones(3)))
    found["in parts"] = parts.sent_in_parts
    alike = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert same(round_trip(parts, "alike", alike), alike)
    # As sums in another order may give it.
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 5e-8
    round_trip(parts, "alike", alike * (1 + noise))
    # A part of zeros at first, as a layer has that begins at zero.
    assert same(round_trip(parts, "zeros", torch.zeros(64)), torch.zeros(64))
    later = {
        "later": ("zeros", own),
        "one element": ("alike", torch.where(torch.arange(1000) == 77 + rank, 0, alike)),
        "not a number": ("alike", torch.where(torch.arange(1000) == 77, torch.nan, alike)),
    }
    for name, (key, tree) in later.items():
        if name == "not a number" and rank == 0:
            tree = alike
        try:
            round_trip(parts, key, tree)
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_differs_goes_whole_or_is_an_error(pool: WorkerPool) -> None:
    for found in (ranks := pool.run(2, differing_job)):
        assert found["own part"]
        assert found["in parts"] == 0
    # The ranks see it that have put together something else than they should have received.
    for name in ("later", "one element", "not a number"):
        texts = [found[name] for found in ranks if name in found]
        assert texts
        assert all("scatter_gather=False" in text for text in texts)


def choices_job(nodes: list[str], sequence: bool) -> list[bool]:
    dist.init_process_group("gloo")
    topology = Topology(
        Degrees(pp=2, tp=2), torch.device("cpu"), sequence_parallel=sequence, nodes=nodes
    )
    peer = 1 - topology.pp.rank
    return [scatters_to(topology, peer, choice) for choice in ("auto", True, False)]


@pytest.mark.parametrize(
    ("nodes", "sequence", "expected"),
    [
        ("aabb", False, [True, True, False]),
        ("aaaa", False, [False, True, False]),
        ("abab", False, [False, True, False]),
        ("aabc", False, [False, True, False]),
        ("aabb", True, [False, False, False]),
    ],
)
def test_parts_are_sent_where_it_saves_bytes_between_nodes(
    pool: WorkerPool, nodes: str, sequence: bool, expected: list[bool]
) -> None:
    assert pool.run(4, choices_job, list(nodes), sequence) == [expected] * 4


def links_job(kind: str, name: str, microbatches: int) -> list[int]:
    """Two steps of messages of changing lengths; how many this rank has sent in parts."""
    dist.init_process_group("gloo")
    topology = Topology(Degrees(pp=2, tp=2), torch.device("cpu"))
    host_group = topology.new_group("pp") if kind == "device" else None
    schedule = make_schedule(name, 2, microbatches)
    links = Links(topology, schedule.stage_ranks, host_group, scatter_gather=True)
    assert links.parts is not None
    sent = []
    for step in range(2):
        links.begin(MessagePlan(schedule, topology.pp.rank))
        for action in schedule.row(topology.pp.rank):
            is_forward = action.kind is Kind.FORWARD
            starts = action.kind is Kind.BACKWARD_WEIGHT or (
                action.stage == (0 if is_forward else schedule.num_stages - 1)
            )
            length = 5 + 100 * step + action.microbatch
            if not starts:
                microbatch, found = links.receive(action)
                assert microbatch == action.microbatch
                assert found.tolist() == list(range(length))
            links.send(action, (action.microbatch, torch.arange(length)))
            dist.barrier(topology.tp.group)  # as layers communicate between messages
        links.end()
        sent.append(links.parts.sent_in_parts)
    return sent


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("1f1b", "device"), ("interleaved", "inline"), ("zbv", "device")),
        *(
            pytest.param(*pair, marks=pytest.mark.thorough)
            for pair in (("1f1b", "inline"), ("interleaved", "device"), ("zbv", "inline"))
        ),
    ],
)
def test_messages_go_in_parts_on_every_channel(pool: WorkerPool, kind: str, name: str) -> None:
    boundaries = {"1f1b": 1, "interleaved": 3, "zbv": 2}[name]
    found = pool.run(4, links_job, kind, name, 4)
    # One of a V's boundaries lies on one rank.
    assert [sum(counts) for counts in zip(*found, strict=True)] == [
        2 * 2 * 4 * boundaries * step for step in (1, 2)
    ]


class Column(ColumnParallelLinear):
    """Passes on its own part as if it were a plain tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return own_part(super().forward(x))


class OwnParts(Small):
    """Between two stages each tp rank has another tensor; zeros at first if ``std`` is 0."""

    def __init__(self, std: float) -> None:
        super().__init__()
        layers = [Column(WIDTH, 8, init_std=std), RowParallelLinear(8, WIDTH, init_std=0.5)]
        self.net = PipelineSequential(layers=layers)


def own_parts_job(std: float, choice: bool) -> dict[str, Tensor]:
    pp = PipelineConfig(degree=2, scatter_gather=choice)
    layout = {"tp": 2, "pp": pp, "num_microbatches": 2}
    module = OwnParts(std)
    make_trainer(layout, 4).fit(module, loader())
    return weights(module)


def test_a_network_that_passes_on_parts_trains_as_it_does_without(pool: WorkerPool) -> None:
    expected = pool.run(4, own_parts_job, 0.5, False)
    for found, weights_of_rank in zip(pool.run(4, own_parts_job, 0.5, True), expected, strict=True):
        assert all(torch.equal(found[name], w) for name, w in weights_of_rank.items())


def test_parts_that_were_equal_at_first_are_an_error(pool: WorkerPool) -> None:
    pool.run(4, own_parts_job, 0.0, False)
    with pytest.raises(WorkerError, match="equal on all tp ranks in the first"):
        pool.run(4, own_parts_job, 0.0, True, grace=0.2)
