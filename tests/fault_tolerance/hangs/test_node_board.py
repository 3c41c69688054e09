"""The board of the monitors: who is silent, who knows a verdict, and strangers."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from lightning_megatron.fault_tolerance.hangs import diagnosis as verdict
from lightning_megatron.fault_tolerance.hangs import node_board
from lightning_megatron.fault_tolerance.hangs.diagnosis import suspect
from lightning_megatron.fault_tolerance.hangs.node_board import (
    BoardGuest,
    BoardHolder,
    Node,
    Posts,
    pack,
    unpack,
)
from lightning_megatron.launch import interfaces
from tests.fault_tolerance.hangs.test_diagnosis import STOPPED, view

NODES = tuple(Node(f"node{i}", (2 * i, 2 * i + 1)) for i in range(3))


def await_(is_so: Callable[[], Any]) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


class Boards:
    """One holder and its guests, in this process."""

    def __init__(self, closing: ExitStack) -> None:
        self.held: list[int] = []
        listening = interfaces.listen("127.0.0.1")
        self.address = listening.getsockname()
        self.closing = closing
        self.holder = BoardHolder(
            listening, "word", NODES, lambda: self.held.append(0), [view(0), view(1)]
        )
        closing.callback(self.holder.leave)

    def guest(self, node: int, **changes: Any) -> BoardGuest:
        guest = BoardGuest(
            self.address,
            "word",
            node,
            NODES[0],
            lambda: self.held.append(node),
            [view(rank, **changes) for rank in NODES[node].ranks],
        )
        self.closing.callback(guest.leave)
        await_(lambda: guest.ever_connected)
        return guest


@pytest.fixture
def boards() -> Iterator[Boards]:
    with ExitStack() as closing:
        yield Boards(closing)


def test_views_survive_the_wire() -> None:
    for changes in ({}, {"left": True}, {"process": STOPPED}, {"waits": 2}):
        before = view(3, **changes)
        after = unpack(json.loads(json.dumps(pack(before))), "host")
        assert after.rank == before.rank
        assert (after.gone, after.late, after.beat.left) == (False, before.late, before.beat.left)
        assert after.beat.progress == before.beat.progress
        assert after.process.stopped == before.process.stopped
    assert unpack(pack(view(1, process=verdict.ProcessState())), "host").gone
    with pytest.raises((ValueError, TypeError, IndexError)):
        unpack([1, 2, 99, 0, 0, 0, 0, 0, "S", 1, 1, 1], "host")


def test_silence_is_counted_in_seconds_of_watching() -> None:
    posts = Posts(NODES)
    posts.put(0, [pack(view(0))], left=False)
    posts.put(1, [pack(view(2))], left=False)
    posts.grow_older(4.0)
    posts.put(0, [pack(view(0))], left=False)
    posts.grow_older(3.0)
    assert posts.ages() == {0: 3.0, 1: 7.0}  # node 2 never came, which is no silence
    posts.put(1, [pack(view(2, left=True))], left=True)
    assert posts.ages() == {0: 3.0}


def test_all_are_judged_together_when_the_connections_are_calm() -> None:
    posts = Posts(NODES[:2])
    posts.put(0, [pack(view(0)), pack(view(1))], left=False)
    assert posts.everybody() is None
    posts.put(1, [pack(view(2)), pack(view(3, left=True))], left=False)
    everybody = posts.everybody()
    assert everybody is not None
    found = suspect(everybody, 2.0)
    assert found is not None
    assert (found.ranks, found.reason) == ((3,), verdict.ABSENT)
    posts.grow_older(10.0)
    posts.put(0, [pack(view(0))], left=False)
    posts.put(1, [pack(view(2))], left=False)
    for _ in range(20):  # twice the interruption
        assert posts.everybody() is None
        posts.grow_older(1.0)
        posts.put(0, [pack(view(0))], left=False)
        posts.put(1, [pack(view(2))], left=False)
    assert posts.everybody() is not None


def test_a_run_is_asleep_when_all_its_ranks_are() -> None:
    posts = Posts(NODES[:2])
    posts.put(0, [pack(view(0, process=STOPPED))], left=False)
    posts.put(1, [pack(view(2))], left=False)
    assert not posts.asleep()
    assert suspect([view(0, process=STOPPED)], 2.0, whole=False, asleep=posts.asleep())
    posts.put(1, [pack(view(2, process=STOPPED))], left=False)
    assert posts.asleep()
    assert not suspect([view(0, process=STOPPED)], 2.0, whole=False, asleep=posts.asleep())


def test_a_verdict_is_held_by_all_before_anybody_acts(
    boards: Boards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_board, "_AGREE_S", 600.0)  # or nobody waits for the others
    first, second = boards.guest(1), boards.guest(2)
    first.tell({"what": "it"})
    # Who has found it holds its ranks itself.
    assert sorted(boards.held) == [0, 2]
    for board in (boards.holder, second):
        message = board.inbox.get(timeout=120)
        assert message["verdict"] == {"what": "it"}
        board.await_others()
    with pytest.raises(queue.Empty):
        first.inbox.get_nowait()
    boards.holder.tell({"what": "other"})
    assert sorted(boards.held) == [0, 1, 2, 2]


def test_evidence_of_all_nodes(boards: Boards) -> None:
    guests = {node: boards.guest(node) for node in (1, 2)}

    def answer(node: int) -> None:
        guests[node].bring(guests[node].inbox.get(timeout=120)["wish"], {"from": node})

    threads = [threading.Thread(target=answer, args=(node,)) for node in guests]
    for thread in threads:
        thread.start()
    gathered = boards.holder.gather(lambda: {"from": 0})
    assert gathered is not None
    assert {node: found["from"] for node, found in gathered.items()} == {0: 0, 1: 1, 2: 2}
    for thread in threads:
        thread.join()


def test_each_misses_the_other(boards: Boards) -> None:
    """Time passes for a board by being told so."""
    guest = boards.guest(1)
    for _ in range(3):  # what is heard counts from the next look on
        guest.post([view(2)], 1.0)
    assert guest.lost(5.0) is None
    assert boards.holder.lost(5.0) is None
    boards.holder.posts.grow_older(20.0)
    lost = boards.holder.lost(5.0)
    assert lost is not None
    assert (lost.nodes, [v.rank for v in lost.views], lost.refused) == ((1,), [2, 3], False)
    await_(lambda: boards.holder.lost(5.0) is None)  # its next post
    guest._silence = 0.0
    heard = guest._client.heard
    await_(lambda: guest._client.heard > heard)
    guest._heard = guest._client.heard
    guest.post([view(2)], 20.0)
    lost = guest.lost(5.0)
    assert lost is not None
    assert (lost.nodes, [v.rank for v in lost.views]) == ((0,), [0, 1])


def test_who_has_left_is_not_missed(boards: Boards) -> None:
    guest, other = boards.guest(1), boards.guest(2)
    assert boards.holder.needed(5.0)
    guest.leave()
    await_(lambda: 1 not in boards.holder.posts.ages())
    boards.holder.posts.grow_older(20.0)
    lost = boards.holder.lost(5.0)
    assert lost is None or 1 not in lost.nodes
    boards.holder.post([view(0, left=True), view(1, left=True)], 1.0)
    await_(lambda: other._answer["left"])
    boards.holder.leave()
    other.post([view(4)], 1.0)
    other.post([view(4)], 50.0)
    assert other.lost(5.0) is None


def test_a_guest_comes_back(boards: Boards) -> None:
    """Over another connection, when the first was lost in between."""
    guest = boards.guest(1)
    assert guest._client._connection is not None
    guest._client._connection.shutdown(socket.SHUT_RDWR)
    await_(lambda: guest._client._connection is None)
    await_(lambda: boards.holder._server.connected == {1})
    heard = guest._client.heard
    await_(lambda: guest._client.heard > heard + 1)


@pytest.mark.parametrize(
    "sent",
    [
        b'{"node":1,"token":"wrong"}\n',
        b'{"node":7,"token":"word"}\n',
        b'{"node":true,"token":"word"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"x" * 5000,
        b'{"node":1,"token":"word"}\n{"rows":[[1]]}\n',
        b'{"node":1,"token":"word"}\n{"verdict":3}\n',
        b'{"node":1,"token":"word"}\n{}\n',
    ],
)
def test_strangers_are_shown_out(boards: Boards, sent: bytes) -> None:
    with socket.create_connection(boards.address) as stranger:
        stranger.settimeout(120)
        stranger.sendall(sent)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert boards.held == []
    boards.guest(1)  # the board lives


@pytest.mark.thorough
def test_a_silent_stranger_is_shown_out(boards: Boards) -> None:
    with socket.create_connection(boards.address) as stranger:
        stranger.settimeout(120)
        assert stranger.recv(100) == b""


def test_a_guest_does_not_wait_for_a_board_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_board, "_AGREE_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    guest = BoardGuest(address, "word", 1, NODES[0], lambda: None, [view(2)])
    guest.tell({"what": "it"})
    guest.post([view(2)], 100.0)
    assert guest.lost(5.0) is None  # never heard, never missed
    guest.leave()
