"""The clock that says what a rank is doing."""

import pytest

from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.run_log.sections import SECTIONS, SectionClock


class Time:
    """A clock that stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_go_to_the_section_they_were_spent_in() -> None:
    time = Time()
    clock = SectionClock(time)
    time.now = 2.0
    clock.enter("data")
    time.now = 5.0
    with clock.section("checkpoint"):
        time.now = 9.0
        assert (clock.current, clock.since) == ("checkpoint", 5.0)
    assert (clock.current, clock.since) == ("data", 9.0)
    time.now = 10.0
    spent = clock.seconds()
    assert spent == {**dict.fromkeys(SECTIONS, 0.0), "start": 2.0, "data": 4.0, "checkpoint": 4.0}
    assert clock.longest["data"] == 3.0
    assert clock.longest["checkpoint"] == 4.0


def test_entering_a_section_again_is_progress() -> None:
    clock = SectionClock()
    before = clock.entries
    clock.enter("validation")
    clock.enter("validation")
    assert clock.entries == before + 2


def test_a_section_ends_with_an_error() -> None:
    clock = SectionClock()
    with pytest.raises(KeyError), clock.section("checkpoint"):
        raise KeyError
    assert clock.current == "start"


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="'dta' is no section"):
        SectionClock().enter("dta")


def test_every_line_of_an_announcement_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    announce("rank 1 hangs", ["first", "second\nthird"], rank=3)
    assert capfd.readouterr().err == (
        "[rank 3] === rank 1 hangs ===\n[rank 3]   first\n[rank 3]   second\n[rank 3]   third\n"
    )


def test_an_announcement_without_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert announce("title", rank=0) == "[rank 0] === title ===\n"
