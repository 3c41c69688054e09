"""Ranks are threads here: the barrier needs nothing but a store."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_megatron.errors import ConfigError
from lightning_megatron.launch import store_barrier
from lightning_megatron.launch.store_barrier import StoreBarrier

LONG_S = 60.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(store_barrier, "default_store", lambda: made)
    return made


def each(ranks: Sequence[int], call: Callable[[int], Any]) -> "list[Future[Any]]":
    """Have ranks call a function at the same time."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [threads.submit(call, rank) for rank in ranks]


def barrier(rank: int, ranks: Sequence[int] = range(3)) -> StoreBarrier:
    return StoreBarrier("a test", ranks, rank)


def results(ranks: Sequence[int], patience_s: float = LONG_S, **how: bool) -> list[bool]:
    return [f.result() for f in each(ranks, lambda r: barrier(r).wait(patience_s, **how))]


def test_all_meet_as_often_as_they_call(store: Any) -> None:
    for _ in range(3):  # by other objects
        assert results(range(3)) == [True] * 3
    assert barrier(0, [0]).wait(0.0)


def test_ranks_of_another_group_do_not_count(store: Any) -> None:
    assert results([0, 1], 0.1) == [False] * 2
    assert not barrier(2, [0, 2]).wait(0.1)


def test_after_some_gave_up_all_meet_the_next_time(store: Any) -> None:
    assert results([0, 2], 0.1) == [False] * 2
    assert results(range(3)) == [True] * 3


def test_who_comes_late_does_not_wait_again_where_there_is_no_second_time(store: Any) -> None:
    assert results([1], 0.1) == [False]
    assert results([0, 2], again=False) == [False] * 2


def test_an_interrupt_gives_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_barrier.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            barrier(0).wait(LONG_S)
    assert results(range(3)) == [True] * 3


class Clock:
    """Time that stands still until so many ranks wait."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: set[int] = set()

    def monotonic(self) -> float:
        return 0.0 if len(self._waiting) < self._ranks else 1000.0

    def sleep(self, _: float) -> None:
        time.sleep(0.001)
        self._waiting.add(threading.get_ident())


@pytest.mark.parametrize(
    ("ranks", "words"), [((0, 1, 2), "0, 1 of 3"), ((0, 1, 4), "0, 1 of 0, 1, 4")]
)
def test_message_names_those_that_came(
    store: Any, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], words: str
) -> None:
    monkeypatch.setattr(store_barrier, "time", Clock(ranks=2))
    for future in each([0, 1], lambda r: barrier(r, ranks).require_all("generate")):
        with pytest.raises(ConfigError, match=f"^generate: called on ranks {words} alone within "):
            future.result()
