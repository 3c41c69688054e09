"""Many ranks look for a cause at once; they are threads with one store."""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from lightning_megatron._torch.groups import TCPStore
from lightning_megatron.fault_tolerance.failures.board import (
    Ending,
    EndingBoard,
    _absent,
    find_cause,
)
from lightning_megatron.launch.attempt import Peer
from lightning_megatron.launch.rendezvous_store import host_store

GLOO = "Connection closed by peer [10.0.0.{}]:4321"
PER_MACHINE = 4


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.asked = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())  # asks nobody


@pytest.fixture
def store() -> TCPStore:
    return host_store("127.0.0.1", 0, "127.0.0.1", 60)


class Job:
    """Ranks on machines of four, named after their numbers; processes that live."""

    def __init__(self, store: TCPStore, machines: int, per_machine: int = PER_MACHINE) -> None:
        self.ranks = range(machines * per_machine)
        self.stores = [Counting(store) for _ in self.ranks]
        of = [rank // per_machine for rank in self.ranks]
        peers = tuple(Peer(host=f"node{i}", pid=os.getpid(), machine=f"machine {i}") for i in of)
        self.boards = [
            EndingBoard(self.stores[rank], rank, peers, address=f"10.0.0.{of[rank] + 1}")
            for rank in self.ranks
        ]
        for counting in self.stores:
            counting.asked.clear()

    def search(
        self, ranks: Sequence[int], error: str = GLOO.format(99)
    ) -> list[tuple[list[Ending], bool]]:
        """What each of some ranks finds, all of them at the same time."""
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: find_cause(self.boards[rank], error), ranks))

    @property
    def requests(self) -> int:
        return sum(counting.asked.total() for counting in self.stores)


def test_a_cause_costs_each_rank_a_few_requests(store: TCPStore) -> None:
    job = Job(store, 8)
    job.boards[5].post("failed", "failed with ValueError: wrong")
    found = job.search([rank for rank in job.ranks if rank != 5])
    assert {str(causes[0]) for causes, _ in found} == {
        f"rank 5 ({os.uname().nodename}, process {os.getpid()}) failed with ValueError: wrong"
    }
    assert sum(first for _, first in found) == 1
    assert job.requests <= 12 * len(job.ranks)


def test_when_all_fail_nobody_reads_them_all(store: TCPStore) -> None:
    job = Job(store, 24)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda rank: job.boards[rank].post("failed", "x"), job.ranks[:-1]))
    [(causes, first)] = job.search([job.ranks[-1]])
    assert first
    assert len(causes) == 64
    assert job.requests <= 6 * len(job.ranks)


def test_a_cause_that_was_announced_and_never_written_is_passed_over(store: TCPStore) -> None:
    job = Job(store, 2)
    job.stores[3].add(job.boards[3]._name("causes"), 1)  # it died just then
    job.boards[5].post("failed", "x")
    assert [cause.rank for cause in job.boards[0].causes()] == [5]


def test_the_silent_machine_is_named_and_nobody_who_is_slow_to_notice(store: TCPStore) -> None:
    """Machine 2 is off; of the others some notice, and some have a thread that answers."""
    job = Job(store, 6)
    assert [board.answers for board in job.boards[:5]] == [True, False, False, False, True]
    notices = [0, 1, 5, 6, 7]
    with ThreadPoolExecutor(8) as threads:
        found = threads.submit(job.search, notices)
        while not found.done():
            for machine in (3, 4, 5):
                job.boards[PER_MACHINE * machine].answer()
            wait([found], timeout=0.01)
        told = found.result()
    expected = (
        "node2 (10.0.0.3; ranks 8, 9, 10, 11) does not answer: its processes were killed, "
        "or it is off or cut off"
    )
    assert {(str(causes[0]), causes[0].rank) for causes, _ in told} == {(expected, 8)}
    assert sum(first for _, first in told) == 1
    busy = sum(job.stores[rank].asked.total() for rank in notices)
    assert busy <= 20 * len(notices)


@pytest.mark.parametrize("error", ["", GLOO.format(3)])
def test_of_several_silent_ones_the_error_may_tell_which(store: TCPStore, error: str) -> None:
    job = Job(store, 4, per_machine=1)
    for silent in (2, 3):
        assert job.boards[silent].posted is None
    board = job.boards[0]
    board.post("echo")
    job.boards[1].post("echo")
    [cause] = board.report_silent_machines(error)
    pid = os.getpid()
    if error:
        assert str(cause) == (
            f"rank 2 (node2, 10.0.0.3, process {pid}) does not answer: it was killed, or "
            "its machine is off or cut off"
        )
    else:
        assert str(cause) == (
            f"rank 2 (node2, 10.0.0.3, process {pid}), rank 3 (node3, 10.0.0.4, process {pid}) do "
            "not answer: they were killed, or their machines are off or cut off"
        )
    assert job.boards[1].causes() == [cause]


def test_who_has_left_in_order_is_not_silent(store: TCPStore) -> None:
    job = Job(store, 2, per_machine=1)
    job.boards[1].post("left")
    job.boards[0].post("echo")
    assert job.boards[0].report_silent_machines() == []


def test_a_store_that_went_with_rank_0_names_it(store: TCPStore) -> None:
    peers = tuple(Peer(host=f"node{i}", pid=7, machine=str(i)) for i in range(2))

    class Gone:
        def add(self, key: str, number: int) -> int:
            if "runs of" not in key:
                raise RuntimeError("Broken pipe")
            return 1

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    board = EndingBoard(Gone(), 1, peers, held_by_rank_0=True)
    [cause], first = find_cause(board, "")
    assert str(cause).startswith("rank 0 (node0, process 7) has gone, and with it the store")
    assert first


def test_a_store_that_does_not_answer_names_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_megatron.fault_tolerance.failures.board._SILENT_PATIENCE_S", 0.05
    )
    peers = tuple(Peer(host=f"node{i}", pid=7, machine=str(i)) for i in range(2))
    late = threading.Event()

    class Slow:
        def add(self, key: str, number: int) -> int:
            return 1

        def check(self, keys: list[str]) -> bool:
            return late.wait(60)

    board = EndingBoard(Slow(), 1, peers, held_by_rank_0=True)
    [cause] = board.report_silent_machines()
    late.set()
    assert str(cause).startswith("rank 0 (node0, process 7) does not answer, and with it the store")


@pytest.mark.parametrize("missing", [(), (7,), (0, 1, 2), (5, 200), tuple(range(256))])
def test_what_is_absent_is_found_by_halves(missing: tuple[int, ...]) -> None:
    asked = 0

    def check(keys: list[str]) -> bool:
        nonlocal asked
        asked += 1
        return not {str(rank) for rank in missing} & set(keys)

    found = _absent(check, [str(rank) for rank in range(256)], 9)
    assert sorted(map(int, found)) == list(missing[:9])
    assert asked <= 1 + 2 * 8 * max(len(found), 1)
