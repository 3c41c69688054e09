"""Whole training runs that take turns step by step, in the same processes.

Each run has a thread of its own and reads its batches from a `Turn`, which hands one out when it is
the run's turn and notes how long the run took to ask for the next: a whole iteration of its loop.
One run is under way at any time; all processes follow the same order.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset
from typing_extensions import override

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Turn(IterableDataset[Any]):
    """The batches of one run.

    Args:
        batch: which it gets every time.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._go, self._asked = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self.seconds: dict[str, list[float]] = {name: [] for name in CLOCKS}

    @override
    def __iter__(self) -> Iterator[Any]:
        while True:
            self._asked.release()
            self._go.acquire()
            if self._ended:
                return
            yield self._batch

    def step(self) -> None:
        """Let the run take a step."""
        began = {name: clock() for name, clock in CLOCKS.items()}
        self._go.release()
        self._asked.acquire()
        for name, clock in CLOCKS.items():
            self.seconds[name].append(clock() - began[name])

    def begin(self, run: Callable[["Turn"], None]) -> threading.Thread:
        """Start a run; returns when it asks for its first batch."""

        def body() -> None:
            try:
                run(self)
            finally:
                self._asked.release()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._asked.acquire()
        return thread

    def end(self, thread: threading.Thread) -> None:
        """Let the run come to its end."""
        self._ended = True
        self._go.release()
        thread.join()


def runs_in_turns(
    runs: Mapping[str, Callable[[Turn], None]], batch: Any, rounds: int, warm_up: int = 5
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every step of every run, by clock; who begins a round, changes."""
    turns = {name: Turn(batch) for name in runs}
    threads = {name: turn.begin(runs[name]) for name, turn in turns.items()}
    names = list(turns)
    for number in range(rounds + warm_up):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turns[name].step()
    for name, turn in turns.items():
        turn.end(threads[name])
    return {
        name: {clock: values[warm_up:] for clock, values in turn.seconds.items()}
        for name, turn in turns.items()
    }
