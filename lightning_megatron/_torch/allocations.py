"""The history of allocations on GPUs."""

import torch


def record_allocations(on: bool) -> None:
    """Keep, or no longer keep, the history of allocations on GPUs (documented, 2.11-2.13)."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_allocations(path: str) -> None:
    """Write the kept history to a file, for torch's memory viewer (documented, 2.11-2.13)."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
