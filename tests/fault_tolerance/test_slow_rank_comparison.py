"""Scores of ranks that do the same work."""

import threading

import torch
import torch.distributed as dist

from lightning_megatron._torch.collectives import watch_waits
from lightning_megatron.fault_tolerance.slow_rank_comparison import OwnWork, SlowRanks, scores
from lightning_megatron.run_log.sections import SectionClock
from tests.monitoring.test_sections import Time


def test_waiting_is_not_own_work() -> None:
    time = Time()
    clock = SectionClock(time)
    clock.enter("backward")
    work = OwnWork(clock)
    for own in (1.0, 3.0, 2.0):
        time.now += own
        outer = clock.began_to_wait()
        inner = clock.began_to_wait()  # a collective that calls another
        time.now += 10.0
        clock.waited(inner)
        clock.waited(outer)
        work.end()
    assert len(work) == 3
    assert work.take() == [0.0, 0.0, 2.0, 0.0]
    assert len(work) == 0


def test_only_waits_of_the_training_thread_are_seen() -> None:
    """Another one writes checkpoints, in collectives of its own; nobody waits for it."""
    clock = SectionClock()
    store = dist.HashStore()  # type: ignore[attr-defined]
    group = dist.ProcessGroupGloo(store, 0, 1)
    seen: list[int] = []

    def began() -> float:
        seen.append(threading.get_ident())
        return clock.began_to_wait()

    def wait() -> None:
        group.allreduce([torch.zeros(1)]).wait()

    undo = watch_waits(began, clock.waited)
    try:
        wait()
        other = threading.Thread(target=wait)
        other.start()
        other.join()
    finally:
        undo()
    assert seen == [threading.get_ident()]


def test_the_slow_rank_has_the_lowest_score_in_its_section() -> None:
    work = [[0.1, 1.0, 2.0, 0.3], [0.1, 2.0, 2.0, 0.3], [0.1, 1.1, 2.1, 0.3]]
    found = scores(work, [0.0, 0.0, 0.0])
    assert (found[0].rank, found[0].section, found[0].score) == (1, "forward", 0.5)
    assert found[1].score == 1.0  # 0.1 of 3.6 does not matter


def test_stages_of_a_pipeline_are_not_compared() -> None:
    work = [[0.0, 1.0, 1.0, 0.0], [0.0, 5.0, 5.0, 0.0]]
    assert {s.score for s in scores(work, [0.0, 1.0])} == {1.0}


def test_two_windows_in_a_row_make_a_slow_rank_once() -> None:
    slow = scores([[0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]], [0.0, 0.0])
    fast = scores([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], [0.0, 0.0])
    slow_ranks = SlowRanks(0.7, 2)
    told = [slow_ranks.add(window) for window in (slow, fast, slow, slow, slow, fast, slow, slow)]
    assert [len(t) for t in told] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert (told[3][0].rank, told[3][0].section) == (1, "forward")


def test_a_tenth_of_the_longest_step_matters() -> None:
    # 0.6 is more than a tenth of the shortest step, and less than one of the longest.
    work = [[0.0, 1.0, 1.0, 0.0], [0.0, 1.6, 1.0, 8.0]]
    by_section = {s.section: s for s in scores(work, [0.0, 0.0]) if s.rank == 1}
    assert by_section["forward"].score == 1.0
    assert by_section["optimizer"].score == 0.0
    assert (by_section["forward"].seconds, by_section["forward"].fastest) == (1.6, 1.0)


def test_a_score_at_the_threshold_is_not_slow() -> None:
    window = scores([[0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]], [0.0, 0.0])
    assert window[0].score == 0.5
    assert not SlowRanks(0.5, 1).add(window)
    slow_ranks = SlowRanks(0.51, 1)
    assert [s.rank for s in slow_ranks.add(window)] == [1]
    assert slow_ranks.current == {(1, "forward"): 1}


def test_a_wait_that_ends_in_another_batch_makes_no_negative_work() -> None:
    time = Time()
    clock = SectionClock(time)
    clock.enter("backward")
    work = OwnWork(clock)
    began = clock.began_to_wait()
    time.now += 10.0
    work.end()
    assert work.take() == [0.0, 0.0, 10.0, 0.0]
    time.now += 1.0
    clock.waited(began)
    work.end()
    assert work.take() == [0.0] * 4
