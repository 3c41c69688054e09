"""One expert is read from a stack, without the others."""

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint import load_tensor
from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.load import tensor_archive
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.stack import Experts

MIB = 1 << 20


@pytest.fixture
def saved(tmp_path):
    module = nn.ModuleDict({"experts": Experts(8, 512, 512), "norm": nn.LayerNorm(3)})
    module.register_buffer("scale", torch.tensor(2.0))
    save_directory(tmp_path / "a.ckpt", model_chunks(module), {})
    return tmp_path / "a.ckpt", module


@pytest.fixture
def taken(monkeypatch):
    """Sizes of what is read of archives."""
    sizes = []
    whole = tensor_archive._Part.readinto

    def noted(part, buffer):
        sizes.append(whole(part, buffer))
        return sizes[-1]

    monkeypatch.setattr(tensor_archive._Part, "readinto", noted)
    return sizes


def test_an_expert_is_read_alone(saved, taken):
    path, module = saved
    up = module["experts"].up
    assert torch.equal(load_tensor(path, "experts.up", 5), up[5])
    assert MIB <= sum(taken) < 1.1 * MIB  # the stack has eight
    assert torch.equal(load_tensor(path, "experts.up", -1), up[7])
    assert torch.equal(load_tensor(path, "experts.down", slice(2, 4)), module["experts"].down[2:4])
    assert torch.equal(load_tensor(path, "experts.gate"), module["experts"].gate)
    assert load_tensor(path, "scale") == 2
    assert load_tensor(path, "norm.weight", 1).shape == ()


def test_a_kept_reader_reads_many(saved, taken):
    reader = CheckpointReader(saved[0], alone=True)
    found = torch.stack([reader.tensor("experts.up", e) for e in range(8)])
    assert torch.equal(found, saved[1]["experts"].up)
    assert sum(taken) < 8.5 * MIB


@pytest.mark.parametrize(
    ("name", "index", "words"),
    [
        ("experts.upp", None, r"has no such tensor; nearest valid: 'experts\.up'"),
        ("experts.up", 8, r"must lie in \[-8, 8\); nearest valid: index=7"),
        ("experts.up", -9, "nearest valid: index=-8"),
        ("experts.up", slice(0, 8, 2), "only steps of 1"),
        ("scale", 0, "a scalar has no dimension"),
    ],
)
def test_what_is_not_there_is_refused(saved, name, index, words):
    with pytest.raises(ConfigError, match=words):
        load_tensor(saved[0], name, index)
