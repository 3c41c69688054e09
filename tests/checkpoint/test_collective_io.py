import copy
import logging
import os
import re

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lightning_megatron.checkpoint.chunks import Chunk, model_chunks, parameter_names
from lightning_megatron.checkpoint.collective_io import load_directory, save_directory
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.optimizer_state import capture_optimizer
from lightning_megatron.errors import CheckpointError, ConfigError
from tests.checkpoint import parallel_jobs as jobs
from tests.checkpoint.damage import flip


def save(path, module, state=None, optimizers=()):
    chunks, names = model_chunks(module), parameter_names(module)
    snapshots = [capture_optimizer(o, names, chunks) for o in optimizers]
    return save_directory(path, chunks, state or {}, optimizers=snapshots)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.ckpt"


def test_lightning_state_comes_back(path):
    state = {
        "global_step": 7,
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}, "batches": {"total": 3}}},
        "callbacks": {"EarlyStopping{'monitor': 'x'}": {"best_score": torch.tensor(0.5)}},
        "lr_schedulers": [{"_last_lr": [0.1], "best": float("inf")}],
        "hyper_parameters": {"width": 3, "betas": (0.9, 0.95)},
        "hparams_type": dict,
    }
    manifest = save(path, nn.Linear(2, 2), state)
    assert (manifest.step, manifest.epoch, manifest.optimizers) == (7, 1, 0)
    assert read_manifest(path) == manifest
    loaded = load_directory(path, nn.Linear(2, 2))
    assert "hparams_type" not in loaded
    assert loaded == {k: v for k, v in state.items() if k != "hparams_type"}


def test_objects_are_left_out_with_a_warning_unless_they_are_trusted(path, caplog):
    hyper_parameters = {"activation": nn.GELU(), "nested": {"f": nn.Tanh, "x": [len]}, "width": 3}
    save(path, nn.Linear(1, 1), {"hyper_parameters": hyper_parameters})
    assert (path / "objects.pkl").exists()
    with caplog.at_level(logging.WARNING):
        found = load_directory(path, nn.Linear(1, 1))
    assert found == {"hyper_parameters": {"nested": {"x": [None]}, "width": 3}}
    assert "hyper_parameters.activation (torch.nn.modules.activation.GELU)" in caplog.text
    assert "weights_only=False" in caplog.text
    with torch.serialization.safe_globals([nn.Tanh]):
        found = load_directory(path, nn.Linear(1, 1))["hyper_parameters"]
    assert found["nested"]["f"] is nn.Tanh
    caplog.clear()
    trusting = CheckpointReader(path, weights_only=False)
    found = load_directory(trusting, nn.Linear(1, 1))["hyper_parameters"]
    assert isinstance(found["activation"], nn.GELU)
    assert found["nested"] == hyper_parameters["nested"]
    assert not caplog.records


def test_objects_that_no_pickle_holds_are_named_and_nothing_is_written(path):
    wrong = {"model": lambda: 0, "f": open(os.devnull)}  # noqa: SIM115
    with (
        wrong["f"],
        pytest.raises(ConfigError, match=r"callbacks\.Mine\.model: a builtins\.fun") as info,
    ):
        save(path, nn.Linear(1, 1), {"callbacks": {"Mine": wrong}})
    assert len(info.value.problems) == 2
    assert os.listdir(path.parent) == []


class Extra(nn.Module):
    def __init__(self, note="x"):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.note = note

    def get_extra_state(self):
        return {"note": self.note, "scale": torch.tensor([2.0])}

    def set_extra_state(self, state):
        self.note = state["note"] + str(state["scale"].item())


def test_extra_state_of_modules_comes_back(path):
    save(path, nn.Sequential(Extra("kept")))
    module = nn.Sequential(Extra())
    load_directory(path, module)
    assert module[0].note == "kept2.0"
    with pytest.raises(ConfigError, match="_extra_state"):
        load_directory(path, nn.Sequential(nn.Linear(1, 1)))


class Wrapped(nn.Module):
    """Named as torch.compile and the activation checkpoint wrapper name what they wrap."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = nn.Module()
        self._orig_mod._checkpoint_wrapped_module = module


def test_wrapped_and_plain_module_have_the_same_names(path):
    module = nn.Sequential(nn.Linear(2, 2))
    save(path, nn.Sequential(Wrapped(module[0])))
    assert load_full_state_dict(path).keys() == {"0.weight", "0.bias"}
    other = nn.Sequential(nn.Linear(2, 2))
    load_directory(path, other)
    assert torch.equal(other[0].weight, module[0].weight)


def test_module_that_does_not_fit_is_one_error_naming_all(path):
    save(path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    other = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(3, 2), nn.Linear(1, 1))
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(ConfigError) as info:
        load_directory(path, other)
    text = str(info.value)
    assert "parameter '0.weight': the checkpoint has shape (3, 2), the module (4, 2)" in text
    assert "2 names of the module are not in the checkpoint: 2.weight, 2.bias" in text
    assert "1 names of the checkpoint are not in the module: 0.bias" in text
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_not_strict_loads_what_both_have(path, caplog):
    source = nn.Sequential(nn.Linear(2, 3))
    save(path, source)
    target = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(1, 1))
    with caplog.at_level(logging.WARNING):
        load_directory(path, target, strict=False)
    assert torch.equal(target[0].weight, source[0].weight)
    assert "1.weight, 1.bias" in caplog.text
    assert "0.bias" in caplog.text


def test_module_on_meta_is_refused(path):
    save(path, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"'weight' has no memory"):
        load_directory(path, nn.Linear(2, 2, device="meta"))


def test_untied_module_takes_the_shared_value(path):
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    assert save(path, tied).aliases == {"1.weight": "0.weight"}
    untied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    load_directory(path, untied)
    assert torch.equal(untied[0].weight, tied[0].weight)
    assert torch.equal(untied[1].weight, tied[0].weight)


def test_tied_module_takes_equal_values_of_two_names_and_refuses_others(path):
    tied = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    untied = copy.deepcopy(tied)
    untied[1].weight = nn.Parameter(untied[0].weight.detach().clone())
    save(path, untied)
    load_directory(path, tied)
    with torch.no_grad():
        untied[1].weight += 1
    save(path, untied)
    with pytest.raises(ConfigError, match=r"names of the checkpoint are not in .*: 1\.weight"):
        load_directory(path, tied)


def test_buffers_and_dtypes_come_back(path):
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))
    module[0](torch.randn(4, 3))
    module.register_buffer("empty", torch.zeros(0, 3))
    save(path, module)
    other = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))
    other.register_buffer("empty", torch.zeros(0, 3))
    load_directory(path, other)
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_saving_again_replaces(path):
    for value in (1.0, 2.0):
        module = nn.Linear(1, 1)
        nn.init.constant_(module.weight, value)
        save(path, module, {"global_step": int(value)})
    assert load_full_state_dict(path)["weight"].item() == 2
    assert read_manifest(path).step == 2
    assert os.listdir(path.parent) == ["step.ckpt"]


def test_exception_in_the_middle_leaves_the_old_one(path, monkeypatch):
    save(path, nn.Linear(1, 1), {"global_step": 1})

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)  # in the midst of a shard file
        with pytest.raises(KeyboardInterrupt):
            save(path, nn.Linear(1, 1), {"global_step": 2})
    assert read_manifest(path).step == 1
    load_directory(path, nn.Linear(1, 1))
    assert os.listdir(path.parent) == ["step.ckpt"]


def test_index_holds_no_path_of_the_machine(path):
    save(path, nn.Linear(1, 1))
    assert os.fsencode(path.parent) not in (path / ".metadata").read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "__0_0.distcp").unlink(), r"__0_0.distcp is missing"),
        (lambda p: os.truncate(p / "__0_0.distcp", 100), r"__0_0.distcp has 100 bytes"),
        (lambda p: (p / "manifest.json").unlink(), "not finished"),
        (lambda p: (p / "manifest.json").write_text("{"), "not a manifest"),
        (lambda p: flip(p / "manifest.json", 99), "manifest"),
        (lambda p: (p / ".metadata").unlink(), r".metadata is missing"),
        (lambda p: _overwrite(p / "state.json"), "state.json: the content has SHA-256"),
        (lambda p: flip(p / "__0_0.distcp", 9999), "__0_0.distcp: the content has SHA-256"),
    ],
)
def test_damaged_checkpoint_is_one_clear_error_and_changes_nothing(path, damage, message):
    save(path, nn.Linear(2, 2))
    damage(path)
    module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=message) as info:
        load_directory(path, module)
    assert "step.ckpt" in str(info.value)


def _overwrite(file):
    file.write_bytes(b"\0" * file.stat().st_size)


def test_missing_checkpoint_is_named(path):
    assert not is_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"step\.ckpt: there is no such checkpoint"):
        load_directory(path, nn.Linear(1, 1))


def test_remote_path_is_a_config_error():
    with pytest.raises(ConfigError, match="s3://bucket"):
        save("s3://bucket/x.ckpt", nn.Linear(1, 1))


def test_checkpoint_without_optimizer_says_so(path):
    save(path, nn.Linear(1, 1))
    module = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="only weights, no optimizer state"):
        load_directory(path, module, [AdamW(module.parameters())])


def test_chunks_can_be_edited_before_saving(path):
    """As a module's on_save_checkpoint does, with checkpoint["state_dict"]."""
    chunks = model_chunks(nn.Linear(1, 1))
    assert all(isinstance(chunk, Chunk) for chunk in chunks.values())
    del chunks["bias"]
    chunks["average"] = torch.ones(1)
    save_directory(path, chunks, {})
    state = load_full_state_dict(path)
    assert state.keys() == {"weight", "average"}
    assert torch.equal(state["average"], torch.ones(1))


def test_stages_with_a_tied_weight_make_one_model(pool, path):
    first, last = pool.run(2, jobs.stages_job, path)
    model = jobs.BothStages()
    groups = [
        {"params": [model.embed.weight, model.layer.weight, model.norm.weight]},
        {"params": [model.layer.bias, model.norm.bias]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.7, momentum=0.1)
    load_directory(path, model, [optimizer])
    for name, value in {**first, **last}.items():
        assert torch.equal(model.get_parameter(name), value)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5]
    assert len(optimizer.state) == 5


def test_failure_of_one_rank_is_the_error_of_all_and_leaves_the_old_one(pool, path):
    seen = pool.run(2, jobs.failing_job, path)
    assert seen[0] == seen[1]
    full, rename, plain, shape, names = seen[0]
    room = r"\[Errno 28\] No space left on device \(\d+ bytes needed here, [\d,]+ free\)"
    assert re.search(f"rank 1: .*{room}", full)
    assert rename.startswith("CheckpointError: saving")
    assert re.search(f"rank 0: .*{room}", rename)
    assert "bad: a builtins.function cannot be pickled" in plain
    assert "the module (3, 2)" in shape
    assert "0.weight, 0.bias" in names
    assert read_manifest(path).step == 1
    assert os.listdir(path.parent) == ["step.ckpt"]
