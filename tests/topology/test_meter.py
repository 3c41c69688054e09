"""Times of transfers that overlap."""

import time
from typing import Any

import pytest

from lightning_megatron.topology import meter as meter_file
from lightning_megatron.topology.meter import Meter


class Transfer:
    """Stands in for a `Work`: takes as long as it is told."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.over = clock, clock[0] + seconds

    def get_future(self) -> "Transfer":
        return self

    def then(self, call: Any) -> None:
        self.ended = call

    def wait(self) -> None:
        self.clock[0] = max(self.clock[0], self.over)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(meter_file.torch.cuda, "is_available", lambda: True)  # not of this run
    return now


def test_transfers_at_the_same_time_count_once(clock: list[float]) -> None:
    meter = Meter()
    meter.timed = True
    works = [Transfer(clock, seconds) for seconds in (4.0, 5.0, 6.0)]
    for work in works:
        meter.started(work)  # type: ignore[arg-type]
    clock[0] += 3.0  # computes, while all three are under way
    for work in works:
        meter.wait(work)  # type: ignore[arg-type]
    meter.settle()
    # 3 s hidden and 3 s exposed: those in which the axis was in use.
    assert (meter.hidden_s, meter.exposed_s) == (3.0, 3.0)
    meter.settle()
    assert meter.hidden_s == 3.0


def test_a_transfer_beside_another_wait_is_not_hidden(clock: list[float]) -> None:
    meter = Meter()
    meter.timed = True
    long, short = Transfer(clock, 9.0), Transfer(clock, 2.0)
    for work in (long, short):
        meter.started(work)  # type: ignore[arg-type]
    meter.wait(short)  # type: ignore[arg-type]
    clock[0] += 1.0
    meter.settle()  # the long one is under way
    assert (meter.hidden_s, meter.exposed_s) == (1.0, 2.0)
    meter.timed = False
    meter.stood(1.0)
    meter.settle()
    assert (meter.hidden_s, meter.exposed_s) == (1.0, 3.0)
