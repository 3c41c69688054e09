"""Checkpoints whose author is an enemy: hashes and seals are right, the content is not."""

import json
import os
import pickle
import resource
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint.export import load_full_state_dict
from lightning_megatron.checkpoint.io import load_directory
from lightning_megatron.checkpoint.manifest import FileEntry, read_manifest
from lightning_megatron.errors import CheckpointError, ConfigError

from .damage import filled, forge, rewrite_manifest, save, value_of, without_hashes

LARGE = 10**12


class Gadget:
    """Makes a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step.ckpt"
    save(path)
    return path


def gadget(path):
    return pickle.dumps(Gadget(path.parent / "executed"))


def change_tensor(path, **changes):
    tensors = dict(read_manifest(path).tensors)
    tensors["model.0.weight"] = replace(tensors["model.0.weight"], **changes)
    rewrite_manifest(path, tensors=tensors)


def change_chunk(path, **changes):
    (chunk,) = read_manifest(path).tensors["model.0.weight"].chunks
    change_tensor(path, chunks=(replace(chunk, **changes),))


def old_metadata(path):
    without_hashes(path)
    (path / ".metadata").write_bytes(gadget(path))
    rewrite_manifest(path, files=sizes(path))


def sizes(path):
    return {n: FileEntry(size=(path / n).stat().st_size) for n in read_manifest(path).files}


def pickled_shard(path):
    """A gadget in place of the archive of a tensor, where the index says it is."""
    (chunk,) = read_manifest(path).tensors["model.0.weight"].chunks
    content = bytearray((path / chunk.file).read_bytes())
    code = gadget(path)
    content[chunk.begin : chunk.begin + len(code)] = code
    forge(path, chunk.file, bytes(content))


def torch_saved_shard(path):
    evil = path.parent / "evil"
    torch.save(Gadget(path.parent / "executed"), evil)
    code, shard = evil.read_bytes(), (path / "__0_0.distcp").read_bytes()
    forge(path, "__0_0.distcp", shard + code)
    change_chunk(path, begin=len(shard), length=len(code))


def state(path, change):
    data = json.loads((path / "state.json").read_text())
    change(data)
    forge(path, "state.json", json.dumps(data).encode())


def add_file(path, name, entry):
    rewrite_manifest(path, files={**read_manifest(path).files, name: entry})


MALICE = {
    "pickle in the index of an old one": (old_metadata, "refusing to load"),
    "pickle for the state": (lambda p: forge(p, "state.json", gadget(p)), "state"),
    "pickle for the state's tensors": (
        lambda p: forge(p, "state.safetensors", gadget(p)),
        "the state cannot be read",
    ),
    "pickle for a shard": (pickled_shard, "not the archive of a tensor"),
    "torch.save for a shard": (torch_saved_shard, "not the archive of a tensor"),
    "pickle for the manifest": (
        lambda p: (p / "manifest.json").write_bytes(gadget(p)),
        "manifest",
    ),
    "class of somewhere else": (
        lambda p: state(
            p, lambda d: d["state"].update(x={"$type": "config", "value": ["os:x", {}]})
        ),
        "not a class of this package",
    ),
    "unknown tag": (
        lambda p: state(p, lambda d: d["state"].update(x={"$type": "eval", "value": "1"})),
        "unknown type tag",
    ),
    "file above": (
        lambda p: add_file(p, "../executed", FileEntry(size=0, sha256="0" * 64)),
        "not a manifest",
    ),
    "file elsewhere": (
        lambda p: add_file(p, "/etc/passwd", FileEntry(size=0, sha256="0" * 64)),
        "not a manifest",
    ),
    "chunk above": (lambda p: change_chunk(p, file="../other"), "not in the manifest"),
    "link out": (
        lambda p: ((p / "state.json").unlink(), (p / "state.json").symlink_to("/etc/passwd")),
        "a link out of the checkpoint",
    ),
    "absurd shape": (lambda p: change_tensor(p, shape=(LARGE, LARGE)), "exceeds|elements"),
    "absurd shape that is covered": (
        lambda p: (
            change_tensor(p, shape=(LARGE, 3)),
            change_chunk(p, sizes=(LARGE, 3)),
        ),
        "exceeds file",
    ),
    "lie about a size": (
        lambda p: add_file(p, "__0_0.distcp", FileEntry(size=LARGE, sha256="0" * 64)),
        f"not the {LARGE}",
    ),
    "sparse state": (
        lambda p: (os.truncate(p / "state.json", LARGE), rewrite_manifest(p, files=sparse(p))),
        "are not read",
    ),
    "one place for two": (
        lambda p: change_chunk(p, begin=read_place(p, "model.0.bias")),
        "exceeds file|the same bytes",
    ),
    "deep nesting": (lambda p: forge(p, "state.json", b"[" * 10**6), "state cannot be read"),
}


def sparse(path):
    """No hash, as that would take an hour; the manifest of an old one needs none."""
    without_hashes(path)
    return sizes(path)


def read_place(path, name):
    return read_manifest(path).tensors[name].chunks[0].begin


@pytest.mark.parametrize("kind", MALICE)
def test_nothing_is_executed_allocated_or_loaded(path, kind):
    attack, message = MALICE[kind]
    attack(path)
    module = filled(-1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in (lambda: load_directory(path, module), lambda: load_full_state_dict(path)):
        with pytest.raises((CheckpointError, ConfigError), match=message) as info:
            load()
        assert "step.ckpt" in str(info.value)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000  # KiB
    assert not (path.parent / "executed").exists()
    assert isinstance(module, nn.Module)
    if "shard" not in kind:  # values are read in place, tensor by tensor
        assert value_of(module) == -1.0
