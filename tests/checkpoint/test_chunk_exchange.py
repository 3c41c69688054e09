"""Chunks that ranks hand to each other: from any layout to any other, in memory."""

import random
from collections.abc import Callable, Mapping
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.checkpoint import chunk_exchange
from lightning_megatron.checkpoint.chunk_exchange import ChunkExchange, _beside, _common, _take
from lightning_megatron.checkpoint.chunks import Chunk, Form, describe, whole
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.segments import joined

SHAPE = (12, 8)
CPU = torch.device("cpu")


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(96).view(SHAPE).to(dtype)


def cut(tensor: Tensor, rows: range, columns: range) -> Chunk:
    part = tensor[rows.start : rows.stop, columns.start : columns.stop].clone()
    return Chunk(tensor=part, full_shape=SHAPE, offsets=(rows.start, columns.start))


def shares(length: int, ranks: int, rank: int) -> range:
    size = -(-length // ranks)
    return range(min(rank * size, length), min((rank + 1) * size, length))


ROWS, COLUMNS = range(SHAPE[0]), range(SHAPE[1])


def both(tensor: Tensor, rank: int, ranks: int, tp: int) -> Chunk:
    return cut(tensor, shares(12, ranks // tp, rank // tp), shares(8, tp, rank % tp))


def segments(tensor: Tensor, rank: int, ranks: int) -> Chunk:
    """Two fused matrices of 8 and 4 rows, each of which is divided."""
    pieces = ((8 // ranks * rank, 8 // ranks), (8 + 4 // ranks * rank, 4 // ranks))
    part = joined(tensor, 0, pieces).clone()
    return Chunk(tensor=part, full_shape=SHAPE, offsets=(0, 0), pieces=pieces, piece_dim=0)


LAYOUTS: dict[str, Callable[[Tensor, int, int], Chunk | None]] = {
    "tp along rows": lambda t, rank, n: cut(t, shares(12, n, rank), COLUMNS),
    "tp along columns": lambda t, rank, n: cut(t, ROWS, shares(8, n, rank)),
    "tp 2, ZeRO": lambda t, rank, n: both(t, rank, n, min(n, 2)),
    "ZeRO of ragged rows": lambda t, rank, n: cut(
        t, range(min(5 * rank, 12), 12 if rank == n - 1 else min(5 * rank + 5, 12)), COLUMNS
    ),
    "dp": lambda t, rank, n: cut(t, ROWS, COLUMNS),
    "last stage": lambda t, rank, n: cut(t, ROWS, COLUMNS) if rank == n - 1 else None,
    "fused, tp": segments,
    "whole here, rows there": lambda t, rank, n: (
        cut(t, ROWS, COLUMNS) if rank == 0 else cut(t, shares(12, n, rank), COLUMNS)
    ),
}


def all_ranks(world: int) -> Peers:
    if world > 1:
        dist.init_process_group("gloo")
    peers = Peers()
    assert peers.size == world
    return peers


def held(chunk: Chunk | None) -> dict[str, Chunk]:
    return {} if chunk is None else {"w": chunk}


def moves(world: int, at_once: int) -> int:
    """Exchange from every layout to every other; returns how many moves there were."""
    peers, done = all_ranks(world), 0
    whole_values = values()
    with mock.patch.object(chunk_exchange, "AT_ONCE", at_once):
        for name, before in LAYOUTS.items():
            for other, after in LAYOUTS.items():
                have = held(before(whole_values, peers.rank, peers.size))
                have["step"] = whole(torch.tensor(3.0))
                need = held(after(torch.full(SHAPE, -1.0), peers.rank, peers.size))
                need["step"] = whole(torch.tensor(0.0))
                exchange = ChunkExchange("moving", have, peers=peers, device=CPU)
                assert exchange.tensors["w"].shape == SHAPE
                exchange.fill(need)
                assert not have, "what was handed on is let go of"
                assert need["step"].tensor == 3.0
                if "w" in need:
                    expected = after(whole_values, peers.rank, peers.size)
                    assert expected is not None
                    assert torch.equal(need["w"].tensor, expected.tensor), (name, other)
                done += 1
    return done


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("at_once", [1, 32 << 20])
def test_from_every_layout_to_every_other(pool: WorkerPool, world: int, at_once: int) -> None:
    assert set(pool.run(world, moves, world, at_once)) == {len(LAYOUTS) ** 2}


def test_one_process_exchanges_with_itself() -> None:
    assert moves(1, 1) == len(LAYOUTS) ** 2


def dtypes() -> None:
    peers = all_ranks(2)
    kinds = (torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float64)
    have = {f"{kind}": whole(values().to(kind)[:3, :5].clone()) for kind in kinds}
    needs = {name: whole(torch.zeros_like(c.tensor)) for name, c in have.items() if peers.rank == 1}
    if peers.rank == 1:
        needs["other dtype"] = whole(torch.zeros(2, dtype=torch.float32))
        have = {}
    else:
        have["other dtype"] = whole(torch.tensor([1.5, 2.5], dtype=torch.float64))
    expected = {name: chunk.tensor.clone() for name, chunk in have.items()}
    ChunkExchange("moving", have, peers=peers, device=CPU).fill(needs)
    if peers.rank == 1:
        for kind in kinds:
            found = needs[f"{kind}"].tensor
            assert torch.equal(found.double(), values().to(kind)[:3, :5].double())
        assert needs["other dtype"].tensor.tolist() == [1.5, 2.5]
    assert (len(expected) > 0) == (peers.rank == 0)


def test_every_dtype_travels_and_is_that_of_the_receiver_in_the_end(pool: WorkerPool) -> None:
    pool.run(2, dtypes)


def messages(at_once: int) -> list[int]:
    """Exchange ten tensors of 4 KiB; returns the sizes of this rank's messages."""
    peers, sizes = all_ranks(2), list[int]()
    have = {f"{i}": whole(torch.full((1024,), float(i))) for i in range(10) if peers.rank == 0}
    need = {f"{i}": whole(torch.zeros(1024)) for i in range(10) if peers.rank == 1}
    exchange = ChunkExchange("moving", have, peers=peers, device=CPU)
    make = exchange._message

    def message(routes: list[chunk_exchange._Route]) -> Tensor:
        sizes.append(sum(route.numbytes for route in routes))
        return make(routes)

    with (
        mock.patch.object(chunk_exchange, "AT_ONCE", at_once),
        mock.patch.object(exchange, "_message", message),
    ):
        exchange.fill(need)
    assert all(int(chunk.tensor[-1]) == int(name) for name, chunk in need.items())
    return sizes


def test_what_is_under_way_is_bounded(pool: WorkerPool) -> None:
    assert pool.run(2, messages, 3 * 4096) == [[3 * 4096] * 3 + [4096]] * 2
    assert pool.run(2, messages, 1) == [[4096] * 10] * 2, "one tensor at least"


def refused(case: str) -> str:
    """Exchange what cannot be; returns the error."""
    peers = all_ranks(2)
    full, none = torch.zeros(SHAPE), torch.full(SHAPE, -1.0)
    have: dict[str, Chunk] = {"w": cut(full, shares(12, 3, peers.rank), COLUMNS)}
    need: dict[str, Chunk] = {"w": cut(none, range(0, 8), COLUMNS)}
    if case == "shapes" and peers.rank == 1:
        have = {"w": whole(torch.zeros(3))}
    if case == "gap" and peers.rank == 1:
        need = {"w": cut(none, ROWS, COLUMNS)}
    if case == "unknown" and peers.rank == 1:
        need = {"v": cut(none, ROWS, COLUMNS)}
    try:
        ChunkExchange("moving", have, peers=peers, device=CPU).fill(need)
    except ConfigError as error:
        assert all(bool((c.tensor == -1).all()) for c in need.values())
        return str(error)
    raise AssertionError("it was exchanged")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gap", "no rank has 'w' from (8, 0) on, (4, 8) elements, which rank 1 needs"),
        ("unknown", "rank 1 needs 'v' of shape (12, 8), the ranks have none"),
        ("shapes", "'w' has shape (3,) on rank 1, and (12, 8) on another"),
    ],
)
def test_errors_of_one_rank_are_those_of_all(pool: WorkerPool, case: str, message: str) -> None:
    first, second = pool.run(2, refused, case)
    assert first == second
    assert message in first


def _cells(forms: list[Form]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for offsets, sizes in forms:
        block = torch.ones(sizes).nonzero() + torch.tensor(offsets)
        found += [tuple(cell) for cell in block.tolist()]
    return found


def test_rectangles_are_taken_apart_without_gap_or_overlap() -> None:
    draw = random.Random(0)
    for _ in range(200):
        dims = draw.choice([1, 2, 3])
        offsets = tuple(draw.randrange(3) for _ in range(dims))
        all_of_it = offsets, tuple(draw.randrange(1, 5) for _ in range(dims))
        missing, parts = [all_of_it], []
        for _ in range(4):
            first = tuple(draw.randrange(5) for _ in range(dims))
            parts += _take(missing, (first, tuple(draw.randrange(5) for _ in range(dims))))
        cells = _cells([*parts, *missing])
        assert sorted(cells) == sorted(_cells([all_of_it]))


def test_scalars_are_rectangles_too() -> None:
    assert _common(((), ()), ((), ())) == ((), ())
    assert list(_beside(((), ()), ((), ()))) == []


def test_own_chunks_do_not_travel(pool: WorkerPool) -> None:
    assert pool.run(2, routes_of_what_is_there) == [0, 0]


def routes_of_what_is_there() -> int:
    peers = all_ranks(2)
    have: dict[str, Chunk] = {"w": whole(values())}
    exchange = ChunkExchange("moving", have, peers=peers, device=CPU)
    need: Mapping[str, Chunk] = {"w": whole(torch.zeros(SHAPE))}
    wishes = peers.all_gather({"w": describe(need["w"])[0]})
    found = [route for _, routes in exchange._routes(wishes) for route in routes]
    exchange.fill(need)
    return sum(route.source != route.target for route in found)
