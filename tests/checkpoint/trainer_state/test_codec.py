import enum
import json
import logging
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, ReduceLROnPlateau

from lightning_megatron.checkpoint.trainer_state.codec import (
    Decoder,
    Encoder,
    pickling_problems,
)
from lightning_megatron.errors import CheckpointError
from lightning_megatron.topology.degrees import Degrees


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Foreign:
    x: int = 1


def round_trip(value):
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "root"), allow_nan=False)
    assert encoder.problems == []
    return Decoder(encoder.tensors).decode(json.loads(text))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**30),
        0.1,
        float("inf"),
        "text",
        [1, [2.5, None]],
        {"a": {"b": 1}},
        {1: "x", "1": "y", (2, 3): None},
        {"$type": "tensor", "value": "a trap"},
        (1, (2, "3")),
        {1, 2},
        frozenset({"a"}),
        b"\x00\xff",
        1 + 2j,
        range(2, 9, 3),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda", 1),
        datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=timezone.utc),
        date(2024, 2, 29),
        timedelta(days=-1, microseconds=7),
        Path("a/b"),
        Counter({"a": 2, 3: 1}),
        OrderedDict([("z", 1), ("a", 2)]),
        defaultdict(list, {"a": [1]}),
        Namespace(a=1, b=(2,)),
        Colour.RED,
        Level.HIGH,
        np.float32(0.1),
        np.int64(-3),
        Degrees(tp=2, pp=3),
    ],
    ids=repr,
)
def test_value_comes_back_with_its_type(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)


def test_nan_comes_back():
    assert np.isnan(round_trip(float("nan")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_come_back_bit_exact(dtype):
    tensor = torch.arange(6).reshape(2, 3).T.to(dtype)  # not contiguous
    result = round_trip({"a": [tensor, tensor[:0], torch.tensor(3.0)]})["a"]
    assert result[0].dtype == dtype
    assert torch.equal(result[0], tensor)
    assert result[1].shape == (0, 2)
    assert result[2].shape == ()


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array(1 + 2j)]
)
def test_arrays_come_back(array):
    result = round_trip(array)
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)


def test_encoded_tensor_is_a_copy():
    tensor = torch.zeros(2)
    encoder = Encoder()
    encoder.encode(tensor, "t")
    tensor += 1
    assert torch.equal(encoder.tensors["t"], torch.zeros(2))


def test_random_states_come_back():
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()}
    result = round_trip(state)
    assert torch.equal(result["torch"], state["torch"])
    np.random.set_state(result["numpy"])


def test_scheduler_states_come_back():
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedulers = [
        LambdaLR(optimizer, lambda step: 0.5),
        MultiStepLR(optimizer, [1, 1, 3]),
        ReduceLROnPlateau(optimizer),
    ]
    for scheduler in schedulers:
        assert round_trip(scheduler.state_dict()) == scheduler.state_dict()


def test_all_problems_are_named_with_their_place():
    encoder = Encoder()
    encoder.encode({"a": [lambda: 0], "b": {"c": iter([1]), "d": nn.Tanh()}, "e": 1}, "state")
    assert [p.split(":")[0] for p in encoder.problems] == ["state.a[0]"]
    assert list(encoder.objects) == ["state.b.c", "state.b.d"]


def test_enum_of_a_module_that_is_not_imported_gives_its_value(caplog):
    data = {"$type": "enum", "value": ["no.such.module:Colour", "RED", "red"]}
    with caplog.at_level(logging.WARNING):
        assert Decoder({}).decode(data) == "red"
    assert "no.such.module:Colour" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        {"$type": "config", "value": ["os:System", {}]},
        {"$type": "config", "value": ["lightning_megatron.__main__:Main", {}]},
        {
            "$type": "config",
            "value": ["lightning_megatron.checkpoint.trainer_state.codec:Encoder", {}],
        },
        {"$type": "config", "value": ["lightning_megatron.topology.degrees:Degrees", {"x": 1}]},
        {"$type": "torch.dtype", "value": "save"},
        {"$type": "tensor", "value": "missing"},
        {"$type": "ndarray", "value": ["|O", [1], "missing"]},
        {"$type": "numpy scalar", "value": ["|O8", "AAAAAAAAAAA="]},
        {"$type": "defaultdict", "value": ["eval", {}]},
        {"$type": "no such tag", "value": 1},
        {"$type": "tuple"},
        {"$type": ["tuple"], "value": 1},
    ],
    ids=str,
)
def test_data_that_no_encoder_wrote_is_refused(data):
    with pytest.raises(CheckpointError):
        Decoder({}).decode(data)


@pytest.mark.parametrize(
    ("key", "origin"),
    {
        "callbacks": "state_dict of the callback",
        "state_dict": "get_extra_state or state_dict of the module",
        "lr_schedulers": "the schedule's state_dict",
        "hyper_parameters": "save_hyperparameters",
        "MyData": "under the name of its class, state_dict of the data module",
        "answer": "on_save_checkpoint of the module or a callback",
    }.items(),
)
def test_what_no_pickle_holds_is_told_with_the_hook_that_gave_it(key, origin):
    [problem] = pickling_problems({"epoch": 1, key: {"one": lambda: 0}})
    assert problem.startswith(f"{key}.one: a builtins.function cannot be pickled")
    assert f"{origin}" in problem
    assert "nearest valid" in problem
