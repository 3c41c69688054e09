"""Acts are real: processes end and wait as those do that meet such a fault."""

import faulthandler
import json
import os
import signal
import threading
import time

from tests.faults.acts import ACTS, Fault

ENDS = {
    "kill": -signal.SIGKILL,
    "segfault": -signal.SIGSEGV,
    "abort": -signal.SIGABRT,
    "exit": 7,
    "exception": 1,
    "sigterm": -signal.SIGTERM,
}


def test_ends() -> None:
    """Forked, as every one of them ends its process."""
    children = {}
    for kind in ENDS:
        if (child := os.fork()) == 0:
            faulthandler.disable()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                ACTS[kind](Fault(kind=kind, rank=0, amount=7))
            except RuntimeError:
                os._exit(1)
            os._exit(0)
        children[kind] = child
    ended = {
        kind: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for kind, child in children.items()
    }
    assert ended == ENDS


def test_waits() -> None:
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
        ACTS[kind](Fault(kind=kind, rank=0, amount=amount))
        found[kind] = time.monotonic() - begun, len(ticks) - before
    return found
