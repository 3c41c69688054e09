"""Checkpoints whose author is an enemy: hashes and seals are right, the content is not."""

import base64
import io
import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint.collective_io import load_directory
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.offline.export import (
    export_safetensors,
    load_from_checkpoint,
    load_full_state_dict,
)
from lightning_megatron.cli import main
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.checkpoint.damage import (
    change_chunk,
    filled,
    forge,
    place_of,
    rewrite_manifest,
    save,
    value_of,
)
from tests.strategy.small import loader, make_trainer

WEIGHT = "model.0.weight"

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


def pickled_shard(path):
    """A gadget in place of the archive of a tensor, where the index says it is."""
    chunk = place_of(path, WEIGHT)
    content = bytearray((path / chunk.file).read_bytes())
    code = gadget(path)
    content[chunk.begin : chunk.begin + len(code)] = code
    forge(path, chunk.file, bytes(content))


def torch_saved_shard(path):
    evil = path.parent / "evil"
    torch.save(Gadget(path.parent / "executed"), evil)
    code, shard = evil.read_bytes(), (path / "__0_0.distcp").read_bytes()
    forge(path, "__0_0.distcp", shard + code)
    change_chunk(path, WEIGHT, begin=len(shard), length=len(code))


def state(path, change):
    data = json.loads((path / "state.json").read_text())
    change(data)
    forge(path, "state.json", json.dumps(data).encode())


def add_file(path, name, entry):
    rewrite_manifest(path, files={**read_manifest(path).files, name: entry})


def safetensors_file(shape, length, begin=0):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + length]}
    header = json.dumps({"callbacks.best": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(length)


def zip_bomb(path):
    """The archive that the index names, deflated: a small file for a gigabyte."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(1 << 26))
    shard = (path / "__0_0.distcp").read_bytes()
    forge(path, "__0_0.distcp", shard + stream.getvalue())
    change_chunk(path, WEIGHT, begin=len(shard), length=len(stream.getvalue()))


MALICE = {
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
    "chunk above": (lambda p: change_chunk(p, WEIGHT, file="../other"), "not part of a manifest"),
    "link out": (
        lambda p: ((p / "state.json").unlink(), (p / "state.json").symlink_to("/etc/passwd")),
        "a link out of the checkpoint",
    ),
    "absurd shape": (lambda p: change_tensor(p, shape=(LARGE, LARGE)), "exceeds|elements"),
    "lie about a size": (
        lambda p: add_file(p, "__0_0.distcp", FileEntry(size=LARGE, sha256="0" * 64)),
        f"not the {LARGE}",
    ),
    "pickle for an index that is not read": (lambda p: forge(p, ".metadata", gadget(p)), None),
    "pickle for hyper-parameters": (
        lambda p: state(
            p,
            lambda d: d["state"].update(
                hyper_parameters={"$type": "pickle", "value": base64.b64encode(gadget(p)).decode()}
            ),
        ),
        "unknown type tag",
    ),
    "numpy array of objects": (
        lambda p: state(
            p,
            lambda d: d["state"].update(
                x={"$type": "numpy scalar", "value": ["|O", base64.b64encode(bytes(8)).decode()]}
            ),
        ),
        "array dtype",
    ),
    "class that is no configuration": (
        lambda p: state(
            p,
            lambda d: d["state"].update(
                x={"$type": "config", "value": ["lightning_megatron.testing.pool:WorkerPool", {}]}
            ),
        ),
        "not a frozen dataclass",
    ),
    "header of a terabyte": (
        lambda p: forge(p, "state.safetensors", struct.pack("<Q", LARGE) + b"{}"),
        "state cannot be read",
    ),
    "header with a shape of a terabyte": (
        lambda p: forge(p, "state.safetensors", safetensors_file([LARGE], 4)),
        "state cannot be read",
    ),
    "header with numbers outside": (
        lambda p: forge(p, "state.safetensors", safetensors_file([1], 4, begin=LARGE)),
        "state cannot be read",
    ),
    "bomb for a shard": (zip_bomb, "is compressed"),
    "deep nesting": (lambda p: forge(p, "state.json", b"[" * 10**6), "state cannot be read"),
}


LIMIT_KB = 50_000


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("kind", MALICE)
def test_nothing_is_executed_allocated_or_loaded(path, kind):
    attack, message = MALICE[kind]
    attack(path)
    module = filled(-1.0)
    before = peak()
    for load in (lambda: load_directory(path, module), lambda: load_full_state_dict(path)):
        if message is None:
            load()
            continue
        with pytest.raises((CheckpointError, ConfigError), match=message) as info:
            load()
        assert "step.ckpt" in str(info.value)
    assert peak() - before < LIMIT_KB
    assert not (path.parent / "executed").exists()
    # Values are read in place, tensor by tensor.
    if "shard" not in kind and message is not None:
        assert value_of(module) == -1.0


class Net(pl.LightningModule):
    """The module that `save` has saved."""

    def __init__(self):
        super().__init__()
        for name, layer in filled(-1.0).named_children():
            self.add_module(name, layer)

    def training_step(self, batch, batch_idx):
        return sum(parameter.sum() for parameter in self.parameters())

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(path, function, ckpt_path):
    options = {"max_steps": 1, "enable_checkpointing": True, "default_root_dir": path.parent}
    options["callbacks"] = [ModelCheckpoint(dirpath=path.parent, every_n_epochs=9, save_last=False)]
    trainer = make_trainer({}, precision="32-true", **options)
    getattr(trainer, function)(Net(), loader(), ckpt_path=ckpt_path)


ENTRIES = {
    "fit": lambda p: run(p, "fit", str(p)),
    "test": lambda p: run(p, "test", str(p)),
    "load_from_checkpoint": lambda p: load_from_checkpoint(Net, p),
    "export_safetensors": lambda p: export_safetensors(p, p.parent / "out.safetensors"),
    "convert": lambda p: fail_if_2(["convert", str(p), str(p.parent / "out.ckpt")]),
    "ls": lambda p: main(["ckpt", "ls", str(p.parent)]),
    "show": lambda p: fail_if_2(["ckpt", "show", str(p)]),
    "verify": lambda p: fail_if_2(["ckpt", "verify", str(p)]),
    "auto": lambda p: run(p, "fit", "auto"),  # the last, as it renames
}
MAY_PASS = {
    "ls": set(MALICE),
    "show": set(MALICE),
    # They have the right hashes, and verifying reads neither tensors nor state.
    "verify": set(MALICE),
}


def fail_if_2(arguments):
    if main(arguments):
        raise CheckpointError("refused")


def enter_job(path, share):
    """For each attack one of so many ways in, in turn; returns what went through."""
    passed = []
    for number, (kind, (attack, message)) in enumerate(MALICE.items()):
        save(path)
        attack(path)
        before = peak()
        for name, enter in [*ENTRIES.items()][number % share :: share]:
            if message is None and name in ("fit", "test", "auto"):
                continue  # it is a good one, but not a Trainer's
            try:
                enter(path)
            except (CheckpointError, ConfigError):
                continue
            if message is not None and kind not in MAY_PASS.get(name, ()):
                passed.append((kind, name))
        assert peak() - before < LIMIT_KB, kind
        assert not (path.parent / "executed").exists(), kind
        for left in path.parent.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return passed


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_way_in_executes_or_loads_anything(pool, path, share):
    assert pool.run(1, enter_job, path, share) == [[]]
