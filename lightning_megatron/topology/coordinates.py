"""Rank <-> coordinate arithmetic on the mesh of `degrees.AXES`.

Ranks are laid out in C order: the last axis (tp) varies fastest. Two derived axes are made of
neighbouring mesh axes: *batch* (dp_replicate x dp_shard: who reads which samples) and *loss*
(batch x cp: whose token losses are averaged).
"""

from collections.abc import Iterable

from lightning_megatron.topology.degrees import AXES, Degrees

DERIVED_AXES = {"batch": ("dp_replicate", "dp_shard"), "loss": ("dp_replicate", "dp_shard", "cp")}
"""Axes made of several mesh axes."""


def coordinates_of(rank: int, degrees: Degrees) -> dict[str, int]:
    """Position of ``rank`` on every mesh axis.

    >>> coordinates_of(5, Degrees(pp=2, tp=4))
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
    """
    position: dict[str, int] = {}
    for axis, size in zip(reversed(AXES), reversed(degrees.sizes()), strict=True):
        rank, position[axis] = divmod(rank, size)
    return {axis: position[axis] for axis in AXES}


def rank_of(position: dict[str, int], degrees: Degrees) -> int:
    """Inverse of `coordinates_of`."""
    rank = 0
    for axis, size in zip(AXES, degrees.sizes(), strict=True):
        rank = rank * size + position[axis]
    return rank


def groups_along(axes: str | Iterable[str], degrees: Degrees) -> list[tuple[int, ...]]:
    """All groups of ranks that differ only in ``axes`` (a mesh or derived axis, or several).

    Groups come in ascending order of their first rank; ranks within a group follow the mesh order.

    >>> groups_along("pp", Degrees(pp=2, tp=2))
    [(0, 2), (1, 3)]
    """
    varying = DERIVED_AXES.get(axes, (axes,)) if isinstance(axes, str) else tuple(axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(degrees.world_size):
        position = coordinates_of(rank, degrees)
        fixed = tuple(position[axis] for axis in AXES if axis not in varying)
        groups.setdefault(fixed, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
