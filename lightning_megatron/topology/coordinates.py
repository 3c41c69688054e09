"""Rank <-> coordinate arithmetic on the mesh of `degrees.AXES`.

Ranks are laid out in C order: the last axis (tp) varies fastest. The outermost axis, pp, need not
begin at 0: global rank 0 holds the last stage of a pipeline, so that the results of a step or an
epoch are on the rank with the loggers and the decision on file names; further ranks hold the stages
before it. Neighbouring stages stay neighbouring blocks of ranks. Derived axes are made of several
mesh axes: *batch* (dp_replicate x dp_shard: ranks that read different samples), *loss* (batch x cp:
ranks over which gradients are averaged), *fsdp* (dp_shard x cp: ranks over which ZeRO divides) and
*model* (pp x cp x tp: ranks that work on the same samples).

Axes of experts divide the *pool*, the ranks that hold one copy of a stage: *ep* (neighbours, who
hold different experts), *efsdp* (ranks of a pool with the same experts: ZeRO divides over them),
*expert_copies* (ranks in other copies with the same part) and *expert_loss* (expert_copies x efsdp:
ranks over which gradients of experts are averaged).
"""

from collections.abc import Iterable
from functools import cache, lru_cache

from lightning_megatron.topology.degrees import AXES, Degrees

DERIVED_AXES = {
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
    "model": ("pp", "cp", "tp"),
}
"""Axes made of several mesh axes."""
EXPERT_AXES = ("ep", "efsdp", "expert_copies", "expert_loss")
"""Axes of experts, which divide the ranks of mesh axes further."""


def coordinates_of(rank: int, degrees: Degrees) -> dict[str, int]:
    """Position of ``rank`` on every mesh axis.

    >>> coordinates_of(5, Degrees(pp=2, tp=4))
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
    >>> [coordinates_of(rank, Degrees(pp=4, origin=3))["pp"] for rank in range(4)]
    [3, 2, 1, 0]
    """
    position: dict[str, int] = {}
    for axis, size in zip(reversed(AXES), reversed(degrees.sizes()), strict=True):
        rank, position[axis] = divmod(rank, size)
    position["pp"] = _from_origin(position["pp"], degrees)
    return {axis: position[axis] for axis in AXES}


def rank_of(position: dict[str, int], degrees: Degrees) -> int:
    """Inverse of `coordinates_of`."""
    rank = 0
    for axis, size in zip(AXES, degrees.sizes(), strict=True):
        place = position[axis]
        rank = rank * size + (_from_origin(place, degrees) if axis == "pp" else place)
    return rank


def _from_origin(place: int, degrees: Degrees) -> int:
    """Position on pp of the ``place``-th block of ranks, and the inverse."""
    return (degrees.origin - place) % degrees.pp if degrees.origin else place


def groups_along(axes: str | Iterable[str], degrees: Degrees) -> list[tuple[int, ...]]:
    """All groups of ranks that differ only in ``axes`` (a mesh or derived axis, or several).

    Groups come in ascending order of their first rank; ranks within a group follow the mesh order.

    >>> groups_along("pp", Degrees(pp=2, tp=2))
    [(0, 2), (1, 3)]
    """
    if isinstance(axes, str) and axes in EXPERT_AXES:
        return _expert_groups(axes, degrees)
    varying = DERIVED_AXES.get(axes, (axes,)) if isinstance(axes, str) else tuple(axes)
    return [*_groups_along(varying, degrees)]


@lru_cache(maxsize=64)  # thousands of ranks take tenths of a second, and are asked for often
def _groups_along(varying: tuple[str, ...], degrees: Degrees) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank in range(degrees.world_size):
        position = coordinates_of(rank, degrees)
        fixed = tuple(position[axis] for axis in AXES if axis not in varying)
        place = tuple(position[axis] for axis in AXES if axis in varying)
        groups.setdefault(fixed, []).append((place, rank))
    return tuple(tuple(rank for _, rank in sorted(members)) for members in groups.values())


@cache
def experts_meet_samples(degrees: Degrees) -> bool:
    """Whether ranks that read different samples hold different experts of one layer.

    >>> experts_meet_samples(Degrees(dp_shard=2, tp=2, ep=2))
    False
    >>> experts_meet_samples(Degrees(dp_shard=2, tp=2, ep=4))
    True
    """

    def samples(rank: int) -> tuple[int, ...]:
        position = coordinates_of(rank, degrees)
        return tuple(position[axis] for axis in DERIVED_AXES["batch"])

    return any(len(set(map(samples, group))) > 1 for group in groups_along("ep", degrees))


def _expert_groups(axes: str, degrees: Degrees) -> list[tuple[int, ...]]:
    ep = degrees.ep
    pools = groups_along(degrees.pool_axes, degrees)
    if axes == "ep":
        found = [pool[i : i + ep] for pool in pools for i in range(0, len(pool), ep)]
    elif axes == "efsdp":
        found = [pool[i::ep] for pool in pools for i in range(ep)]
    elif "dp_replicate" in degrees.pool_axes:
        return (
            _expert_groups("efsdp", degrees)
            if axes == "expert_loss"
            else [(rank,) for rank in range(degrees.world_size)]
        )
    elif axes == "expert_copies":
        return groups_along("dp_replicate", degrees)
    else:
        pool_of = {rank: pool for pool in _expert_groups("efsdp", degrees) for rank in pool}
        copies = groups_along("dp_replicate", degrees)
        first = {pool_of[c[0]]: c for c in copies}
        joined = {p: tuple(r for rank in c for r in pool_of[rank]) for p, c in first.items()}
        found = list(joined.values())
    return sorted(found, key=min)
