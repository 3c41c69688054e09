"""The assignment of rectangles to writing ranks, without any rank seeing all of them.

Every rank offers its chunks, and offers are distributed over planners by name of the tensor. One
rank plans up to `OFFERS_EACH` chunks alone; for more there are more planners. A planner sees all
chunks of its tensors. So it can check that they tile each tensor, and assigns every rectangle that
several ranks hold to one of them. It sends little to the first rank: for every tensor the shape and
the runs of its rectangles (chunk_runs.py). So neither work nor memory of any rank grows with the
number of all chunks.

Rectangles of a tensor that equally many ranks hold (replicas of a sharded tensor) go to the same
replica, the one whose ranks have the fewest bytes so far; that keeps the runs long. Parameters are
identical on replicas; where values may differ, the lowest rank writes. A planner counts the bytes
of its own tensors only. Each planner starts its search at another replica, so that they do not all
choose the first rank.
"""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.planner import SavePlan

from lightning_megatron.checkpoint.directory.chunk_runs import Rectangle, compress
from lightning_megatron.checkpoint.directory.coverage import coverage_fault
from lightning_megatron.checkpoint.directory.manifest import TensorEntry
from lightning_megatron.checkpoint.save.dcp_writer import WritePlan, data_of, plan_of
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, summary

OFFERS_EACH = 50_000
"""Approximate number of chunks for one planner: half a second of work."""

Offer: TypeAlias = dict[str, tuple[str, tuple[int, ...], bool, list[Rectangle]]]
"""Chunks of a rank, by name of the tensor: dtype, shape, whether the lowest rank has to write, and
the rectangles."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Decision of a planner about its tensors."""

    tensors: Mapping[str, TensorEntry]
    """Tensors of the planner, by name."""
    positions: Sequence[Mapping[str, list[int]]]
    """Positions of the rectangles that each rank writes, by rank and name."""


def plan_writes(what: str, offered: SavePlan, peers: Peers) -> WritePlan:
    """Assign all chunks to ranks; collective.

    Args:
        what: beginning of error messages, like ``saving PATH``.
        offered: the result of `offer` on this rank.
        peers: the ranks that write.

    Raises:
        CheckpointError: on every rank: the chunks of a tensor do not tile it.
    """
    total = peers.run(what, lambda: len(offered.items), lambda numbers: sum(numbers))
    planners = min(peers.size, math.ceil(total / OFFERS_EACH) or 1)
    received = peers.deliver([_packed(some) for some in deal(describe(offered), planners)])
    assignments: list[Assignment] = []  # on planners

    def each() -> Mapping[str, TensorEntry]:
        if peers.rank >= planners:
            return {}
        offers = [_offer(_unpacked(text)) for text in received]
        assignments.append(assign(offers, peers.rank, planners))
        return assignments[0].tensors

    tables: list[dict[str, TensorEntry]] = []  # on the first rank

    def first(found: list[Mapping[str, TensorEntry]]) -> int:
        tables.append({name: entry for some in found for name, entry in some.items()})
        return sum(entry.count for entry in tables[0].values())

    count = peers.run(what, each, first)
    replies = [_packed(mine) for verdict in assignments for mine in verdict.positions]
    mine: dict[str, list[int]] = {}
    for text in peers.hand_out(replies, planners):
        mine |= _unpacked(text)
    return plan_of(peers.rank, offered, mine, count, tables[0] if tables else None)


def _packed(data: Any) -> bytes:
    """Return data as compressed JSON, as names and shapes repeat themselves."""
    return zlib.compress(json.dumps(data).encode(), 1)


def _unpacked(text: bytes) -> Any:
    return json.loads(zlib.decompress(text))


def plan_in_turn(offered: Sequence[SavePlan]) -> list[WritePlan]:
    """Return plans for one process that writes several files, one after the other.

    Args:
        offered: the result of `offer` for each file.

    Raises:
        CheckpointError: the chunks of a tensor do not tile it.
    """
    verdict = assign([describe(one) for one in offered])
    count = sum(entry.count for entry in verdict.tensors.values())
    return [
        plan_of(number, one, verdict.positions[number], count, verdict.tensors)
        for number, one in enumerate(offered)
    ]


def describe(offered: SavePlan) -> Offer:
    """Return the chunks of a rank in the form that is sent."""
    found: Offer = {}
    for item in offered.items:
        data, name = data_of(item), item.index.fqn
        kind = str(data.properties.dtype).removeprefix("torch.")
        pinned = name in (offered.planner_data or ())
        rectangles = found.setdefault(name, (kind, tuple(data.size), pinned, []))[3]
        rectangles.append((tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    return found


def deal(offered: Offer, planners: int) -> list[Offer]:
    """Split an offer over planners by the hash of the names, which is equal on all ranks."""
    dealt: list[Offer] = [{} for _ in range(planners)]
    for name, held in offered.items():
        dealt[zlib.crc32(name.encode()) % planners][name] = held
    return dealt


def _offer(data: Mapping[str, Any]) -> Offer:
    return {
        name: (dtype, tuple(shape), pinned, [(tuple(o), tuple(s)) for o, s in rectangles])
        for name, (dtype, shape, pinned, rectangles) in data.items()
    }


@dataclass(frozen=True)
class _Group:
    """Rectangles of one tensor that equally many ranks hold."""

    name: str
    bytes: Sequence[int]
    """Bytes of every rectangle."""
    holders: Sequence[Sequence[tuple[int, int]]]
    """Ranks that hold each rectangle, ascending, with its position in their offers."""
    rectangles: Sequence[Rectangle]
    pinned: bool


def assign(offers: Sequence[Offer], planner: int = 0, planners: int = 1) -> Assignment:
    """Assign every rectangle to one of its ranks, with balanced bytes.

    Args:
        offers: chunks of each rank, for all tensors of this planner.
        planner: number of the planner.
        planners: number of planners.

    Raises:
        CheckpointError: ranks have different tensors of one name, or the chunks of a tensor do not
            tile it.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    pinned: set[str] = set()
    holders: dict[str, dict[Rectangle, list[tuple[int, int]]]] = {}
    for rank, offered in enumerate(offers):
        for name, (dtype, shape, is_pinned, rectangles) in offered.items():
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                both = f"{_kind(*kinds[name])} and {_kind(dtype, shape)}"
                raise CheckpointError(f"{name}: ranks differ in shape or dtype: {both}")
            if is_pinned:
                pinned.add(name)
            found = holders.setdefault(name, {})
            for position, rectangle in enumerate(rectangles):
                found.setdefault(rectangle, []).append((rank, position))
    _check_coverage(kinds, holders)
    load = [0] * len(offers)
    positions: list[dict[str, list[int]]] = [{} for _ in offers]
    chosen: dict[str, list[tuple[int, Rectangle]]] = defaultdict(list)
    for group in _groups(kinds, holders, pinned):
        replica = _choose(group, load, planner, planners)
        for size, held, rectangle in zip(group.bytes, group.holders, group.rectangles, strict=True):
            rank, position = held[replica]
            load[rank] += size
            positions[rank].setdefault(group.name, []).append(position)
            chosen[group.name].append((rank, rectangle))
    tensors = {
        name: TensorEntry(dtype=dtype, shape=shape, runs=compress(chosen[name]))
        for name, (dtype, shape) in kinds.items()
    }
    return Assignment(tensors=tensors, positions=positions)


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _check_coverage(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]], holders: Mapping[str, Mapping[Rectangle, Any]]
) -> None:
    faults = [
        f"{name}: {fault}"
        for name, (_, shape) in kinds.items()
        if (fault := coverage_fault(shape, list(holders[name])))
    ]
    if faults:
        raise CheckpointError(f"the ranks do not hold the whole state: {summary(faults)}")


def _groups(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    holders: Mapping[str, Mapping[Rectangle, Sequence[tuple[int, int]]]],
    pinned: set[str],
) -> list[_Group]:
    """Return the groups of all tensors, those with one holder first."""
    groups = []
    for name, (dtype, _) in kinds.items():
        by_count: dict[int, list[Rectangle]] = defaultdict(list)
        for rectangle, held in holders[name].items():
            by_count[len(held)].append(rectangle)
        itemsize = getattr(torch, dtype).itemsize
        groups += [
            _Group(
                name=name,
                bytes=[math.prod(sizes) * itemsize for _, sizes in rectangles],
                holders=[holders[name][rectangle] for rectangle in rectangles],
                rectangles=rectangles,
                pinned=name in pinned,
            )
            for rectangles in by_count.values()
        ]
    return sorted(groups, key=lambda group: len(group.holders[0]))


def _choose(group: _Group, load: Sequence[int], planner: int, planners: int) -> int:
    """Return the position of the holders that write the rectangles of a group."""
    replicas = len(group.holders[0])
    if group.pinned or replicas == 1:
        return 0
    begin = planner * replicas // planners

    def bytes_so_far(replica: int) -> int:
        return sum(load[held[replica][0]] for held in group.holders)

    chosen: int = min((*range(begin, replicas), *range(begin)), key=bytes_so_far)
    return chosen
