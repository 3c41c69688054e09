"""The latest collectives are those of groups that exist, also where older ones had their names."""

from typing import Any

import pytest

from lightning_megatron.fault_tolerance.hangs.flight_recorder import (
    Collective,
    begun,
    counts,
    first_missing,
    group_names,
    latest,
    strayed,
)


def entry(group: str, of: int, number: int, began: int, **more: Any) -> dict[str, Any]:
    return {
        **{"process_group": [group, "undefined"], "pg_id": of, "collective_seq_id": number},
        **{"input_sizes": [[5, 3]], "profiling_name": "gloo:all_reduce", "is_p2p": False},
        **{"retired": False, "state": "scheduled", "time_created_ns": began, **more},
    }


def trace(number: int) -> dict[str, Any]:
    """Of a process that trains for the second time: the first time it came to number 30."""
    entries = [entry("0", 0, 30, began=10), entry("0", 2, number, began=20 + number)]
    status = {
        "0": {"last_enqueued_collective": "30", "last_completed_collective": "30"},
        "2": {"last_enqueued_collective": str(number), "last_completed_collective": "3"},
    }
    return {"entries": [*entries, entry("0", 2, 99, began=99, is_p2p=True)], "pg_status": status}


def test_a_group_of_an_earlier_run_hides_no_collective_that_is_missing() -> None:
    ahead, behind = ([Collective(**c) for c in latest(trace(n))] for n in (4, 3))
    assert (
        latest({"entries": [entry("7", 7, 1, 1, process_group=["7", "mesh_cp"])]})[0]["axis"]
        == "cp"
    )
    missing = first_missing({0: ahead, 1: behind}, {"0": [0, 1]})
    assert missing is not None
    assert str(missing.collective) == "all_reduce 5x3, number 4 of group 0"
    assert (missing.begun_by, missing.ranks) == ((0,), (1,))


def test_counts_are_those_of_the_newest_group_of_a_name() -> None:
    found = trace(4)
    assert counts(found["pg_status"], group_names(found)) == {"0": [4, 3]}
    backwards = dict(reversed(found["pg_status"].items()))
    assert counts(backwards, group_names(found)) == {"0": [4, 3]}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("abc abc abc ab", False),
        ("abc abc abc ac", True),  # b was left out
        ("abc abc abc abb", True),  # b came twice
        ("abc abd abc ab", False),
        ("abc abd abc abd", False),  # every second time it is d
        ("aab aab aab aa", False),  # after two, as before, though one was followed by b elsewhere
        ("abc", False),  # nothing is known yet
        ("", False),
    ],
)
def test_who_strays_from_what_was_done_before(kinds: str, expected: bool) -> None:
    assert strayed(kinds.replace(" ", "")) is expected


def test_what_was_skipped_counts_whoever_came_first_to_wait() -> None:
    """Each rank waits for the other in another group; which began first is chance."""
    for first in (100, 300):
        seen = {
            0: [Collective("a", 5, "all_reduce", "4", first, False)],
            1: [Collective("b", 9, "all_reduce", "4", 200, False)],
        }
        groups = {"a": [0, 1], "b": [0, 1]}
        missing = first_missing(seen, groups, astray={1})
        assert missing is not None
        assert (missing.collective.group, missing.ranks) == ("a", (1,))
        other = first_missing(seen, groups)
        assert other is not None
        assert other.ranks == ((1,) if first == 100 else (0,))


def test_history_is_in_the_order_of_time_and_of_one_kind() -> None:
    entries = [entry("0", 0, 2, began=20), entry("1", 1, 7, began=10, profiling_name="x")]
    late = entry("0", 0, 3, began=30, is_p2p=True)
    earlier_run = entry("0", 7, 900, began=5)
    found = begun({"entries": [*entries, earlier_run, late, entry("0", 0, 4, began=40)]})
    assert len(found) == 3
    assert found[1] == found[2] != found[0]


def test_an_exchange_of_other_rows_is_of_the_same_kind() -> None:
    """How many tokens go to experts is another number in each step."""
    sizes = [[[17, 8]], [[5, 8]], [[17, 4]]]
    entries = [
        entry("0", 0, n, began=n, profiling_name="gloo:all_to_all", input_sizes=shape)
        for n, shape in enumerate(sizes, start=1)
    ]
    kinds = begun({"entries": entries})
    assert kinds[0] == kinds[1] != kinds[2]
