import torch
from torch import nn

from lightning_megatron.checkpoint.chunks import (
    chunks_of,
    model_chunks,
    parameter_names,
    whole,
)
from lightning_megatron.topology.tensor_shard import TensorShard
from tests.checkpoint import parallel_jobs as jobs


def test_slice_of_tensor_parallelism_has_its_offset():
    layer = jobs.Split(4, 6, dim=1)
    layer.weight = nn.Parameter(torch.zeros(6, 2))
    layer.tensor_shards = {"weight": TensorShard(full_shape=(6, 4), dim=1, offset=2)}
    chunks = model_chunks(nn.ModuleDict({"a": layer}))
    chunk = chunks["a.weight"]
    assert (chunk.full_shape, chunk.offsets, chunk.sizes) == ((6, 4), (0, 2), (6, 2))
    assert chunks["a.bias"].is_whole


def test_chunks_share_memory_and_need_no_gradient():
    module = nn.Linear(2, 2)
    chunk = model_chunks(module)["weight"]
    chunk.tensor.fill_(3)
    assert torch.equal(module.weight, torch.full((2, 2), 3.0))
    assert not chunk.tensor.requires_grad


def test_only_persistent_buffers_are_described_and_may_differ_on_replicas():
    module = nn.BatchNorm1d(2)
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    chunks = model_chunks(module)
    assert "cache" not in chunks
    assert not chunks["running_mean"].identical
    assert chunks["weight"].identical


def test_shared_parameter_has_its_first_name_and_aliases():
    module = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    module[2].weight = module[1].weight = module[0].weight
    chunks = model_chunks(module)
    assert list(chunks) == ["0.weight"]
    assert chunks["0.weight"].aliases == ("1.weight", "2.weight")
    assert list(parameter_names(module).values()) == ["0.weight"]


def test_shared_module_is_found_under_its_first_name():
    layer = jobs.Split(2, 2, dim=0)
    layer.tensor_shards = {"weight": TensorShard(full_shape=(4, 2), dim=0, offset=2)}
    chunks = model_chunks(nn.ModuleList([layer, layer]))
    assert chunks["0.weight"].offsets == (2, 0)
    assert chunks["0.weight"].aliases == ("1.weight",)


def test_name_of_another_stage_is_taken_from_the_caller():
    module = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False)})
    canonical = {"head.weight": "embed.weight"}
    chunks = model_chunks(module, canonical)
    assert list(chunks) == ["embed.weight"]
    assert chunks["embed.weight"].aliases == ("head.weight",)
    assert list(parameter_names(module, canonical).values()) == ["embed.weight"]


def test_overridden_state_dict_decides_what_is_described():
    class Part(nn.Linear):
        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {"weight": state["weight"], "note": "x"}

    chunks = model_chunks(Part(2, 2))
    assert chunks["note"] == "x"
    assert list(chunks_of(chunks)) == ["weight"]


def test_whole_tensor_starts_at_zero():
    chunk = whole(torch.zeros(2, 3))
    assert (chunk.offsets, chunk.full_shape, chunk.is_whole) == ((0, 0), (2, 3), True)
    assert whole(torch.tensor(1.0)).offsets == ()


def test_parameters_that_are_gathered_return_to_their_shards(pool):
    first, second = pool.run(2, jobs.gathered_parameters_job)
    assert first["0.weight"] == ((3, 2), (0, 0), (2, 2))
    assert second["0.weight"] == ((3, 2), (2, 0), (1, 2))
    assert second["1.weight"][2] == (0, 3)  # one row for two ranks: nothing here
