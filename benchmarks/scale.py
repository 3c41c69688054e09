"""What thousands of ranks cost each other: ``python -m benchmarks.scale --output FOLDER``.

Measured: the time of the votes of eight processes, and what threads in the place of ranks, with
connections of their own, ask of one store. The rows of larger worlds say how they were found.
"""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.harness import parser, report
from lightning_megatron._torch.groups import Store
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.fault_tolerance.failures.board import EndingBoard, find_cause
from lightning_megatron.launch.attempt import Peer
from lightning_megatron.launch.rendezvous import join
from lightning_megatron.launch.rendezvous_store import host_store, reach_store
from lightning_megatron.testing import WorkerPool

PER_MACHINE = 8
WORLDS = (8, 64, 512, 1024, 4096)
THREADS = (16, 64, 128)


class Counting(Store):
    """A connection to a store that counts what it is asked."""

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


def agree(rounds: int, steps: int) -> float:
    """Median microseconds in which two votes are settled."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    votes = PerBatchVotes()
    votes.start(None)
    for name in ("stop signal", "loss"):
        votes.register(name)
    seconds = []
    for _ in range(1 + rounds):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            votes.settle()
        seconds.append((time.perf_counter() - begun) / steps)
    dist.destroy_process_group()
    return 1e6 * statistics.median(seconds[1:])


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
        found = max(pool.run(8, agree, options.rounds, options.steps, timeout=300))
    threads = f"measured with {', '.join(map(str, THREADS))} threads, TCPStore"
    table: list[tuple[str, object, dict[int, Any], str]] = [
        ("votes of a batch, us", "", {8: round(found)}, "measured, 8 processes"),
        ("bytes a rank gets, two votes", "", {r: 16 * r for r in WORLDS}, "computed"),
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
