"""Signals, kills and lost nodes under real launchers, and what comes after them.

What each run is held against is one that nothing happened to: same steps, same samples, same losses
to the bit, on every rank.
"""

import ipaddress
import re
from typing import Any

import pytest

from tests.launched.forked import ENDS, Left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

smokes = pytest.mark.parametrize("launched", ["smokes"], indirect=True)


def scenarios(test: Any) -> Any:
    """Decorator of a test that looks at a scenario of the long job."""
    test = pytest.mark.parametrize("launched", ["scenarios"], indirect=True)(test)
    return pytest.mark.thorough(test)


STEPS = list(range(1, 9))


def last_of(curve: list[Any]) -> dict[int, Any]:
    """Loss and samples by step, as they were done last."""
    return {step: rest for _, step, *rest in curve}


def faults_of(left: Left, whole: Left) -> list[str]:
    """What is not as in an undisturbed run."""
    faults = []
    for rank, (ours, theirs) in enumerate(zip(left.curves, whole.curves, strict=True)):
        expected = last_of(theirs)
        assert list(expected) == STEPS
        if sorted(last_of(ours)) != STEPS:
            faults.append(f"rank {rank} did the steps {sorted(last_of(ours))}")
        faults += [
            f"rank {rank}, step {step}: {found} instead of {expected[step]}"
            for _, step, *found in ours
            if found != expected[step]
        ]
    if "finished at step 8" not in left.texts[-1] or left.launches[-1].code != 0:
        faults.append(left.texts[-1][-3000:])
    faults += ["processes were left over" for launch in left.launches if launch.left_over]
    return faults


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("Lightning, SIGTERM to the main process", 143),
        ("Lightning, SIGTERM to a child", 143),
        ("Lightning, Ctrl-C", 130),
        ("torchrun, SIGTERM to the launcher", 1),
        ("torchrun, SIGTERM to the group", 1),
        ("torchrun, SIGUSR1 to the last rank", 1),
    ],
)
@scenarios
def test_a_signal(launched: dict[str, Left], name: str, code: int) -> None:
    """All ranks save the same step and end with one code; the next launch goes on to the bit."""
    left = launched[name]
    expected = 130 if "Ctrl-C" in name else 143
    assert left.codes == [[expected], [expected]], left.texts[0][-3000:]
    assert left.saved == ["preempted-step=4.ckpt"]
    assert left.launches[0].code == code  # torchrun's own is 1, whatever its workers' were
    assert faults_of(left, launched["undisturbed"]) == []
    assert len(left.runs) == 4
    assert len(set(left.runs)) == 1  # though no launcher knows of the other
    # Nothing was done twice: the second launch began where the first one had ended.
    assert [step for _, step, *_ in left.curves[0]] == STEPS


def steps_of(lines: list[Any]) -> dict[int, list[int]]:
    """Steps by attempt."""
    found: dict[int, list[int]] = {}
    for attempt, step, *_ in lines:
        found.setdefault(attempt, []).append(step)
    return found


@pytest.mark.parametrize(
    ("launched", "rendezvous"),
    [("smokes", "static"), pytest.param("scenarios", "c10d", marks=pytest.mark.thorough)],
    indirect=["launched"],
)
def test_a_kill(launched: dict[str, Left], rendezvous: str) -> None:
    left = launched[f"killed, {rendezvous}"]
    assert [rank for _, rank, _ in left.kills] == [1], left.texts[0][-3000:]
    assert faults_of(left, launched["undisturbed"]) == []
    assert steps_of(left.curves[0]) == {0: [1, 2, 3, 4, 5], 1: [5, 6, 7, 8]}
    assert "=== root cause: rank 1 (" in left.texts[0]


@scenarios
def test_a_killed_pipeline_goes_on_where_it_was(launched: dict[str, Left]) -> None:
    """After a kill in a step, and one while the next attempt was loading."""
    left = launched["killed in a pipeline"]
    [launch], [text] = left.launches, left.texts
    assert launch.code == 0, text[-5000:]
    assert "finished at step 8" in text
    assert [rank for _, rank, _ in left.kills] == [1, 0]
    assert steps_of(left.losses) == {0: [1, 2, 3, 4, 5], 2: [5, 6, 7, 8]}
    # Step 5 was done twice, to the bit.
    assert len({loss for _, step, loss in left.losses if step == 5}) == 1
    assert "=== root cause: rank 1 (" in text


@smokes
def test_the_death_of_the_first_rank_ends_the_others(launched: dict[str, Left]) -> None:
    """Nobody is left who could have ended them; the death is named before what comes of it."""
    left = launched["Lightning, killed first rank"]
    [launch], [text] = left.launches, left.texts
    assert launch.code == -9
    assert not launch.left_over
    assert text.index("=== root cause: rank 0 (") < text.index("SECONDARY FAILURE")
    assert "finished" not in text


@smokes
def test_processes_of_one_machine_listen_on_loopback_only(launched: dict[str, Left]) -> None:
    """And with them the store of Lightning's first rank."""
    listening = launched["Lightning, killed first rank"].listening
    assert listening, "gloo listens somewhere"
    assert [a for a in listening if not ipaddress.ip_address(a).is_loopback] == []


@pytest.mark.parametrize("name", ENDS)
@scenarios
def test_the_rank_that_ended_is_named_before_all_others(
    launched: dict[str, Left], name: str
) -> None:
    fault, said = ENDS[name]
    [launch], [text] = launched[name].launches, launched[name].texts
    assert launch.code == 1
    assert not launch.left_over
    causes = re.findall(r"=== root cause: rank (\d) \(\S+ process \d+\) (.*) ===", text)
    [(rank, how)] = causes
    assert int(rank) == fault.rank
    # torchrun may have asked how the process ended before the other rank looked.
    known = said if name == "exception" else (said, "ended without an error")
    assert how.startswith(known)
    assert "finished" not in text


@scenarios
def test_kills_that_let_nothing_be_done(launched: dict[str, Left]) -> None:
    """The launcher, which has restarts left, ends as well, and what stopped it is said."""
    left = launched["killed without progress"]
    [launch], [text] = left.launches, left.texts
    assert [step for _, step, *_ in left.curves[0]] == [1, 2, 3, 4, 5]
    assert [rank for _, rank, _ in left.kills] == [1, 0, 1, 0]
    assert launch.code != 0
    assert not launch.left_over
    assert "restarts end: 3 attempts in a row ended without a step beyond step 5" in text


@smokes
def test_a_node_less(launched: dict[str, Left]) -> None:
    """The other goes on alone, with the same batches: every sample once in an epoch."""
    left, whole = launched["shrunk"], launched["undisturbed"]
    stays, goes = left.launches
    assert (stays.code, goes.code) == (0, -9), left.texts
    assert "finished at step 8" in left.texts[0]
    together: dict[int, list[int]] = {}
    for curve in left.curves:
        for attempt, step, _, samples in curve:
            if attempt == 0 and step <= 4 or attempt > 0:
                together.setdefault(step, []).extend(samples)
    for step in STEPS:
        expected = [n for curve in whole.curves for n in last_of(curve)[step][1]]
        assert sorted(together[step]) == sorted(expected)
    for epoch in (STEPS[:4], STEPS[4:]):
        assert sorted(n for step in epoch for n in together[step]) == list(range(32))
    assert re.search(r"1 process connected over gloo, attempt \d", left.texts[0])
