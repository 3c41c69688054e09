"""Which rank holds which positions, and what layers know of the sequences that were split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout, ContextOrder

orders = st.sampled_from(["zigzag", "contiguous"])


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 4), orders)
def test_every_position_is_on_one_rank(length: int, cp: int, tp: int, order: ContextOrder) -> None:
    layout = ContextLayout(length, cp, order, tp)
    held = [p for rank in range(cp) for chunk in layout.chunks(rank) for p in chunk]
    assert sorted(held) == list(range(layout.padded))
    assert 0 <= layout.padded - length < 2 * cp * tp
    assert layout.local % tp == 0
    assert all(len(chunk) == layout.local // 2 for r in range(cp) for chunk in layout.chunks(r))


@given(st.integers(1, 200), st.integers(1, 9))
def test_all_ranks_see_equally_many_earlier_positions(length: int, cp: int) -> None:
    layout = ContextLayout(length, cp)
    seen = {sum(p + 1 for chunk in layout.chunks(r) for p in chunk) for r in range(cp)}
    assert len(seen) == 1


def make_context(cp: int = 2) -> Context:
    return Context(ContextConfig(degree=cp), Axis("cp", 0, tuple(range(cp)), None))


def test_layers_find_the_sequence_that_was_split() -> None:
    context = make_context()
    context.begin(0, forget=True)
    assert context.split(13) == context.layout(8) == ContextLayout(13, 2)
    context.split(30)
    assert context.noted() == [13, 30]
    context.begin(1, forget=True)
    with pytest.raises(ConfigError, match="got 8 positions.*parts of no length.*SplitContext"):
        context.layout(8)
    context.split(15)
    context.begin(0, forget=False)
    assert context.layout(8).length == 13
    context.begin(0, forget=True)
    assert context.noted() == []


def test_of_sequences_of_about_one_length_the_longest_is_meant() -> None:
    context = make_context()
    context.split(13)
    context.split(16)
    assert context.layout(8).length == 16
    assert context.layout(8, 13).length == 13
    assert context.lengths(8) == {13, 16}


def test_nothing_is_split_while_suspended() -> None:
    context = make_context()
    with context.suspended():
        assert not context.is_active
        with context.suspended():
            pass
        assert not context.is_active
    assert context.is_active
    assert not make_context(1).is_active
