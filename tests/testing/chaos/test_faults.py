"""Faults are data: text in, text out, and the same fate for the same seed."""

import faulthandler
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.chaos.actions import ACTIONS, flip_bit
from lightning_megatron.testing.chaos.faults import (
    KINDS,
    Fault,
    FaultLog,
    RunPosition,
    parse_faults,
    read_injected,
)


def moment(**given: object) -> RunPosition:
    usual: dict[str, object] = {"rank": 0, "world_size": 4, "step": 0, "section": "forward"}
    return RunPosition(**{**usual, **given})  # type: ignore[arg-type]


def test_text_and_back() -> None:
    text = "kill:rank=1,step=5,section=backward; slow:rank=all,amount=20,steps=3 hang:times=every"
    faults = parse_faults(text)
    assert faults == [
        Fault(kind="kill", rank=1, step=5, section="backward"),
        Fault(kind="slow", rank="all", amount=20, steps=3),
        Fault(kind="hang", times=0),
    ]
    assert parse_faults(";".join(map(str, faults))) == faults
    for kind in KINDS:
        assert parse_faults(str(Fault(kind=kind))) == [Fault(kind=kind)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil:rank=1", "nearest valid: 'kill'"),
        ("kill:rnak=1", "nearest valid: rank="),
        ("kill:section=bakward", "nearest valid: 'backward'"),
        ("kill:rank=first", "rank='first': must be a number"),
        ("kill:steps=2", "steps=2"),
        ("nan_loss:section=data", "nearest valid: section='forward'"),
        ("kill:probability=0", "probability=0.0"),
        ("slow:steps=0", "steps=0"),
        ("kill:times=-1", "times=-1"),
    ],
)
def test_mistakes(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_faults(text)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_faults("kil; hang:section=datta,probability=2")
    assert len(raised.value.problems) == 3


def test_ranks() -> None:
    assert Fault(kind="kill", rank=-1).ranks(4) == (3,)
    assert Fault(kind="kill", rank="all").ranks(3) == (0, 1, 2)
    chosen = {Fault(kind="kill", seed=seed).ranks(4) for seed in range(50)}
    assert chosen == {(0,), (1,), (2,), (3,)}
    with pytest.raises(ConfigError, match="rank=3"):
        Fault(kind="kill", rank=4).ranks(4)


def test_when_it_is_due() -> None:
    fault = Fault(kind="kill", rank=2, step=3, section="data", at_s=10, attempt=1)
    due = moment(rank=2, step=3, section="data", elapsed_s=10, attempt=1, batches=5)
    assert fault.is_due(due)
    changes = {
        "rank": 1,
        "step": 2,
        "section": "forward",
        "elapsed_s": 9,
        "attempt": 0,
        "batches": 4,
    }
    for name, value in changes.items():
        assert not fault.is_due(moment(**{**vars(due), name: value}))
    assert fault.is_due(moment(**{**vars(due), "step": 4}))


def test_probability_follows_the_seed() -> None:
    def fate(seed: int, attempt: int = 0) -> list[bool]:
        fault = Fault(kind="kill", rank="all", probability=0.25, seed=seed)
        return [fault.is_due(moment(step=step, attempt=attempt)) for step in range(2000)]

    assert fate(1) == fate(1)
    assert fate(1) != fate(2)
    assert fate(1) != fate(1, attempt=1)  # a restart would meet the same end again, for ever
    assert 0.2 < sum(fate(3)) / 2000 < 0.3


def test_memory_outlives_its_process(tmp_path: Path) -> None:
    once, twice, always = (Fault(kind="kill", times=times) for times in (1, 2, 0))

    def claims() -> list[bool]:
        memory = FaultLog(tmp_path / "chaos", rank=0)
        faults = enumerate((once, twice, always))
        return [memory.claim(index, fault, moment(step=7)) for index, fault in faults]

    assert [claims() for _ in range(3)] == [[True] * 3, [False, True, True], [False, False, True]]
    assert FaultLog(tmp_path / "chaos", rank=1).claim(0, once, moment(rank=1))
    injected = read_injected(tmp_path / "chaos")
    assert [fault["rank"] for fault in injected] == [0] * 6 + [1]
    assert injected[0] | {"t": 0, "mono": 0, "pid": 0} == {
        **{"v": 1, "t": 0, "mono": 0, "pid": 0, "what": "kill", "fault": "kill", "rank": 0},
        **{"step": 7, "section": "forward", "attempt": 0},
    }
    FaultLog(tmp_path / "chaos", rank=0).forget()
    assert [fault["rank"] for fault in read_injected(tmp_path / "chaos")] == [1]
    assert claims() == [True] * 3


def test_start_is_that_of_the_first(tmp_path: Path) -> None:
    first = FaultLog(tmp_path, rank=0).started()
    assert abs(first - time.time()) < 60
    assert FaultLog(tmp_path, rank=1).started() == first
    assert [path.name for path in tmp_path.iterdir()] == ["started"]


ENDS = {
    "kill": -signal.SIGKILL,
    "segfault": -signal.SIGSEGV,
    "abort": -signal.SIGABRT,
    "exit:amount=7": 7,
    "exception": 1,
    "sigterm": -signal.SIGTERM,
}


def test_acts_are_real() -> None:
    """Forked, as every one of them ends its process."""
    children = {}
    for text in ENDS:
        [fault] = parse_faults(text)
        if (child := os.fork()) == 0:
            faulthandler.disable()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                ACTIONS[fault.kind](fault)
            except RuntimeError:
                os._exit(1)
            os._exit(0)
        children[text] = child
    ended = {
        text: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for text, child in children.items()
    }
    assert ended == ENDS


def test_waiting_acts() -> None:
    """Forked, as a shell takes notice when its own child stops."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(waits()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        found = json.loads(answer.read())
    os.waitpid(child, 0)
    assert found["hang"][0] >= 1
    assert found["gil"][0] >= 0.9
    assert found["stop"][0] >= 0.2
    assert found["slow"][0] >= 0.4
    # Another thread goes on while one sleeps, and does not while the lock is held.
    assert found["hang"][1] > 4 >= found["gil"][1]


def waits() -> dict[str, tuple[float, int]]:
    """By kind: seconds that it took, and how often another thread ran meanwhile."""
    ticks: list[float] = []

    def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            time.sleep(0.02)

    threading.Thread(target=tick, daemon=True).start()
    found = {}
    signal.signal(signal.SIGALRM, lambda *_: None)
    for kind, amount in (("hang", 1), ("gil", 1), ("stop", 0.4), ("slow", 400)):
        if kind == "gil":
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # which ends a sleep that does not mind it
        begun, before = time.monotonic(), len(ticks)
        ACTIONS[kind](Fault(kind=kind, amount=amount))
        found[kind] = time.monotonic() - begun, len(ticks) - before
    return found


def test_one_bit_flips() -> None:
    network = nn.Linear(3, 5)
    for draw in range(40):
        before = [p.detach().clone() for p in network.parameters()]
        said = flip_bit(network.parameters(), draw * 7919)
        changed = [
            (a.view(torch.int32) ^ b.view(torch.int32)).flatten()
            for a, b in zip(before, network.parameters(), strict=True)
        ]
        bits = torch.cat(changed)
        assert [bin(int(x) & 0xFFFFFFFF).count("1") for x in bits if x] == [1], said
    assert flip_bit([], 1).startswith("nothing")
