"""How a rank whose exception is an echo finds out who failed first."""

import random
import time
from collections.abc import Callable, Iterator, Mapping

from lightning_megatron.fault_tolerance.failures.board import Ending, EndingBoard

SEARCH_S = 2.0
"""How long to look for a cause; longer than any machine takes to answer."""
VERDICT_S = 3.0
"""How much longer, where one rank finds out who is silent, the others wait for it."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8
"""Between two looks: at first, and at last."""


def find_cause(
    board: EndingBoard, error: str, codes: Callable[[], Mapping[int, int]] = dict
) -> tuple[list[Ending], bool]:
    """Look for the cause of an echo, which is posted.

    Args:
        board: of this rank.
        error: what this rank was told.
        codes: gives how those ended that this process started.

    Returns:
        Causes, the first one first, and whether it is this rank that tells the user.
    """
    board.post("echo")
    causes = _search(board, codes, SEARCH_S)
    first = board.is_first_to_tell()
    if not causes and len(board.machines) > 1:
        causes = board.accuse_the_silent(error) if first else _search(board, codes, VERDICT_S)
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
    """Moments to ask the store, less and less often, and not those of thousands of other ranks."""
    own = random.Random()
    deadline, pause = time.monotonic() + seconds, _PAUSE_S
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause * own.uniform(0.7, 1.3), left))
        pause = min(1.6 * pause, _LONGEST_PAUSE_S)
