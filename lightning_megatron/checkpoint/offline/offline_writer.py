"""The writer of a checkpoint whose tensors do not fit into memory together.

One process acts as several ranks, one after the other. Each file is planned from shapes alone; then
its tensors are loaded, written and freed. The result is the same as if that many ranks had saved,
and any number of ranks reads it in parallel.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.commit import Staging
from lightning_megatron.checkpoint.directory.manifest import Manifest, is_checkpoint
from lightning_megatron.checkpoint.save.dcp_writer import offer, write_shards
from lightning_megatron.checkpoint.save.save_plan import (
    PartReport,
    PlannedSave,
    all_chunks,
    report_part,
)
from lightning_megatron.checkpoint.save.write_assignment import plan_in_turn
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.checkpoint.trainer_state.state_files import join_states, rank_state


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """Tensors of one file."""

    planned: Mapping[str, Chunk]
    """Chunks of the model by name, on the meta device."""
    load: Callable[[], Mapping[str, Chunk]]
    """Function that returns the same chunks with values; called once."""


def write_in_parts(
    target: Path, parts: Sequence[FileContent], state: Mapping[str, Any]
) -> Manifest:
    """Write a checkpoint of a model, file by file, in this process alone.

    Args:
        target: the directory to make; an existing one is replaced once the new one is complete.
        parts: the files, with all tensors of the model.
        state: Lightning's checkpoint dictionary without model and optimizers.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file cannot be written; the target is unchanged.
    """
    plans = plan_in_turn([offer(all_chunks(part.planned, ())) for part in parts])
    everything = {name: chunk for part in parts for name, chunk in part.planned.items()}
    state_files = join_states(state, [rank_state(everything, ())])
    token = Staging.new_token()
    staging = Staging(target, token)
    size = sum(plan.size for plan in plans)
    try:
        staging.create()
        reports: list[PartReport] = []
        for plan, part in zip(plans, parts, strict=True):
            done = write_shards(staging.directory, plan, all_chunks(part.load(), ()))
            assert done is not None
            reports.append(report_part("", plan, done).write(staging))
        planned = PlannedSave(
            target=target,
            token=token,
            plan=plans[0],
            state_files=state_files,
            unchanged=False,
            summary=Manifest(step=state.get("global_step"), epoch=state.get("epoch")),
        )
        return planned.finish(staging, reports)
    except OSError as error:
        raise write_error(error, staging.directory, size) from error
    finally:
        staging.discard()


Item = TypeVar("Item")


def groups(items: Iterable[tuple[Item, int]], most: int) -> Iterator[list[Item]]:
    """Yield groups of neighbours with at most ``most`` bytes; a larger item is a group.

    Args:
        items: items with their sizes in bytes.
        most: largest number of bytes of a group.

    >>> list(groups([("a", 2), ("b", 1), ("c", 5), ("d", 1)], 3))
    [['a', 'b'], ['c'], ['d']]
    """
    group: list[Item] = []
    size = 0
    for item, own in items:
        if group and size + own > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += own
    yield group


def target_problems(target: Path, overwrite: bool) -> list[str]:
    """Return faults of ``target`` as the path of a new checkpoint."""
    if not os.path.lexists(target):
        return []
    if not overwrite:
        return [f"{target} exists; nearest valid: another path, or overwrite=True"]
    if not is_checkpoint(target):
        return [
            f"{target} exists and is no checkpoint: it is not overwritten; nearest valid: "
            "another path"
        ]
    return []
