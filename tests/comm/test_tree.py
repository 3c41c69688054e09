"""What goes over the tree arrives as it would over one group of all ranks."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron._torch import PrefixStore, connect_gloo, group_ranks
from lightning_megatron.comm.tree import Branch, Tree, branches
from lightning_megatron.comm.tree_group import BACKEND, new_tree_group, tree_of
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.testing import WorkerPool


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(2, 33))
def test_every_rank_has_one_way_to_rank_0(sizes: list[int], fan: int) -> None:
    machines = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    tree = branches(machines, fan)
    leaders = {rank: branch.ranks[0] for branch in tree for rank in branch.ranks[1:]}
    assert sorted(leaders) == list(range(1, len(machines)))
    for branch in tree:
        assert 2 <= len(branch.ranks) <= fan
        starts = [sum(branch.spans[:i]) + branch.ranks[0] for i in range(len(branch.ranks))]
        assert starts == list(branch.ranks)  # what comes together is in the order of the ranks
        if branch.level == 0:
            assert len({machines[rank] for rank in branch.ranks}) == 1


@pytest.mark.parametrize("ranks", [512, 1024, 4096, 1016])
def test_sockets_and_hops_hardly_grow(ranks: int) -> None:
    tree = branches([rank // 8 for rank in range(ranks)])
    sockets = [0] * ranks
    for branch in tree:
        for rank in branch.ranks:
            sockets[rank] += len(branch.ranks) - 1
    assert max(sockets) <= 7 + 31 + 31
    assert sorted(sockets)[ranks // 2] == 7
    widest = [max(len(b.ranks) for b in tree if b.level == level) for level in range(3)]
    assert sum(1 + math.ceil(math.log2(width)) for width in widest) <= 16


def as_threads(machines: list[int], fan: int, act: Callable[[Tree], Any]) -> list[Any]:
    """What ``act`` returns on every rank, each a thread with connections of its own."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> Any:
        def connect(branch: Branch) -> Any:
            name = f"{branch.level}/{branch.ranks[0]}"
            part = PrefixStore(name, store)
            return connect_gloo(part, rank, branch.ranks, timedelta(seconds=60), name)

        return act(Tree(rank, machines, connect, fan))

    with ThreadPoolExecutor(len(machines)) as threads:
        return list(threads.map(run, range(len(machines))))


LAYOUTS = {
    "one rank": ([0], 2),
    "one machine": ([0] * 5, 32),
    "machines of other sizes, three levels": ([0, 0, 0, 1, 2, 2, 2, 2, 3], 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ways_of_sending(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    machines, fan = LAYOUTS[layout]
    size = len(machines)
    everything = torch.arange(2.0 * size).view(size, 2)

    def act(tree: Tree) -> bool:
        mine = everything[tree.rank].clone()
        good = torch.equal(tree.all_gather(mine), everything)
        good &= torch.equal(tree.reduce(mine, lambda rows: rows.amax(0)), everything[-1])
        hurt = torch.tensor(math.nan if tree.rank == size - 1 else 1.0)
        good &= bool(tree.reduce(hurt, lambda rows: rows.amax(0)).isnan())
        tree.barrier()
        for other in range(size):
            gathered = tree.gather(mine, other)
            good &= (gathered is None) == (tree.rank != other)
            good &= gathered is None or torch.equal(gathered, everything)
            sent = mine.clone()
            tree.broadcast(sent, other)
            good &= torch.equal(sent, everything[other])
            received = torch.empty(2)
            tree.scatter(everything + other if tree.rank == other else None, received, other)
            good &= torch.equal(received, mine + other)
        return good

    assert as_threads(machines, fan, act) == [True] * size


def over_the_tree() -> list[Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = new_tree_group([0, 0, 1, 1, 1])
    assert dist.get_backend(group) == BACKEND
    # What new_group asks where the default group is bound to a GPU.
    assert not group._get_backend(torch.device("cuda:0")).supports_splitting
    assert {name.count(".") for name in group_ranks()} == {0, 2}  # torch's own, and the branches
    found: list[Any] = []
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, "x" * rank, group=group)
    found.append(objects)
    for other in (0, 4):
        gathered: list[Any] | None = [None] * size if rank == other else None
        dist.gather_object(rank, gathered, dst=other, group=group)
        assert gathered == (list(range(size)) if rank == other else None)
        box: list[Any] = [("from", rank)]
        dist.broadcast_object_list(box, src=other, group=group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [10 * i + other for i in range(size)], other, group=group)
        found += [box, [value - 10 * rank for value in mine]]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        number = torch.tensor([float(rank)])
        dist.all_reduce(number, op, group=group)
        found.append(number.item())
    dist.barrier(group=group)
    if rank in (1, 4):  # who are in no group together
        passed = torch.tensor([7.0 * (rank == 1)])
        dist.send(passed, 4, group=group) if rank == 1 else dist.recv(passed, 1, group=group)
        assert passed.item() == 7.0
    votes = PerBatchVotes()
    votes.start(group)
    highest, all_of = votes.register("a", by_rank=False), votes.register("b")
    for value in (1.0, math.inf):
        highest.put(-value if rank else value)
        all_of.put(rank * value if rank else 0.0)
        votes.settle()
        found.append((highest.max, all_of.max, all_of.values))
    dist.destroy_process_group(group)
    dist.barrier()
    dist.barrier(group=new_tree_group([0] * size))  # another one of the same processes
    assert tree_of(None).reduce(torch.tensor(rank), lambda rows: rows.sum(0)).item() == 10
    dist.destroy_process_group()
    return found


def test_torch_and_the_agreement_use_it_like_any_group(pool: WorkerPool) -> None:
    inf = math.inf
    expected = [
        ["", "x", "xx", "xxx", "xxxx"],
        *([("from", 0)], [0], [("from", 4)], [4]),
        *(10.0, 4.0, 0.0),
        (1.0, 4.0, (0.0, 1.0, 2.0, 3.0, 4.0)),
        (inf, inf, (0.0, inf, inf, inf, inf)),
    ]
    assert pool.run(5, over_the_tree) == [expected] * 5


def test_a_slot_for_the_largest_number_keeps_no_others() -> None:
    vote = PerBatchVotes().register("x", by_rank=False)
    vote.settle([1.0])
    assert vote.max == 1.0
    with pytest.raises(RuntimeError, match="by_rank=False"):
        _ = vote.values
