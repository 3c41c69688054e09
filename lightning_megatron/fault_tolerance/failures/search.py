"""Search for the first failure, by a rank whose exception is an echo."""

import random
import time
from collections.abc import Callable, Iterator, Mapping

from lightning_megatron.fault_tolerance.failures.board import Ending, EndingBoard

SEARCH_S = 2.0
"""Seconds to search for a cause; longer than any machine takes to answer."""
VERDICT_S = 3.0
"""Further seconds in which the others wait for the rank that finds silent machines."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8
"""Seconds between two requests: at first, and at last."""


def find_cause(
    board: EndingBoard, error: str, codes: Callable[[], Mapping[int, int]] = dict
) -> tuple[list[Ending], bool]:
    """Post an echo and search for its cause.

    Args:
        board: board of this rank.
        error: message of this rank's exception.
        codes: returns exit codes of the processes that this one started, by rank.

    Returns:
        Causes, the first one first, and whether this rank is to report to the user.
    """
    board.post("echo")
    causes = _search(board, codes, SEARCH_S)
    first = board.is_first_to_report()
    if not causes and len(board.machines) > 1:
        causes = board.report_silent_machines(error) if first else _search(board, codes, VERDICT_S)
    return causes, first


def _search(
    board: EndingBoard, codes: Callable[[], Mapping[int, int]], seconds: float
) -> list[Ending]:
    """Causes, as soon as there are any."""
    for _ in looks(seconds):
        causes = board.causes(codes())
        if causes or board.is_gone:
            return causes
    return []


def looks(seconds: float) -> Iterator[None]:
    """Yield when to ask the store: less and less often, at random times of its own."""
    own = random.Random()
    deadline, pause = time.monotonic() + seconds, _PAUSE_S
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause * own.uniform(0.7, 1.3), left))
        pause = min(1.6 * pause, _LONGEST_PAUSE_S)
