import os
import pickle
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.directory.chunk_runs import Run, compress
from lightning_megatron.checkpoint.directory.coverage import (
    coverage_fault,
    overlapping,
    run_coverage_fault,
    tensor_faults,
)
from lightning_megatron.checkpoint.directory.dcp_metadata import manifest_of, read_metadata
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


class Gadget:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {}"),
        (eval, "open({!r}, 'w')"),
        (shutil.copy, os.__file__, "{}"),
        (torch.save, 1, "{}"),
        (getattr, 1, "real"),
    ],
    ids=lambda call: call[0].__name__,
)
def test_index_with_a_gadget_is_refused_and_not_executed(tmp_path, call):
    target = tmp_path / "executed"
    call = [a.format(str(target)) if isinstance(a, str) and "{" in a else a for a in call]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Gadget(*call)))
    with pytest.raises(CheckpointError, match="refusing to load"):
        read_metadata(tmp_path)
    assert not target.exists()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps({}), pickle.dumps(torch.Size([1]))]
)
def test_index_that_is_none_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="metadata"):
        read_metadata(tmp_path)


def test_index_that_numbers_objects_up_to_the_memory_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"Nr\xff\xff\xff\x7f.")  # would allocate 32 GB
    with pytest.raises(DamagedCheckpointError, match="numbers 1 objects up to 2147483647"):
        read_metadata(tmp_path)


def test_the_export_says_what_the_manifest_does(index):
    metadata, path = index
    ours, theirs = read_manifest(path), manifest_of(metadata, read_manifest(path).files)
    assert theirs.tensors == ours.tensors
    assert theirs.writers == ours.writers == [0]
    assert {n: tuple(c) for n, c in theirs.part(path, 0).items()} == ours.part(path, 0)


def test_unknown_dtype_is_refused(tmp_path):
    entry = TensorEntry(dtype="load", shape=(), runs=(Run(part=0, offsets=(), sizes=()),))
    assert tensor_faults({"a": entry}) == ["a: torch has no dtype 'load'"]
    save(tmp_path / "a.ckpt")
    tensors = read_manifest(tmp_path / "a.ckpt").tensors
    later = replace(tensors["model.0.bias"], dtype="float1")
    rewrite_manifest(tmp_path / "a.ckpt", tensors={**tensors, "model.0.bias": later})
    with pytest.raises(DamagedCheckpointError, match="model.0.bias: torch has no dtype 'float1'"):
        CheckpointReader(tmp_path / "a.ckpt", alone=True)


@pytest.fixture
def index(tmp_path):
    chunks = {"a": whole(torch.arange(6.0).reshape(2, 3)), "b": whole(torch.tensor(1))}
    save_directory(tmp_path / "a.ckpt", chunks, {})
    return read_metadata(tmp_path / "a.ckpt"), tmp_path / "a.ckpt"


def check_metadata(metadata, path):
    return manifest_of(metadata, read_manifest(path).files)


def test_good_index_is_accepted(index):
    assert check_metadata(*index).tensors.keys() == {"model.a", "model.b"}


def _info(metadata):
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.state_dict_metadata["model.a"].chunks.clear(), "model.a: only 0 of 6"),
        (
            lambda m: setattr(m.state_dict_metadata["model.a"], "size", torch.Size([10**12])),
            "model.a: only 6 of|model.a: chunk",
        ),
        (lambda m: m.state_dict_metadata.update(c="x"), "c: not a tensor"),
        (lambda m: setattr(m.state_dict_metadata["model.a"], "chunks", [1]), "model.a: damaged"),
        (lambda m: m.storage_data.clear(), "in no file"),
        (lambda m: setattr(_info(m), "relative_path", "../x"), "there is no file"),
        (lambda m: setattr(_info(m), "relative_path", "/etc/passwd"), "there is no file"),
        (lambda m: setattr(_info(m), "length", 3), "exceeds file"),
        (lambda m: setattr(_info(m), "offset", 10**6), "exceeds file"),
        (lambda m: setattr(_info(m), "offset", -1), "exceeds file"),
    ],
)
def test_damaged_index_is_refused(index, damage, message):
    metadata, path = index
    damage(metadata)
    with pytest.raises(CheckpointError, match=message):
        check_metadata(metadata, path)


def test_absurd_shape_that_the_chunks_claim_to_cover_is_refused(index):
    metadata, path = index
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = torch.Size([10**7, 10**5])
    entry.chunks[0].sizes = entry.size
    with pytest.raises(CheckpointError, match="model.a: the chunk at .* exceeds file"):
        check_metadata(metadata, path)


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
