"""Cutting batches."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.microbatch import (
    MicrobatchRule,
    batch_size_of,
    detach,
    split,
)

Pair = namedtuple("Pair", ["x", "y"])


@given(
    batch=st.integers(1, 40),
    number=st.none() | st.integers(1, 9),
    size=st.none() | st.integers(1, 9),
)
def test_pieces_are_the_batch_in_order(batch: int, number: int | None, size: int | None) -> None:
    rule = MicrobatchRule(size=size, number=None if size else number, default=3)
    x = torch.arange(batch * 2).view(batch, 2)
    pieces = split({"x": x, "y": x[:, 0]}, rule)
    assert len(pieces) == rule.count(batch) == len(pieces.weights)
    assert torch.equal(torch.cat([p["x"] for p in pieces.batches]), x)
    assert torch.equal(torch.cat([p["y"] for p in pieces.batches]), x[:, 0])
    sizes = [len(p["x"]) for p in pieces.batches]
    assert min(sizes) >= 1
    if size is None:
        assert max(sizes) - min(sizes) <= 1
    else:
        assert all(s == size for s in sizes[:-1])
    assert pieces.weights == pytest.approx([s / batch for s in sizes])


def test_structures_are_kept() -> None:
    batch = (Pair(torch.arange(4), [torch.ones(4, 2)]), {"a": {"b": torch.zeros(4)}})
    pieces = split(batch, MicrobatchRule(number=2))
    for piece in pieces.batches:
        assert isinstance(piece[0], Pair)
        assert piece[0].y[0].shape == (2, 2)
        assert piece[1]["a"]["b"].shape == (2,)


def test_columns_are_cut_and_scalars_copied() -> None:
    batch = {
        "x": torch.arange(3),
        "names": ["a", "b", "c"],
        "numbers": [1, 2.5, True],
        "other": ["only", "two"],
        "scale": 0.5,
        "epoch": torch.tensor(7),
        "none": None,
        "text": "abc",
    }
    first, second = split(batch, MicrobatchRule(number=2)).batches
    assert first["names"] == ["a", "b"]
    assert second["names"] == ["c"]
    assert first["numbers"] == [1, 2.5]
    for piece in (first, second):
        assert piece["other"] == ["only", "two"]
        assert (piece["scale"], piece["none"], piece["text"]) == (0.5, None, "abc")
        assert piece["epoch"].item() == 7


def test_a_single_piece_is_the_batch_itself() -> None:
    batch = {"x": torch.ones(4), "odd": object()}
    for rule in (MicrobatchRule(), MicrobatchRule(number=1), MicrobatchRule(size=4)):
        pieces = split(batch, rule)
        assert pieces.batches[0] is batch
        assert pieces.weights == (1.0,)


def test_a_batch_without_samples_is_given_to_every_microbatch() -> None:
    pieces = split({"seed": 3, "step": torch.tensor(2)}, MicrobatchRule(number=4))
    assert [piece["seed"] for piece in pieces.batches] == [3] * 4
    assert pieces.weights == (0.25,) * 4


def test_an_own_split_decides() -> None:
    def own(batch: Any, count: int) -> list[Any]:
        return [{"x": batch["x"][:1]}, {"x": batch["x"][1:]}][:count]

    pieces = split({"x": torch.arange(4), "odd": object()}, MicrobatchRule(number=2), own)
    assert [piece["x"].tolist() for piece in pieces.batches] == [[0], [1, 2, 3]]
    assert pieces.weights == (0.25, 0.75)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.ones(4), "y": torch.ones(3, 2)}, r"shape \(3, 2\) beside 4 samples"),
        ({"x": torch.ones(4), "y": object()}, "holds a object, which cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        split(batch, MicrobatchRule(number=2))
    assert "split_batch(batch, num_microbatches)" in str(caught.value)
    assert "num_microbatches=1" in str(caught.value)


def test_a_size_needs_samples() -> None:
    with pytest.raises(ConfigError, match="microbatch_size=2: the batch holds no tensor"):
        split({"x": 1}, MicrobatchRule(size=2))


def test_fewer_samples_than_microbatches() -> None:
    assert len(split(torch.ones(2, 3), MicrobatchRule(number=8))) == 2
    assert len(split(torch.ones(0, 3), MicrobatchRule(number=8))) == 1


@pytest.mark.parametrize(
    ("batch", "size"),
    [(torch.ones(3, 2), 3), ((torch.tensor(1.0), torch.ones(5)), 5), ({"a": "b"}, None)],
)
def test_batch_size(batch: Any, size: int | None) -> None:
    assert batch_size_of(batch) == size


def test_detach() -> None:
    x: Tensor = torch.ones(2, requires_grad=True) * 2
    found = detach({"x": x, "n": 1})
    assert not found["x"].requires_grad
    assert found["n"] == 1


def test_a_common_number_of_microbatches() -> None:
    rule, batch = MicrobatchRule(size=2), torch.arange(5.0)
    for at_least, sizes, repeated in ((1, [2, 2, 1], 0), (4, [2, 1, 1, 1], 0), (7, [1] * 7, 2)):
        pieces = split(batch, rule, at_least=at_least)
        assert [len(piece) for piece in pieces.batches] == sizes
        assert pieces.repeated == repeated
        assert sum(pieces.weights) == pytest.approx(1.0)
        counted = list(pieces.batches[: pieces.counted])
        torch.testing.assert_close(torch.cat(counted), batch, rtol=0, atol=0)
        assert all(weight == 0.0 for weight in pieces.weights[pieces.counted :])
    whole = split(batch, MicrobatchRule(number=1), at_least=2)
    assert (len(whole), whole.repeated) == (2, 0)
