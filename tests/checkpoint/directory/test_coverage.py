from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.directory.chunk_runs import Run, compress
from lightning_megatron.checkpoint.directory.coverage import (
    coverage_fault,
    overlapping,
    run_coverage_fault,
    tensor_faults,
)
from lightning_megatron.checkpoint.directory.manifest import TensorEntry, read_manifest
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.damage import rewrite_manifest, save


def boxes(*pairs):
    return list(pairs)


GRID = boxes(((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (1, 3)), ((2, 3), (1, 1)))


@pytest.mark.parametrize(
    ("size", "chunks", "fault"),
    [
        ((3, 4), GRID, None),
        ((), boxes(((), ())), None),
        ((0, 3), boxes(((0, 0), (0, 3))), None),
        ((3, 4), GRID[:3], "only 11 of 12"),
        ((3, 4), [], "only 0 of 12"),
        ((0, 4), [], "only 0 of 0"),
        ((3, 4), [*GRID, GRID[0]], "overlap"),
        ((4, 2), boxes(((0, 0), (2, 2)), ((1, 0), (2, 2))), "overlap"),
        ((2, 2), boxes(((0, 0), (2, 3))), "exceeds"),
        ((2, 2), boxes(((-1, 0), (2, 2))), "exceeds"),
        ((2, 2), boxes(((0,), (4,))), "exceeds"),
        ((), boxes(((), ()), ((), ())), "overlap"),
    ],
)
def test_coverage(size, chunks, fault):
    runs = [Run(part=0, offsets=offsets, sizes=sizes) for offsets, sizes in chunks]
    for found in (coverage_fault(size, chunks), run_coverage_fault(size, runs)):
        assert (found is None) if fault is None else (fault in found)


def test_unknown_dtype_is_refused(tmp_path):
    entry = TensorEntry(dtype="load", shape=(), runs=(Run(part=0, offsets=(), sizes=()),))
    assert tensor_faults({"a": entry}) == ["a: torch has no dtype 'load'"]
    save(tmp_path / "a.ckpt")
    tensors = read_manifest(tmp_path / "a.ckpt").tensors
    later = replace(tensors["model.0.bias"], dtype="float1")
    rewrite_manifest(tmp_path / "a.ckpt", tensors={**tensors, "model.0.bias": later})
    with pytest.raises(DamagedCheckpointError, match="model.0.bias: torch has no dtype 'float1'"):
        CheckpointReader(tmp_path / "a.ckpt", alone=True)


def test_state_with_a_hole_is_not_written(tmp_path):
    part = Chunk(tensor=torch.zeros(2, 2), full_shape=(4, 2), offsets=(0, 0))
    with pytest.raises(CheckpointError, match=r"a: only 4 of 8"):
        save_directory(tmp_path / "a.ckpt", {"a": part}, {})
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.tuples(*[st.integers(0, 12)] * 4),
)
def test_what_overlaps_is_found(rows, columns, wanted):
    cells = [
        (number, ((sum(rows[:i]), sum(columns[:j])), (rows[i], columns[j])))
        for number, (i, j) in enumerate(product(range(len(rows)), range(len(columns))))
    ]
    shape = sum(rows), sum(columns)
    begin = tuple(min(w, n - 1) for w, n in zip(wanted[:2], shape, strict=True))
    sizes = tuple(min(1 + w, n - b) for w, n, b in zip(wanted[2:], shape, begin, strict=True))
    entry = TensorEntry(dtype="float32", shape=shape, runs=compress(cells))
    assert run_coverage_fault(shape, entry.runs) is None
    found = overlapping(entry, (begin, sizes))
    assert sorted(found) == [
        (number, (o, s))
        for number, (o, s) in cells
        if all(o[d] < begin[d] + sizes[d] and begin[d] < o[d] + s[d] for d in (0, 1))
    ]
    if len(cells) > 1:
        lost = replace(entry, runs=compress(cells[:-1]))
        assert "elements are stored" in run_coverage_fault(shape, lost.runs)
