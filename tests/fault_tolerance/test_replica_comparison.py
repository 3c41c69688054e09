"""Fingerprints see every bit, and the majority is right."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.fault_tolerance.replica_comparison import (
    COLUMNS,
    Difference,
    SharedTensor,
    condense,
    differences,
    fingerprint,
    fingerprints,
    suspects,
    unequal,
)

TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@given(st.integers(1, 3 * COLUMNS), st.sampled_from(TYPES), st.integers(0, 2), st.data())
def test_every_flipped_bit_is_seen(
    size: int, dtype: torch.dtype, offset: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = torch.randn(size + offset, generator=generator).abs()
    whole = (whole > 1) if dtype == torch.bool else whole.to(dtype)
    tensor = whole[offset:]
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    place = data.draw(st.integers(0, bits(tensor.clone()).numel() - 1))
    flipped = tensor.clone()
    bits(flipped)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(flipped) != before


def test_other_differences_are_seen() -> None:
    tensor = torch.arange(5000, dtype=torch.float32).view(50, 100)
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    nan, other = torch.tensor([torch.nan]), -torch.tensor([torch.nan])
    assert fingerprint(tensor) != fingerprint(swapped)
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert fingerprint(nan) != fingerprint(other)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprints([torch.empty(0), torch.tensor(0.0)]) == [0, 0]


def test_the_majority_is_right() -> None:
    holders = (("dp_replicate",), 0)
    everyone = [{(holders, "w"): value} for value in (7, 7, 8, 7)]
    [found] = differences(everyone)
    assert found.groups == ((0, 1, 3), (2,))
    assert found.wrong == (2,)
    assert differences([{(holders, "w"): 7}] * 4) == []
    tie = Difference(name="w", holders=holders, groups=((0, 1), (2, 3)))
    three = Difference(name="w", holders=holders, groups=((0, 1), (2,), (3,)))
    assert tie.wrong == three.wrong == ()
    assert suspects([found, found, tie]) == [2]
    assert unequal([{"a": 1}, {"a": 1, "b": 2}, {"b": 3}]) == {"b"}


def test_condensed_numbers_do_not_depend_on_the_order() -> None:
    holders = (("tp",), 0)
    held = [SharedTensor(name=n, tensor=torch.zeros(1), holders=holders) for n in "ab"]
    assert condense(held, [1, 2]) == condense(held[::-1], [2, 1]) != condense(held, [2, 1])
    with pytest.raises(ValueError, match="zip"):
        condense(held, [1])
