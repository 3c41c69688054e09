"""Rank arithmetic: round trips, and groups that partition the world."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.topology.coordinates import (
    DERIVED_AXES,
    EXPERT_AXES,
    coordinates_of,
    groups_along,
    rank_of,
)
from lightning_megatron.topology.degrees import AXES, Degrees, divisors

sizes = st.integers(1, 3)
layouts = st.builds(Degrees, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes)
EVERY_AXIS = (*AXES, *DERIVED_AXES)


@given(layouts)
def test_round_trip(degrees: Degrees) -> None:
    positions = [coordinates_of(rank, degrees) for rank in range(degrees.world_size)]
    assert [rank_of(position, degrees) for position in positions] == list(range(len(positions)))
    grid = itertools.product(*(range(size) for size in degrees.sizes()))
    assert [tuple(position.values()) for position in positions] == list(grid)
    assert all(tuple(position) == AXES for position in positions)


@given(layouts, st.sampled_from(EVERY_AXIS))
def test_groups_partition_the_world(degrees: Degrees, axis: str) -> None:
    groups = groups_along(axis, degrees)
    assert sorted(itertools.chain(*groups)) == list(range(degrees.world_size))
    members = DERIVED_AXES.get(axis, (axis,))
    size = 1
    for member in members:
        size *= getattr(degrees, member)
    assert {len(group) for group in groups} == {size}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert all(list(group) == sorted(group) for group in groups)


@given(layouts, st.sampled_from(EVERY_AXIS))
def test_members_of_a_group_differ_in_its_axes_only(degrees: Degrees, axis: str) -> None:
    varying = DERIVED_AXES.get(axis, (axis,))
    for group in groups_along(axis, degrees):
        fixed = {
            tuple(
                value
                for name, value in coordinates_of(rank, degrees).items()
                if name not in varying
            )
            for rank in group
        }
        assert len(fixed) == 1


@given(layouts, st.permutations(AXES), st.integers(0, len(AXES)))
def test_any_set_of_axes_makes_groups(degrees: Degrees, axes: list[str], count: int) -> None:
    groups = groups_along(axes[:count], degrees)
    assert sorted(itertools.chain(*groups)) == list(range(degrees.world_size))
    size = 1
    for axis in axes[:count]:
        size *= getattr(degrees, axis)
    assert {len(group) for group in groups} == {size}


@given(layouts, st.lists(st.sampled_from(AXES), min_size=2, max_size=2, unique=True))
def test_groups_of_two_axes_meet_in_at_most_one_rank(degrees: Degrees, axes: list[str]) -> None:
    one, other = (groups_along(axis, degrees) for axis in axes)
    assert all(len(set(a) & set(b)) <= 1 for a in one for b in other)


def test_tp_neighbours_are_adjacent_and_pp_peers_far() -> None:
    degrees = Degrees(pp=2, dp_shard=2, tp=2)
    assert groups_along("tp", degrees) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_along("pp", degrees) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups_along("dp_shard", degrees) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_derived_axes() -> None:
    degrees = Degrees(pp=2, dp_replicate=2, dp_shard=2, cp=2)
    assert groups_along("batch", degrees)[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups_along("loss", degrees) == [tuple(range(8)), tuple(range(8, 16))]
    assert groups_along("batch", degrees) == groups_along(("dp_shard", "dp_replicate"), degrees)


@pytest.mark.parametrize("axis", EVERY_AXIS)
def test_one_process(axis: str) -> None:
    assert groups_along(axis, Degrees()) == [(0,)]


def test_global_rank_0_holds_the_last_stage_and_neighbouring_stages_neighbouring_ranks() -> None:
    degrees = Degrees(pp=3, dp_shard=2, tp=2, origin=2)
    first = [coordinates_of(rank, degrees) for rank in (0, 4, 8)]
    assert [position["pp"] for position in first] == [2, 1, 0]
    positions = [coordinates_of(rank, degrees) for rank in range(degrees.world_size)]
    assert [rank_of(position, degrees) for position in positions] == list(range(12))
    # In the order of the axis: the first stage's rank first.
    assert groups_along("pp", degrees) == [(8, 4, 0), (9, 5, 1), (10, 6, 2), (11, 7, 3)]
    assert groups_along("batch", degrees) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)]


@st.composite
def expert_layouts(draw: st.DrawFn) -> Degrees:
    degrees = draw(layouts)
    ep = draw(st.sampled_from(divisors(degrees.pool)))
    return replace(degrees, ep=ep, origin=degrees.pp - 1)


@given(expert_layouts())
def test_axes_of_experts_divide_the_ranks_of_a_stage(degrees: Degrees) -> None:
    groups = {axis: groups_along(axis, degrees) for axis in EXPERT_AXES}
    place = {}
    for axis, found in groups.items():
        assert sorted(itertools.chain(*found)) == list(range(degrees.world_size))
        assert all(list(group) == sorted(group) for group in found)
        place |= {(axis, rank): group.index(rank) for group in found for rank in group}
    # Each rank of a stage has another place on ep and expert_loss.
    for stage in groups_along([axis for axis in AXES if axis != "pp"], degrees):
        places = {(place["ep", rank], place["expert_loss", rank]) for rank in stage}
        assert len(places) == len(stage)
        assert len(stage) == len(groups["ep"][0]) * len(groups["expert_loss"][0])
    # Ranks that share experts are at the same place on ep, and copies are of one part.
    for group in groups["expert_loss"]:
        assert len({place["ep", rank] for rank in group}) == 1
        parts = [(place["efsdp", rank], place["expert_copies", rank]) for rank in group]
        assert len(set(parts)) == len(group)
    for group in groups["expert_copies"]:
        assert len({(place["ep", rank], place["efsdp", rank]) for rank in group}) == 1
