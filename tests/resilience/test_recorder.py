"""The latest collectives are those of groups that exist, also where older ones had their names."""

from typing import Any

from lightning_megatron.resilience.recorder import (
    Collective,
    counts,
    first_missing,
    group_names,
    latest,
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
    missing = first_missing({0: ahead, 1: behind}, {"0": [0, 1]})
    assert missing is not None
    assert str(missing.collective) == "all_reduce 5x3, number 4 of group 0"
    assert (missing.begun_by, missing.ranks) == ((0,), (1,))


def test_counts_are_those_of_the_newest_group_of_a_name() -> None:
    found = trace(4)
    assert counts(found["pg_status"], group_names(found)) == {"0": [4, 3]}
    backwards = dict(reversed(found["pg_status"].items()))
    assert counts(backwards, group_names(found)) == {"0": [4, 3]}
