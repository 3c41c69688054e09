"""What thousands of ranks cost each other: ``python -m benchmarks.scale --output FOLDER``.

Measured: the time of the votes of eight processes, and what threads in the place of ranks, with
connections of their own, ask of one store. Counted: the tree of 4,096 ranks on machines of eight,
by the plan that they would follow, and what a gloo group asks of the store, which its source and
the count here agree on. The rows of larger worlds say how they were found.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import parser, report
from lightning_megatron._torch import HashStore, PrefixStore, Store, connect_gloo
from lightning_megatron.comm.tree import branches
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.fault_tolerance.failures.board import EndingBoard, find_cause
from lightning_megatron.launch.attempt import Peer
from lightning_megatron.launch.rendezvous import join
from lightning_megatron.launch.rendezvous_store import host_store, reach_store
from lightning_megatron.testing import WorkerPool

PER_MACHINE = 8
WORLDS = (8, 64, 512, 1024, 4096)
THREADS = (16, 64, 128)
_HOP_US = 30.0
"""Assumed for a message between two hosts."""


class Counting(Store):
    """A connection to a store that counts what it is asked, by gloo as well."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.asked = store, 0

    def _ask(self, name: str, *arguments: Any) -> Any:
        self.asked += 1
        return getattr(self._store, name)(*arguments)

    def set(self, *arguments: Any) -> Any:
        return self._ask("set", *arguments)

    def get(self, *arguments: Any) -> Any:
        return self._ask("get", *arguments)

    def add(self, *arguments: Any) -> Any:
        return self._ask("add", *arguments)

    def check(self, *arguments: Any) -> Any:
        return self._ask("check", *arguments)

    def wait(self, *arguments: Any) -> Any:
        return self._ask("wait", *arguments)

    def multi_get(self, *arguments: Any) -> Any:
        return self._ask("multi_get", *arguments)

    def compare_set(self, *arguments: Any) -> Any:
        return self._ask("compare_set", *arguments)

    def has_extended_api(self) -> bool:
        return True


# Every batch --------------------------------------------------------------------------------------


def agree(rounds: int, steps: int) -> dict[str, float]:
    """Median microseconds of an exchange of two numbers a rank, by way."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    largest, by_rank = PerBatchVotes(), PerBatchVotes()
    for votes in (largest, by_rank):
        votes.start(None)
        votes.register("stop signal", by_rank=False)
        votes.register("loss", by_rank=votes is by_rank)
    local = torch.zeros(2, dtype=torch.float64)
    everything = torch.empty(2 * size, dtype=torch.float64)

    def ring() -> None:
        dist.all_gather(list(everything.chunk(size)), local)

    ways: dict[str, Callable[[], None]] = {
        "all-gather of gloo": ring,
        "votes, numbers by rank": by_rank.settle,
        "votes, largest numbers": largest.settle,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                way()
            if number:
                seconds[name].append((time.perf_counter() - begun) / steps)
    dist.destroy_process_group()
    return {name: 1e6 * statistics.median(values) for name, values in seconds.items()}


@dataclass
class Plan:
    """What a tree of some ranks comes to."""

    hops: int
    sockets: int
    most_sockets: int
    asked: float


def plan(ranks: int) -> Plan:
    """Of machines of eight."""
    tree = branches([rank // PER_MACHINE for rank in range(ranks)])
    sockets = [0] * ranks
    for branch in tree:
        for rank in branch.ranks:
            sockets[rank] += len(branch.ranks) - 1
    widest = [
        max(len(b.ranks) for b in tree if b.level == level) for level in {b.level for b in tree}
    ]
    hops = sum(1 + math.ceil(math.log2(width)) for width in widest)
    asked = sum(len(b.ranks) * (2 * len(b.ranks) + 1) for b in tree) / ranks
    return Plan(hops, sorted(sockets)[ranks // 2], max(sockets), asked)


# The store ----------------------------------------------------------------------------------------


class Job:
    """Ranks as threads, on machines of eight."""

    def __init__(self, ranks: int) -> None:
        self.ranks = range(ranks)
        self.holder = host_store("127.0.0.1", 0, "127.0.0.1", 60)
        with ThreadPoolExecutor(8) as threads:
            self.stores = list(threads.map(self._connect, self.ranks))
        of = [rank // PER_MACHINE for rank in self.ranks]
        peers = tuple(Peer(host=f"node{i}", pid=os.getpid(), machine=str(i)) for i in of)
        self.boards = [EndingBoard(self.stores[rank], rank, peers) for rank in self.ranks]
        for store in self.stores:
            store.asked = 0

    def _connect(self, _: int) -> Counting:
        return Counting(reach_store("127.0.0.1", self.holder.port, 60, "us"))

    def search(self, gone: range) -> None:
        """All who live lose a peer at once."""
        living = [rank for rank in self.ranks if rank not in gone]
        with ThreadPoolExecutor(len(living)) as threads:
            list(threads.map(lambda rank: find_cause(self.boards[rank], ""), living))

    @property
    def each(self) -> float:
        return sum(store.asked for store in self.stores) / len(self.ranks)


def asked_by_search(ranks: int, *, failed: bool) -> float:
    """Requests a rank."""
    job = Job(ranks)
    if failed:
        job.boards[1].post("failed", "failed with ValueError")
        job.search(range(1, 2))
    else:
        job.search(range(ranks - PER_MACHINE, ranks))
    return job.each


def asked_to_meet(ranks: int) -> float:
    holder = host_store("127.0.0.1", 0, "127.0.0.1", 60)
    with ThreadPoolExecutor(8) as threads:
        ports = [holder.port] * ranks
        stores = list(
            threads.map(lambda port: Counting(reach_store("127.0.0.1", port, 60, "us")), ports)
        )
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(lambda rank: join(stores[rank], rank, ranks, 60.0), range(ranks)))
    return sum(store.asked for store in stores) / ranks


def asked_to_connect(ranks: int) -> float:
    """Requests a rank of a gloo group."""
    holder = HashStore()
    stores = [Counting(holder) for _ in range(ranks)]

    def connect(rank: int) -> Any:
        part = PrefixStore("group", stores[rank])
        return connect_gloo(part, rank, range(ranks), timedelta(seconds=60), "group")

    with ThreadPoolExecutor(ranks) as threads:
        groups = list(threads.map(connect, range(ranks)))
    del groups
    return sum(store.asked for store in stores) / ranks


def measured(count: Callable[[int], float]) -> dict[int, str]:
    """Requests a rank by world; what was measured, and the last of it for larger worlds."""
    found = {ranks: f"{count(ranks):.1f}" for ranks in THREADS}
    print(found, flush=True)
    last = found[THREADS[-1]]
    return {ranks: found.get(ranks, f"~{last}") for ranks in WORLDS[1:]}


def main() -> None:
    """Run and report."""
    made = parser(__doc__, steps=20)
    made.add_argument("--rounds", type=int, default=15)
    options = made.parse_args()
    with WorkerPool(8) as pool:
        by_rank = pool.run(8, agree, options.rounds, options.steps, timeout=300)
    ring, all_of, largest = (max(one[name] for one in by_rank) for name in by_rank[0])
    plans = {ranks: plan(ranks) for ranks in WORLDS}
    counted = "counted in the plan of the tree"
    threads = f"measured with {', '.join(map(str, THREADS))} threads, TCPStore"
    table: list[tuple[str, object, dict[int, Any], str]] = [
        (
            "votes of a batch, us: largest numbers",
            f"{ring:.0f} (8 ranks)",
            {8: round(largest)},
            "measured, 8 processes",
        ),
        (
            "votes of a batch, us: one number of every rank",
            f"{ring:.0f} (8 ranks)",
            {8: round(all_of)},
            "measured, 8 processes",
        ),
        ("hops of it", 4095, {r: p.hops for r, p in plans.items()}, counted),
        (
            f"at {_HOP_US:g} us a hop, ms",
            4095 * _HOP_US / 1000,
            {r: round(p.hops * _HOP_US / 1000, 2) for r, p in plans.items()},
            "computed",
        ),
        (
            "bytes a rank gets, largest numbers of two votes",
            16 * 4096,
            dict.fromkeys(WORLDS, 16),
            "computed",
        ),
        (
            "bytes a rank gets, one of the votes by rank",
            16 * 4096,
            {r: 8 * r + 8 for r in WORLDS},
            "computed",
        ),
        (
            "sockets of most ranks, a host group",
            4095,
            {r: p.sockets for r, p in plans.items()},
            counted,
        ),
        (
            "sockets of rank 0, a host group",
            4095,
            {r: p.most_sockets for r, p in plans.items()},
            counted,
        ),
        (
            "store requests a rank to connect a host group",
            2 * 4096 + 1,
            {r: round(p.asked, 1) for r, p in plans.items()},
            f"2n + 1 in a group of n; measured at n = 8: {asked_to_connect(8):g}",
        ),
        (
            "store requests a rank to start",
            "~3 and more a poll on rank 0, a rank",
            measured(asked_to_meet),
            f"{threads}; polls included, 2 a second and more while somebody is missing",
        ),
        (
            "store requests a rank: one failed, all others lose it",
            "4,096 a look, 40 looks",
            measured(lambda ranks: asked_by_search(ranks, failed=True)),
            threads,
        ),
        (
            "store requests a rank: a machine is gone",
            "4,096 a look, 40 looks; not found",
            measured(lambda ranks: asked_by_search(ranks, failed=False)),
            threads,
        ),
        (
            "store requests a second in training, of all ranks",
            0,
            {r: r // PER_MACHINE if r > PER_MACHINE else 0 for r in WORLDS},
            "one rank of each machine, once a second",
        ),
    ]
    rows = [
        {
            "what": what,
            "before, at 4,096": before,
            **{f"{ranks:,}": now.get(ranks, "") for ranks in WORLDS},
            "how found": how,
        }
        for what, before, now, how in table
    ]
    report("scale", "What ranks cost each other, by their number", rows, options.output)


if __name__ == "__main__":
    main()
