"""Padding to multiples and buckets, truncation, and pieces of long samples."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron import ConfigError, Fragments, Pad


def sample(length: int, start: int = 0) -> dict[str, Any]:
    ids = torch.arange(start, start + length + 1)
    documents = torch.zeros(length, dtype=torch.int64)
    return {"tokens": ids[:-1], "labels": ids[1:], "documents": documents, "weight": 0.5}


def test_samples_are_padded_to_a_multiple_with_the_values_of_their_keys() -> None:
    batch = Pad(multiple=4, values={"tokens": 9}, token_mask=True)([sample(5), sample(2)])
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4, 9, 9, 9], [0, 1] + [9] * 6]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5] + [-100] * 3, [1, 2] + [-100] * 6]
    assert batch["documents"][1].tolist() == [0, 0] + [-1] * 6
    assert batch["lengths"].tolist() == batch["token_mask"].sum(1).tolist() == [5, 2]
    assert batch["token_mask"][1].tolist() == [True] * 2 + [False] * 6
    assert batch["weight"].tolist() == [0.5, 0.5]
    assert batch["tokens"].dtype == torch.int64


def test_long_samples_are_truncated_at_their_end() -> None:
    batch = Pad(max_length=3)([sample(5), sample(2)])
    assert batch["tokens"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [1, 2, -100]]
    assert batch["lengths"].tolist() == [3, 2]


def test_a_bucket_is_the_next_that_holds_the_batch() -> None:
    pad = pickle.loads(pickle.dumps(Pad(buckets=[16, 4, 8])))  # as workers get it
    assert [pad.padded_length(n) for n in (1, 4, 5, 16)] == [4, 4, 8, 16]
    assert pad([sample(5)])["tokens"].shape == (1, 8)
    with pytest.raises(ConfigError, match="17 tokens; nearest valid: one more bucket"):
        pad([sample(17)])
    assert Pad(buckets=[16], max_length=16)([sample(17)])["tokens"].shape == (1, 16)


def test_features_of_tokens_are_padded_along_the_sequence() -> None:
    batch = Pad()([{"frames": torch.ones(n, 3), "class": n} for n in (2, 4)])
    assert batch["frames"].shape == (2, 4, 3)
    assert batch["frames"][0].sum(1).tolist() == [3, 3, 0, 0]
    assert batch["class"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple": 0}, "multiple=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"buckets": []}, "buckets"),
        ({"buckets": [8, 10], "multiple": 4}, r"buckets\[1\]=10, multiple=4.*nearest valid: 12"),
        ({"buckets": [8], "max_length": 9}, "nearest valid: max_length=8"),
    ],
)
def test_padding_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pad(**options)


def test_samples_that_cannot_be_padded_are_told() -> None:
    with pytest.raises(ConfigError, match="type Tensor: must be a dict"):
        Pad()([torch.arange(3)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'documents' and without"):
        Pad()([sample(3), {"tokens": torch.arange(3)} | {"labels": torch.arange(3)}])


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    length=st.integers(1, 12),
    overlap=st.integers(0, 11),
)
def test_pieces_hold_each_label_once(lengths: list[int], length: int, overlap: int) -> None:
    samples = [sample(n, 100 * i) for i, n in enumerate(lengths)]
    if overlap >= length:
        with pytest.raises(ConfigError, match=f"nearest valid: overlap={length - 1}"):
            Fragments(samples, lengths, length=length, overlap=overlap)
        return
    pieces = Fragments(samples, lengths, length=length, overlap=overlap)
    assert [len(piece["tokens"]) for piece in pieces] == pieces.lengths.tolist()
    assert pieces.lengths.max() <= length
    labels = [y for piece in pieces for y in piece["labels"].tolist() if y != -100]
    assert labels == [y for one in samples for y in one["labels"].tolist()]
    assert samples[0]["labels"].min() >= 0  # the sample itself stays as it was
    for i in range(1, len(pieces)):
        (before, _, stop), (number, start, _) = pieces.place(i - 1), pieces.place(i)
        assert start == (stop - overlap if number == before else 0)


def test_pieces_of_other_lengths_than_given_are_refused() -> None:
    with pytest.raises(ConfigError, match="lengths of 1 samples for a dataset of 2"):
        Fragments([sample(3), sample(4)], [3], length=2)
    pieces = Fragments([sample(3), sample(4)], [3, 5], length=2)
    with pytest.raises(ConfigError, match=r"lengths\[1\]=5: the sample has 4 tokens"):
        pieces[3]
    with pytest.raises(IndexError):
        pieces[5]
