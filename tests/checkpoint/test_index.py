import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_megatron.checkpoint.digest import read_entry
from lightning_megatron.checkpoint.index import (
    check_metadata,
    coverage_fault,
    index_of,
    read_metadata,
    tensor_entries,
)
from lightning_megatron.checkpoint.manifest import Manifest, TensorEntry
from lightning_megatron.checkpoint.peers import Peers
from lightning_megatron.checkpoint.shards import write_chunks
from lightning_megatron.checkpoint.state import Chunk, whole
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError


def boxes(*pairs):
    return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in pairs]


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
    found = coverage_fault(size, chunks)
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


def test_manifest_carries_the_same_index(index):
    metadata, files = index
    manifest = Manifest(files=files, tensors=tensor_entries(metadata))
    rebuilt = index_of(None, Manifest.from_json(manifest.to_json()))
    assert rebuilt.state_dict_metadata == metadata.state_dict_metadata
    assert rebuilt.storage_data == metadata.storage_data


def test_unknown_dtype_is_refused():
    entry = TensorEntry(dtype="load", shape=(), chunks=())
    with pytest.raises(DamagedCheckpointError, match="a: there is no dtype 'load'"):
        index_of(None, Manifest(tensors={"a": entry}))


@pytest.fixture
def index(tmp_path):
    chunks = {"a": whole(torch.arange(6.0).reshape(2, 3)), "b": whole(torch.tensor(1))}
    write_chunks(tmp_path, chunks, Peers(alone=True))
    files = {f.name: read_entry(f) for f in tmp_path.iterdir()}
    return read_metadata(tmp_path), files


def test_good_index_is_accepted(index):
    check_metadata(*index)


def _info(metadata):
    return next(iter(metadata.storage_data.values()))


def _last(metadata):
    return max(metadata.storage_data.values(), key=lambda info: info.offset)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.state_dict_metadata["a"].chunks.clear(), "a: only 0 of 6"),
        (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([10**12])), "a: chunk"),
        (lambda m: m.state_dict_metadata.update(c="x"), "c: not a tensor"),
        (lambda m: setattr(m.state_dict_metadata["a"], "chunks", [1]), "a: damaged"),
        (lambda m: m.storage_data.clear(), "in no file"),
        (lambda m: setattr(_info(m), "relative_path", "../x"), "not in the manifest"),
        (lambda m: setattr(_info(m), "relative_path", "/etc/passwd"), "not in the manifest"),
        (lambda m: setattr(_info(m), "length", 3), "exceeds file"),
        (lambda m: setattr(_info(m), "offset", 10**6), "exceeds file"),
        (lambda m: setattr(_info(m), "offset", -1), "exceeds file"),
        (lambda m: setattr(_last(m), "offset", 5), "two chunks claim the same bytes"),
    ],
)
def test_damaged_index_is_refused(index, damage, message):
    metadata, files = index
    damage(metadata)
    with pytest.raises(CheckpointError, match=message):
        check_metadata(metadata, files)


def test_absurd_shape_that_the_chunks_claim_to_cover_is_refused(index):
    metadata, files = index
    entry = metadata.state_dict_metadata["a"]
    entry.size = torch.Size([10**7, 10**5])
    entry.chunks[0].sizes = entry.size
    with pytest.raises(CheckpointError, match="a: the chunk at .* exceeds file"):
        check_metadata(metadata, files)


def test_state_with_a_hole_is_not_written(tmp_path):
    part = Chunk(tensor=torch.zeros(2, 2), full_shape=(4, 2), offsets=(0, 0))
    with pytest.raises(CheckpointError, match=r"a: only 4 of 8"):
        write_chunks(tmp_path, {"a": part}, Peers(alone=True))
