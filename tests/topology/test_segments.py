import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.topology.segments import Segments, common_pieces

SEGMENTS = st.builds(
    lambda ranks, units: Segments(tuple(ranks * u for u in units), ranks),
    st.integers(1, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)


@given(SEGMENTS, st.integers(0, 1))
def test_ranks_parts_in_rank_order_are_the_whole(segments, dim):
    whole = torch.arange(sum(segments.lengths))
    whole = whole.unsqueeze(1 - dim).expand(*((2,) if dim else ()), -1, *(() if dim else (2,)))
    parts = [segments.part_of(whole, dim, rank) for rank in range(segments.ranks)]
    gathered = torch.cat(parts, dim)
    assert torch.equal(gathered, segments.in_rank_order(whole, dim))
    assert torch.equal(segments.in_canonical_order(gathered, dim), whole)


def test_every_rank_has_a_piece_of_every_segment():
    whole = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21])
    assert Segments((4, 2, 2), 2).part_of(whole, 0, 1).tolist() == [2, 3, 11, 21]


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("length", range(4))
def test_common_pieces_are_those_of_a_range_of_what_is_held(first, length):
    pieces = ((4, 4), (10, 2), (20, 2))
    held = [index for start, size in pieces for index in range(start, start + size)]
    found = common_pieces(pieces, first, length)
    expected = held[first : first + length]
    assert [i for start, size in found for i in range(start, start + size)] == expected
