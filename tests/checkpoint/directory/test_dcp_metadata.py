import os
import pickle
import shutil

import pytest
import torch

from lightning_megatron.checkpoint.chunks import whole
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.directory.dcp_metadata import manifest_of, read_metadata
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError


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
