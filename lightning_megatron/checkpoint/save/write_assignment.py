"""Who writes which rectangle, agreed without anybody seeing all of them.

Every rank offers what it holds, and the offers are dealt to planners by name of the tensor: up to
`OFFERS_EACH` chunks one rank plans alone, for more there are as many planners as it takes. A
planner sees all chunks of its tensors, so it can check that they tile each, and gives every
rectangle that several ranks hold to one of them. What goes on to the first rank is short: of every
tensor its shape and the runs of its rectangles (chunk_runs.py). So neither the work nor the memory
of any rank grows with the number of all chunks; only the compressed offers pass through the first
rank, where the ranks are connected as a tree, one planner's after the other's.

Rectangles of a tensor that as many ranks hold as each other (replicas of a sharded tensor) go to
the same replica, to the one whose ranks have the fewest bytes so far; that keeps the runs long.
Parameters are identical on replicas; where values may differ, the lowest rank writes. A planner
counts the bytes of its own tensors only, and begins its search at another replica than the next
planner, so that together they do not all choose the first rank.
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
from lightning_megatron.checkpoint.directory.index import summary
from lightning_megatron.checkpoint.directory.manifest import TensorEntry
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.checkpoint.save.dcp_writer import WritePlan, data_of, plan_of
from lightning_megatron.errors import CheckpointError

OFFERS_EACH = 50_000
"""Chunks that one planner is given, about: half a second of work."""

Offer: TypeAlias = dict[str, tuple[str, tuple[int, ...], bool, list[Rectangle]]]
"""What a rank holds of some tensors, by name: dtype, shape, whether the lowest rank is to write,
and its rectangles."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a planner has decided about its tensors."""

    tensors: Mapping[str, TensorEntry]
    """All of them."""
    positions: Sequence[Mapping[str, list[int]]]
    """By rank and name, which of its rectangles the rank writes."""


def plan_writes(what: str, offered: SavePlan, peers: Peers) -> WritePlan:
    """Agree on who writes what; collective.

    Args:
        what: what is being done; begins the message of an error.
        offered: what `offer` returned on this rank.
        peers: the ranks that write.

    Raises:
        CheckpointError: on every rank, when the ranks' chunks do not tile a tensor.
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
    """Return the text that travels: names and shapes repeat themselves."""
    return zlib.compress(json.dumps(data).encode(), 1)


def _unpacked(text: bytes) -> Any:
    return json.loads(zlib.decompress(text))


def plan_in_turn(offered: Sequence[SavePlan]) -> list[WritePlan]:
    """Plan for one process that writes the files of several ranks, one after the other.

    Args:
        offered: what `offer` returned for each file.

    Raises:
        CheckpointError: the chunks do not tile a tensor.
    """
    verdict = assign([describe(one) for one in offered])
    count = sum(entry.count for entry in verdict.tensors.values())
    return [
        plan_of(number, one, verdict.positions[number], count, verdict.tensors)
        for number, one in enumerate(offered)
    ]


def describe(offered: SavePlan) -> Offer:
    """Return what a rank offers, in the form that travels."""
    found: Offer = {}
    for item in offered.items:
        data, name = data_of(item), item.index.fqn
        kind = str(data.properties.dtype).removeprefix("torch.")
        pinned = name in (offered.planner_data or ())
        rectangles = found.setdefault(name, (kind, tuple(data.size), pinned, []))[3]
        rectangles.append((tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    return found


def deal(offered: Offer, planners: int) -> list[Offer]:
    """Return the part of an offer that each planner is to see; by name, so alike on all ranks."""
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
    """Of every rectangle."""
    holders: Sequence[Sequence[tuple[int, int]]]
    """Of every rectangle: the ranks that hold it, ascending, and its position in their offers."""
    rectangles: Sequence[Rectangle]
    pinned: bool


def assign(offers: Sequence[Offer], planner: int = 0, planners: int = 1) -> Assignment:
    """Give every rectangle to one of the ranks that hold it, balancing the bytes that they write.

    Args:
        offers: what the ranks hold, by rank, of all tensors of this planner.
        planner: its number.
        planners: how many there are.

    Raises:
        CheckpointError: ranks mean different tensors by one name, or the chunks do not tile it.
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
    """Return all rectangles, those without a choice first."""
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
    """Return which of the holders of each rectangle is to write it."""
    replicas = len(group.holders[0])
    if group.pinned or replicas == 1:
        return 0
    begin = planner * replicas // planners

    def bytes_so_far(replica: int) -> int:
        return sum(load[held[replica][0]] for held in group.holders)

    chosen: int = min((*range(begin, replicas), *range(begin)), key=bytes_so_far)
    return chosen
