"""Objects with tensors in them, from one rank to the others."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.comm.objects import ObjectBroadcast, dump, load
from lightning_megatron.comm.peers import Peers
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology


class Pair(NamedTuple):
    """A tuple with names."""

    logits: Tensor
    labels: Tensor


@dataclass
class Result:
    """An output of a user's own class."""

    name: str
    scores: list[Tensor]
    hidden: Tensor | None = None


def values() -> list[Any]:
    """What steps return."""
    draw = torch.Generator().manual_seed(0)
    grid = torch.randn(3, 4, generator=draw)
    return [
        None,
        {"loss": torch.tensor(2.5), "n": 3},
        Pair(grid, grid.argmax(1)),
        Pair(grid + 1, grid.argmin(1)),  # other values, the same skeleton
        Pair(grid[:2], grid[:2].argmax(1)),
        Result("a", [grid.T, grid > 0], grid.to(torch.bfloat16)),
        [grid.to(torch.float8_e4m3fn), torch.complex(grid, grid).conj(), grid[:0], "text", {1, 2}],
        OrderedDict(parameter=nn.Parameter(grid), leaf=grid.clone().requires_grad_()),
        (grid.to_sparse(), torch.device("cpu"), torch.float16),
        grid,
    ]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        whole = [t.to_dense() if t.is_sparse else t for t in (found, expected)]
        whole = [t.view(torch.uint8) if t.itemsize == 1 else t for t in whole]
        return (
            type(found) is type(expected)
            and found.dtype == expected.dtype
            and found.requires_grad == expected.requires_grad
            and torch.equal(*whole)
        )
    if type(found) is not type(expected):
        return False
    if isinstance(expected, Result):
        return same(vars(found), vars(expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def objects_job(source: int) -> tuple[list[int], list[int]]:
    """Indices of what arrived changed, and broadcasts per object."""
    dist.init_process_group("gloo")
    topology = Topology(Degrees(pp=3), torch.device("cpu"))
    share = ObjectBroadcast(topology.pp, topology.pp.ranks[source], torch.device("cpu"))
    bad, counts = [], []
    original = dist.broadcast

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    dist.broadcast = counted
    try:
        for index, value in enumerate(values()):
            counts.append(0)
            found = share(value if topology.pp.rank == source else None)
            if not same(found, value):
                bad.append(index)
    finally:
        dist.broadcast = original
    return bad, counts


@pytest.mark.parametrize("source", [0, 2])
def test_objects_arrive_as_they_are(pool: WorkerPool, source: int) -> None:
    for bad, counts in pool.run(3, objects_job, source):
        assert bad == []
        assert counts[2] == 4  # length, skeleton, two tensors
        assert counts[3] == 3  # the skeleton is known


def test_tensors_of_a_device_land_on_the_receivers() -> None:
    """The meta device stands in for the sender's: its tensors leave no trace of where they were."""
    shared = torch.empty(2, 3, device="meta", dtype=torch.float16)
    value = {"a": shared, "b": [shared, torch.ones(4)], "c": nn.Parameter(shared.clone())}
    skeleton, leaves = dump(value, "meta")
    assert [leaf.device.type for leaf in leaves] == ["meta", "cpu", "meta"]
    assert b"meta" not in skeleton
    asked: list[tuple[Any, ...]] = []

    def take(dtype: torch.dtype, shape: torch.Size, on_host: bool) -> Tensor:
        asked.append((dtype, tuple(shape), on_host))
        return torch.zeros(shape, dtype=dtype)

    found = load(skeleton, take)
    assert asked == [
        (torch.float16, (2, 3), False),
        (torch.float32, (4,), True),
        (torch.float16, (2, 3), False),
    ]
    assert found["a"] is found["b"][0]
    assert isinstance(found["c"], nn.Parameter)
    assert {t.device.type for t in (found["a"], found["b"][1], found["c"])} == {"cpu"}


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match="lock"):
        dump([threading.Lock()], "cpu")


def default_device_job() -> Any:
    """What arrives where tensors that say no device are on another one."""
    dist.init_process_group("gloo")
    topology = Topology(Degrees(pp=2), torch.device("cpu"))
    share = ObjectBroadcast(topology.pp, topology.pp.ranks[0], torch.device("cpu"))
    sent = {"a": torch.arange(3, dtype=torch.int16), "b": "text"}
    with torch.device("meta"):
        found = share(sent if topology.pp.rank == 0 else None)
        return same(found, sent), Peers().exchange([1.0, 0.5]), Peers().all_gather("x")


def test_a_default_device_of_the_user_does_not_move_what_hosts_exchange(pool: WorkerPool) -> None:
    """``torch.set_default_device("cuda")`` would have gloo read memory of a GPU."""
    expected = (True, [(1.0, 1.0), (0.5, 0.5)], ["x", "x"])
    assert pool.run(2, default_device_job) == [expected] * 2
