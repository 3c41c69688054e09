"""Arithmetic of the rectangles of a tensor: whether they tile it, and which overlap another.

torch.distributed.checkpoint loads a tensor with a hole and leaves there what was in memory. So that
every element is in one rectangle is checked before anything is written, and again before anything
is read.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.checkpoint.directory.chunk_runs import Rectangle, Run
from lightning_megatron.checkpoint.directory.manifest import TensorEntry
from lightning_megatron.errors import DamagedCheckpointError, summary

Numbers: TypeAlias = NDArray[np.int64]

_FEW = 8
"""Number of rectangles up to which they are checked one by one."""


def expand(runs: Sequence[Run], dimensions: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the rectangles of runs as arrays.

    Args:
        runs: runs of one tensor.
        dimensions: number of dimensions of the tensor.

    Returns:
        Parts (n), offsets (n x dimensions) and sizes (n x dimensions) of the n rectangles.
    """
    parts, offsets, sizes = [], [], []
    for run in runs:
        part = np.array([run.part], dtype=np.int64)
        offset = np.array(run.offsets, dtype=np.int64).reshape(1, dimensions)
        for repeat in run.repeats:
            times = np.arange(repeat.count, dtype=np.int64)
            steps = np.array(repeat.steps, dtype=np.int64)
            part = (times[:, None] * repeat.part_step + part).reshape(-1)
            offset = (times[:, None, None] * steps + offset).reshape(len(part), dimensions)
        parts.append(part)
        offsets.append(offset)
        size = np.array(run.sizes, dtype=np.int64).reshape(1, dimensions)
        sizes.append(np.broadcast_to(size, offset.shape))
    if not parts:
        nothing = np.empty((0, dimensions), dtype=np.int64)
        return np.empty(0, dtype=np.int64), nothing, nothing
    return np.concatenate(parts), np.concatenate(offsets), np.concatenate(sizes)


def overlapping(entry: TensorEntry, wanted: Rectangle) -> list[tuple[int, Rectangle]]:
    """Return the stored rectangles of a tensor that overlap ``wanted``, with their parts."""
    if len(entry.runs) == 1 and not entry.runs[0].repeats:
        run = entry.runs[0]  # of one piece, as most tensors of small layouts are
        return [(run.part, (run.offsets, run.sizes))]
    parts, offsets, sizes = expand(entry.runs, len(entry.shape))
    begin, length = (np.array(side, dtype=np.int64) for side in wanted)
    common = ((offsets < begin + length) & (begin < offsets + sizes)).all(axis=1)
    found = zip(*(a[common].tolist() for a in (parts, offsets, sizes)), strict=True)
    return [(part, (tuple(offset), tuple(size))) for part, offset, size in found]


def tensor_faults(tensors: Mapping[str, TensorEntry], rank: int = 0, size: int = 1) -> list[str]:
    """Return the tensors of an index that are not tiled or have no dtype, one sentence each.

    Args:
        tensors: all tensors.
        rank: rank of this process among those that share the check.
        size: number of these ranks.
    """
    found = []
    for name, entry in islice(tensors.items(), rank, None, size):
        if not isinstance(vars(torch).get(entry.dtype), torch.dtype):
            found.append(f"{name}: torch has no dtype {entry.dtype!r}")
        elif fault := run_coverage_fault(entry.shape, entry.runs):
            found.append(f"{name}: {fault}")
    return found


def raise_if_damaged(faults: Sequence[str]) -> None:
    """Raise an error if an index has faults.

    Raises:
        DamagedCheckpointError: the index has faults, which it names.
    """
    if faults:
        raise DamagedCheckpointError(f"the index of the shards is damaged: {summary(faults)}")


def coverage_fault(shape: Sequence[int], rectangles: Sequence[Rectangle]) -> str | None:
    """Return why rectangles do not tile a tensor of this shape; None if they do.

    Rectangles inside the tensor tile it exactly if their volumes add up and no two overlap; the
    latter is a sweep along the dimension with the most distinct offsets.
    """
    for offsets, sizes in rectangles:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            return f"chunk {tuple(offsets)}+{tuple(sizes)} exceeds {tuple(shape)}"
    volume = sum(math.prod(sizes) for _, sizes in rectangles)
    fault = _volume_fault(shape, volume, len(rectangles))
    return fault or (_overlap_fault(shape, volume) if _overlap(rectangles) else None)


def run_coverage_fault(shape: Sequence[int], runs: Sequence[Run]) -> str | None:
    """Return why the rectangles of runs do not tile a tensor; `coverage_fault` for many."""
    for run in runs:
        lengths = {len(run.offsets), len(run.sizes), *(len(r.steps) for r in run.repeats)}
        if lengths != {len(shape)}:
            return f"chunk {run.offsets}+{run.sizes} exceeds {tuple(shape)}"
    count = sum(run.count for run in runs)
    if count <= _FEW:
        return coverage_fault(shape, [(o, run.sizes) for run in runs for _, o in run.rectangles()])
    _, offsets, sizes = expand(runs, len(shape))
    outside = ((offsets < 0) | (offsets > np.array(shape, dtype=np.int64) - sizes)).any(axis=1)
    if outside.any():
        index = int(outside.argmax())
        first, extent = tuple(offsets[index].tolist()), tuple(sizes[index].tolist())
        return f"chunk {first}+{extent} exceeds {tuple(shape)}"
    volume = sum(run.count * math.prod(run.sizes) for run in runs)
    if (fault := _volume_fault(shape, volume, count)) is not None:
        return fault
    if _is_grid(shape, offsets, sizes):
        return None
    pairs = zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True)
    return _overlap_fault(shape, volume) if _overlap(list(pairs)) else None


def _volume_fault(shape: Sequence[int], volume: int, count: int) -> str | None:
    total = math.prod(shape)
    if volume < total or not count:
        return f"only {volume} of {total} elements are stored"
    return _overlap_fault(shape, volume) if volume > total else None


def _overlap_fault(shape: Sequence[int], volume: int) -> str:
    return f"chunks overlap: {volume} elements stored for {math.prod(shape)}"


def _is_grid(shape: Sequence[int], offsets: Numbers, sizes: Numbers) -> bool:
    """Return whether the rectangles are the cells of a grid over the whole tensor, each once."""
    cells = np.zeros(len(offsets), dtype=np.int64)
    number = 1
    for dim, length in enumerate(shape):
        cuts, places = np.unique(offsets[:, dim], return_inverse=True)
        if not np.array_equal(np.diff(cuts, append=length)[places], sizes[:, dim]):
            return False
        cells = cells * len(cuts) + places
        number *= len(cuts)
        if number > len(offsets):
            return False
    return number == len(offsets) and len(np.unique(cells)) == number


def _overlap(rectangles: Sequence[Rectangle]) -> bool:
    boxes = [box for box in rectangles if math.prod(box[1])]
    rank = len(boxes[0][0]) if boxes else 0
    if len(boxes) < 2 or not rank:
        return len(boxes) > 1
    sweep = max(range(rank), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    active: list[Rectangle] = []
    for box in sorted(boxes, key=lambda b: b[0][sweep]):
        active = [a for a in active if a[0][sweep] + a[1][sweep] > box[0][sweep]]
        if any(_intersect(a, box) for a in active):
            return True
        active.append(box)
    return False


def _intersect(a: Rectangle, b: Rectangle) -> bool:
    return all(
        a_begin < b_begin + b_size and b_begin < a_begin + a_size
        for a_begin, a_size, b_begin, b_size in zip(*a, *b, strict=True)
    )
