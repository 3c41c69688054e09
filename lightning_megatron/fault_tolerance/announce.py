"""Reports of faults on stderr, one block each.

Ranks fail together, and their output shares one terminal or one file. So a block is a single write,
which the system does not interleave with those of other processes, and each of its lines names the
rank. Nothing here waits for another rank, as collectives may hang after a fault.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def announce(title: str, lines: Iterable[str] = (), *, rank: int | None = None) -> str:
    """Write a block to stderr; a missing stderr raises no error.

    Args:
        title: the event in one line.
        lines: further facts; a newline begins a new line of the block.
        rank: rank that reports; None for this process's rank, if it has one.

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
    # Looked up, not imported: processes without torch report, too.
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
