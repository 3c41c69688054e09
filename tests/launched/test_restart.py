"""Processes that are killed: what torchrun and Lightning's launcher make of it, with our help."""

import ipaddress

import pytest

from tests.launched.jobs import LIMIT_S, Survived

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

killed_under_torchrun = pytest.mark.parametrize(
    "launched", ["killed_under_torchrun"], indirect=True
)
killed_first_rank = pytest.mark.parametrize("launched", ["killed_first_rank"], indirect=True)


@killed_under_torchrun
def test_a_killed_run_goes_on_where_it_was(launched: Survived) -> None:
    """After a kill in a step, and one while the next attempt was loading."""
    assert launched.done.code == 0, launched.done.text[-5000:]
    assert "finished at step 8" in launched.done.text
    assert [rank for _, rank, _ in launched.kills] == [1, 0]
    by_attempt = {a: [s for b, s, *_ in launched.losses if b == a] for a, *_ in launched.losses}
    assert by_attempt == {0: [1, 2, 3, 4, 5], 2: [5, 6, 7, 8]}
    # Step 5 was done twice, to the bit.
    assert len({loss for _, step, loss, _ in launched.losses if step == 5}) == 1


@killed_under_torchrun
def test_the_killed_rank_is_named_before_what_comes_of_it(launched: Survived) -> None:
    text = launched.done.text
    assert "=== root cause: rank 1 (" in text
    assert "was killed" in text
    assert text.index("=== root cause: rank 1 (") < text.index("SECONDARY FAILURE")


@killed_under_torchrun
def test_processes_of_one_machine_listen_on_loopback_only(launched: Survived) -> None:
    assert set(launched.listening) == {"listening0.json", "listening1.json"}
    addresses = [a for found in launched.listening.values() for a, _ in found]
    assert addresses, "gloo listens somewhere"
    assert [a for a in addresses if not ipaddress.ip_address(a).is_loopback] == []


@killed_first_rank
def test_the_death_of_the_first_rank_ends_the_others(launched: Survived) -> None:
    """Nobody is left who could have ended them."""
    assert launched.done.code == -9
    assert "=== root cause: rank 0 (" in launched.done.text
    assert "finished" not in launched.done.text
    assert launched.done.seconds < LIMIT_S  # at which all would have been killed


@killed_first_rank
def test_the_store_of_the_first_rank_listens_on_loopback_only(launched: Survived) -> None:
    addresses = [a for found in launched.listening.values() for a, _ in found]
    assert len(launched.listening) == 2
    assert [a for a in addresses if not ipaddress.ip_address(a).is_loopback] == []
