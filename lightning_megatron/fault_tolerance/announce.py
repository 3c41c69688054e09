"""Telling a person about a fault: one block on stderr.

Ranks fail together, and their output shares one terminal or one file. A block therefore goes out by
a single write, which the system does not interleave with those of other processes, and each of its
lines names the rank. Nothing here waits for another rank: after a fault no collective can be
relied on.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def announce(title: str, lines: Iterable[str] = (), *, rank: int | None = None) -> str:
    """Write a block to stderr; never raises for want of a stderr.

    Args:
        title: what has happened, in one line.
        lines: the facts; lines within them are lines of the block.
        rank: who says it; None for this process's rank, if it has one.

    Returns:
        The block.
    """
    if rank is None:
        rank = _own_rank()
    prefix = "" if rank is None else f"[rank {rank}] "
    inner = [part for line in lines for part in line.splitlines()]
    rows = [f"=== {title} ===", *(f"  {row}" for row in inner)]
    block = "".join(f"{prefix}{row}\n" for row in rows)
    with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        _write(block)
    return block


def _own_rank() -> int | None:
    # Looked up, not imported: a process without torch has things to say, too.
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return int(dist.get_rank())


def _write(block: str) -> None:
    stream = sys.stderr
    stream.flush()
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by an object in memory
        stream.write(block)
        stream.flush()
        return
    data = block.encode(errors="backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]
