"""Ranks are threads here: the agreement needs nothing but a store."""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_megatron.errors import ConfigError, MissingRanksError
from lightning_megatron.launch import rendezvous as meeting
from lightning_megatron.launch.attempt import KEY, Attempt, Peer, recall, remember
from lightning_megatron.launch.rendezvous import _digest, dismiss, join, report

PATIENCE_S = 60.0


def start(
    threads: ThreadPoolExecutor, store: Any, ranks: Sequence[int], world: int, seconds: float
) -> dict[int, "Future[Attempt]"]:
    return {rank: threads.submit(join, store, rank, world, seconds) for rank in ranks}


def fail(futures: Sequence["Future[Attempt]"], pattern: str, error: type[Exception]) -> set[str]:
    """The texts with which all of them have failed."""
    texts = set()
    for future in futures:
        with pytest.raises(error, match=pattern) as raised:
            future.result(timeout=PATIENCE_S)
        texts.add(str(raised.value))
    return texts


def everybody(store: Any, world: int, run_id: str | None = None) -> list[Attempt]:
    with ThreadPoolExecutor(world) as threads:
        futures = [
            threads.submit(join, store, rank, world, PATIENCE_S, run_id) for rank in range(world)
        ]
        return [future.result() for future in futures]


def await_hello(store: Any, rank: int, world: int) -> None:
    """Return when a rank has come."""
    dist.PrefixStore(KEY, store).wait([meeting._hello(rank, world)])


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks look at each other more often than those of several machines need to."""
    monkeypatch.setattr(meeting, "_RENEWAL_S", 0.1)
    monkeypatch.setattr(meeting, "_COLLECT_S", 0.3)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def test_all_ranks_agree(store: Any) -> None:
    attempts = everybody(store, 4)
    assert len({attempt.to_json() for attempt in attempts}) == 1
    assert attempts[0].number == 0
    assert len(attempts[0].peers) == 4


def test_a_later_attempt_in_the_same_store_has_another_prefix_and_the_same_run(store: Any) -> None:
    first, second, smaller = everybody(store, 3), everybody(store, 3), everybody(store, 2)
    assert [a.number for a in (first[0], second[0], smaller[0])] == [0, 1, 2]
    assert len({a.prefix() for a in (first[0], second[0], smaller[0])}) == 3
    assert {a.run_id for a in (*first, *second, *smaller)} == {first[0].run_id}


def test_the_launcher_names_the_run(store: Any) -> None:
    assert {attempt.run_id for attempt in everybody(store, 2, "job 17")} == {"job 17"}


def test_ranks_of_a_failed_start_are_not_taken_for_those_of_the_next(store: Any) -> None:
    """All that the dead of the first attempt have written is there when the second begins."""
    with ThreadPoolExecutor(8) as threads:
        died = start(threads, store, [1, 2], 4, 0.3)  # rank 0 and 3 never come
        for future in died.values():
            with pytest.raises(MissingRanksError):
                future.result()
        # Rank 0 of the next one finds two answers that nobody stands behind.
        begun = start(threads, store, [0], 4, PATIENCE_S)
        begun |= start(threads, store, [3], 4, PATIENCE_S)
        with pytest.raises(TimeoutError):
            begun[0].result(timeout=0.3)
        begun |= start(threads, store, [1, 2], 4, PATIENCE_S)
        numbers = {future.result().number for future in begun.values()}
    assert numbers == {0}


def test_a_rank_0_that_dies_while_it_gathers_is_replaced(store: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        others = start(threads, store, [1, 2], 4, PATIENCE_S)
        dead = dist.PrefixStore("lightning_megatron/attempt", store)  # type: ignore[attr-defined]
        # What a rank 0 did before it was killed: it drew a number and invited rank 1.
        number = dead.add("attempts", 1) - 1
        token = json.loads(dead.get("hello/4/1"))["token"]
        dead.set(f"invitation/{token}", f"{number} {_digest({})}")
        dead.wait([f"accepted/{number}/{token}"])
        others |= start(threads, store, [0, 3], 4, PATIENCE_S)
        assert {future.result().number for future in others.values()} == {number + 1}


def test_a_rank_that_dies_while_rank_0_gathers_is_replaced(store: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        waiting = start(threads, store, [0, 1], 3, PATIENCE_S)
        dead = dist.PrefixStore("lightning_megatron/attempt", store)  # type: ignore[attr-defined]
        dead.set("hello/3/2", json.dumps({"token": "of the dead", "host": "a", "pid": 1}))
        dead.wait(["invitation/of the dead"])
        waiting |= start(threads, store, [2], 3, PATIENCE_S)
        assert {future.result().number for future in waiting.values()} == {0}
        assert waiting[1].result().peers[2].pid != 1


def test_all_who_came_name_the_missing_ranks(store: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        futures = start(threads, store, [0, 1, 4], 5, 2.0)
        for future in futures.values():
            with pytest.raises(MissingRanksError, match=r"ranks 2, 3 of 5 have not connected"):
                future.result()


def test_without_rank_0_the_others_name_it(store: Any) -> None:
    with (
        ThreadPoolExecutor(8) as threads,
        pytest.raises(MissingRanksError, match=r"rank 0 of 3 has not connected within 0.2 s"),
    ):
        start(threads, store, [1, 2], 3, 0.2)[1].result()


def test_options_that_differ_are_named_on_all_ranks(store: Any) -> None:
    """With both values, and the ranks that have them; those that are the same are not."""
    given = [{"tp": "2", "zero": "1"}] * 2 + [{"tp": "2", "zero": "3", "seed": "7"}] * 2
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(join, store, rank, 4, PATIENCE_S, options=options)
            for rank, options in enumerate(given)
        ]
        [text] = fail(
            futures, "zero=3, seed=7 on ranks 2, 3 .*, zero=1, seed=unset on rank 0 ", ConfigError
        )
    assert "tp" not in text


def test_numbers_of_ranks_that_differ_are_named(store: Any) -> None:
    with ThreadPoolExecutor(3) as threads:
        futures = [
            threads.submit(
                join, store, rank, world, PATIENCE_S, options={"num_nodes": str(world)}, fresh=True
            )
            for rank, world in ((0, 2), (1, 3), (2, 3))
        ]
        fail(futures, "num_nodes=3 on ranks 1, 2 .*, num_nodes=2 on rank 0", ConfigError)


def test_a_rank_that_cannot_take_part_ends_all(store: Any) -> None:
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(join, store, rank, 3, PATIENCE_S) for rank in range(2)]
        await_hello(store, 1, 3)
        report(store, 17, ["NODE_RANK=17 is wrong"])
        said = {f"{Peer.here().host}: NODE_RANK=17 is wrong"}
        assert fail(futures, "NODE_RANK", ConfigError) == said


def test_a_rank_0_that_cannot_take_part_ends_all(store: Any) -> None:
    """One waits, another has other options, and the third has a problem of its own."""
    with ThreadPoolExecutor(3) as threads:
        futures = [
            threads.submit(join, store, rank, 4, PATIENCE_S, options=options, fresh=True)
            for rank, options in ((1, {}), (2, {"tp": "2"}))
        ]
        report(store, 3, ["tp=3 is wrong"])
        dismiss(store, 4, ["tp=0 is wrong"], PATIENCE_S)
        assert fail(futures, "tp=0 is wrong", ConfigError) == {f"{Peer.here().host}: tp=0 is wrong"}


def test_a_report_of_an_earlier_attempt_is_not_read(store: Any) -> None:
    everybody(store, 2)
    report(store, 1, ["the options of the first attempt were wrong"])
    assert [attempt.number for attempt in everybody(store, 2)] == [1, 1]


@pytest.mark.parametrize("twice", [0, 1])
def test_two_processes_that_come_as_the_same_rank_are_named(store: Any, twice: int) -> None:
    with ThreadPoolExecutor(4) as threads:
        ranks = [0, 1, twice]  # and rank 2 never comes
        futures = [threads.submit(join, store, rank, 3, PATIENCE_S) for rank in ranks]
        pattern = rf"two processes have the rank {twice}: process \d+ on .* and process \d+"
        assert len(fail(futures, pattern, ConfigError)) == 1


def test_a_process_too_many_learns_that_another_has_its_place(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are there, so the others go on, with the one that came last."""
    here = Peer.here()
    monkeypatch.setattr(meeting, "_RENEWAL_S", PATIENCE_S)  # what happens within the first second
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(join, store, 1, 2, PATIENCE_S)
        ours = dist.PrefixStore("lightning_megatron/attempt", store)  # type: ignore[attr-defined]
        ours.wait(["hello/2/1"])
        token = json.loads(ours.get("hello/2/1"))["token"]
        hello = {"token": "b", "host": "node2", "pid": here.pid, "machine": "other"}
        ours.set("hello/2/1", json.dumps(hello))
        host = threads.submit(join, store, 0, 2, PATIENCE_S)
        ours.wait(["invitation/b"])
        ours.set("accepted/0/b", "1")
        ours.set(f"invitation/{token}", "0 " + _digest({}))  # it had come first
        assert host.result().peers[1].host == "node2"
        fail([first], rf"have the rank 1: .*process {here.pid} on node2", ConfigError)


def test_the_attempt_is_recalled_from_the_store_of_the_group(store: Any) -> None:
    attempt = remember(store, everybody(store, 2)[0])
    assert recall(store) == attempt
    unknown = dist.HashStore()  # type: ignore[attr-defined]
    assert recall(unknown) == recall(unknown)
