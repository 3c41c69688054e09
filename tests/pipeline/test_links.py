"""Streams of messages: no schedule blocks a device, and few payloads are held at a time."""

import random
from collections.abc import Callable, Hashable, Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.comm.point_to_point import DeviceChannel
from lightning_megatron.pipeline.links import Links, MessagePlan, receiver_of, stream_rounds
from lightning_megatron.schedules.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    forward_only,
    looped,
    make_schedule,
    v_shaped,
)
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from tests.comm.fake_world import fake_world

GroupOf = Callable[[int, int], Hashable]
"""From sender and receiver, the group that carries their messages."""


def own_groups(schedule: Schedule) -> GroupOf:
    """Those that `Links` makes: the round, and the stream within it."""
    rounds = stream_rounds(schedule.stage_ranks)

    def group_of(sender: int, receiver: int) -> Hashable:
        found = [i for i, streams in enumerate(rounds) if (sender, receiver) in streams]
        assert len(found) == 1
        return found[0], sender, receiver

    return group_of


def up_and_down(sender: int, receiver: int) -> Hashable:
    """One group for all messages to higher ranks, one for all to lower ones."""
    return sender < receiver


def program(schedule: Schedule, rank: int) -> Iterator[tuple[str, Any, int]]:
    """What the host of a rank asks its device for: receives, work, waits and sends.

    Messages are named by sender, receiver and number.
    """
    traffic = MessagePlan(schedule, rank)
    due = {sender: iter(enumerate(wanted)) for sender, wanted in traffic.incoming.items()}
    arrived: set[Action] = set()
    sent = dict.fromkeys(traffic.outgoing, 0)
    for action in schedule.row(rank):
        for needed in schedule.needs(action):
            sender = schedule.rank_of_stage(needed.stage)
            wanted = receiver_of(needed, schedule)
            while sender != rank and wanted is not None and wanted not in arrived:
                number, target = next(due[sender])
                arrived.add(target)
                yield "receive", (sender, rank, number), sender
        yield "work", action, rank
        target = receiver_of(action, schedule)
        owner = rank if target is None else schedule.rank_of_stage(target.stage)
        if owner != rank:
            number = sent[owner]
            for settled in range(traffic.outgoing[owner][number]):
                yield "wait", (rank, owner, settled), owner
            yield "send", (rank, owner, number), owner
            sent[owner] += 1


def unfinished(schedule: Schedule, group_of: GroupOf) -> dict[int, str]:
    """Where ranks stand for ever on devices whose messages leave only when both ends are ready.

    The transfers of one group run one after the other on every rank, in the order in which they
    were asked for; a receive and a wait hold up the work behind them, a send does not.
    """
    programs = [list(program(schedule, rank)) for rank in range(schedule.num_ranks)]
    place = [0] * schedule.num_ranks
    queues: dict[tuple[int, Hashable], list[Any]] = {}
    asked: set[tuple[int, Any]] = set()
    done: set[Any] = set()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(programs):
            while place[rank] < len(steps):
                kind, what, _ = steps[place[rank]]
                if kind in ("receive", "send") and (rank, what) not in asked:
                    asked.add((rank, what))
                    queues.setdefault((rank, group_of(*what[:2])), []).append(what)
                    moved = True
                if kind in ("receive", "wait") and what not in done:
                    break
                place[rank] += 1
                moved = True
        for (rank, group), queue in queues.items():
            while queue:
                sender, receiver, _ = what = queue[0]
                other = queues.get((sender + receiver - rank, group))
                if not other or other[0] != what:
                    break
                queue.pop(0)
                other.pop(0)
                done.add(what)
                moved = True
    return {
        rank: str(steps[place[rank]])
        for rank, steps in enumerate(programs)
        if place[rank] < len(steps)
    }


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_blocks(name: str, ranks: int) -> None:
    for microbatches in (1, 3, 7, 8, 16, 24) if ranks < 8 else (8, 24):
        schedule = make_schedule(name, ranks, microbatches)
        assert unfinished(schedule, own_groups(schedule)) == {}
        evaluation = forward_only(ranks, microbatches, schedule.stage_ranks)
        assert unfinished(evaluation, own_groups(evaluation)) == {}


def test_a_group_for_several_neighbours_blocks() -> None:
    """The simulation can fail: two groups for all of a V's messages stop dualpipev."""
    schedule = make_schedule("dualpipev", 4, 8)
    assert len(unfinished(schedule, up_and_down)) == 4


def any_schedule(draw: random.Random) -> Schedule:
    """A table in no order but the one that makes it run: any stage on any rank."""
    ranks, stages, microbatches = draw.randint(2, 5), draw.randint(4, 9), draw.randint(1, 6)
    placement = tuple(draw.randrange(ranks) for _ in range(stages))
    whole = draw.random() < 0.5
    kinds = [Kind.FORWARD, *((Kind.BACKWARD,) if whole else (Kind.BACKWARD_INPUT,))]
    kinds += [] if whole else [Kind.BACKWARD_WEIGHT]
    left = [Action(k, s, m) for k in kinds for s in range(stages) for m in range(microbatches)]
    schedule = Schedule("custom", microbatches, placement, (tuple(left),))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while left:
        action = draw.choice([a for a in left if done.issuperset(schedule.needs(a))])
        left.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    return Schedule("custom", microbatches, placement, tuple(map(tuple, rows)))


@pytest.mark.parametrize("seed", range(20))
def test_no_table_blocks(seed: int) -> None:
    schedule = any_schedule(random.Random(seed))
    assert unfinished(schedule, own_groups(schedule)) == {}


@pytest.mark.parametrize(
    ("stage_ranks", "most"),
    [(looped(2), 2), (looped(9), 4), (v_shaped(8), 4), (looped(8, 2), 4), (looped(5, 3), 7)],
)
def test_rounds_are_few_and_disjoint(stage_ranks: tuple[int, ...], most: int) -> None:
    rounds = stream_rounds(stage_ranks)
    assert len(rounds) <= most
    for streams in rounds:
        named = [rank for stream in streams for rank in stream]
        assert len(named) == len(set(named))
    streams = [stream for found in rounds for stream in found]
    needed = {(a, b) for a, b in pairwise(stage_ranks) if a != b}
    assert sorted(streams) == sorted(needed | {(b, a) for a, b in needed})


def messages_job(kind: str, name: str, microbatches: int, evaluates: bool) -> tuple[int, Any]:
    """Most payloads held at a time by this rank, and the groups of its device channels."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    topology = Topology(Degrees(pp=ranks), torch.device("cpu"))
    host_group = topology.new_group("pp") if kind == "device" else None
    schedule = make_schedule(name, ranks, microbatches)
    links = Links(topology, schedule.stage_ranks, host_group)
    rank = topology.pp.rank
    if evaluates:
        schedule = forward_only(ranks, microbatches, schedule.stage_ranks)
    most = 0
    for _ in range(2):
        links.begin(MessagePlan(schedule, rank))
        for action in schedule.row(rank):
            label = "F" if action.kind is Kind.FORWARD else "B"
            starts = action.kind is Kind.BACKWARD_WEIGHT or (
                action.stage == (0 if action.kind is Kind.FORWARD else schedule.num_stages - 1)
            )
            if not starts:
                found = links.receive(action)
                assert found[:2] == (label, action.microbatch)
                assert float(found[2].sum()) == 20.0 * action.microbatch
            payload = torch.full((20,), float(action.microbatch))
            links.send(action, (label, action.microbatch, payload))
            most = max([most, *(channel.held for channel in links._to.values())])
        links.end()
        assert all(channel.held == 0 for channel in links._to.values())
    groups = [
        (sends, peer, dist.get_process_group_ranks(channel._group), channel._group.group_name)
        for sends, channels in ((True, links._to), (False, links._from))
        for peer, channel in channels.items()
        if isinstance(channel, DeviceChannel)
    ]
    return most, groups


@pytest.mark.parametrize(
    ("kind", "name", "evaluates"),
    [
        ("inline", "1f1b", False),
        ("device", "1f1b", False),
        ("device", "dualpipev", False),
        ("inline", "zb-h1", True),
    ],
)
def test_payloads_held_do_not_grow_with_the_microbatches(
    pool: WorkerPool, kind: str, name: str, evaluates: bool
) -> None:
    for most, groups in pool.run(3, messages_job, kind, name, 16, evaluates):
        assert most <= 4
        assert len({name for *_, name in groups}) == len(groups)  # each direction its own
        assert all(len(ranks) == 2 and peer in ranks for _, peer, ranks, _ in groups)


def test_groups_are_made_once_and_closed_with_the_layout(pool: WorkerPool) -> None:
    for before, once, twice, closed in pool.run(3, groups_job):
        assert before < once == twice
        assert closed < before


def groups_job() -> list[int]:
    """Groups before any links, with links, with links made again, and after the layout."""
    dist.init_process_group("gloo")
    topology = Topology(Degrees(pp=3), torch.device("cpu"))
    host_group = topology.new_group("pp")
    counts = [len(dist.distributed_c10d._world.pg_map)]
    for _ in range(2):
        Links(topology, looped(3, 2), host_group)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    topology.close()
    return [*counts, len(dist.distributed_c10d._world.pg_map)]


def opened(rank: int, stage_ranks: tuple[int, ...]) -> tuple[list[tuple[int, int]], int]:
    """Sender and receiver of the first messages of a rank's streams in order, and its streams."""
    world = len(set(stage_ranks))
    found: list[tuple[int, int]] = []
    calls = {
        "send": lambda byte, peer, group: found.append((rank, peer)),
        "recv": lambda byte, peer, group: found.append((peer, rank)),
    }
    with fake_world(rank, world):
        topology = Topology(Degrees(pp=world), torch.device("cpu"))
        with patch.multiple(dist, **calls):
            links = Links(topology, stage_ranks, topology.new_group("pp"))
        count = len(links._streams)
        topology.close()
    return found, count


def blocked(programs: list[list[tuple[int, int]]]) -> list[int]:
    """Ranks that wait for ever, if each message needs its sender and receiver at once."""
    places = [0] * len(programs)

    def due(rank: int) -> tuple[int, int] | None:
        at = places[rank]
        return programs[rank][at] if at < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for sender in range(len(programs)):
            message = due(sender)
            if message and message[0] == sender and due(message[1]) == message:
                places[sender] += 1
                places[message[1]] += 1
                moved = True
    return [rank for rank in range(len(programs)) if due(rank) is not None]


@pytest.mark.parametrize(
    "stage_ranks", [(0, 1), (0, 1, 2, 3), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)]
)
def test_streams_are_opened_before_a_schedule_begins(stage_ranks: tuple[int, ...]) -> None:
    """NCCL connects two ranks in the first message of a stream, whose sender waits meanwhile."""
    ranks = range(len(set(stage_ranks)))
    found = [opened(rank, stage_ranks) for rank in ranks]
    programs = [program for program, _ in found]
    assert all(len(set(program)) == len(program) == count for program, count in found)
    assert blocked(programs) == []


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ([[(0, 1), (1, 0)], [(1, 0), (0, 1)]], [0, 1]),  # each sends first
        ([[(1, 0), (0, 1)], [(0, 1), (1, 0)]], [0, 1]),  # each receives first
        ([[(0, 1), (2, 0)], [(1, 2), (0, 1)], [(2, 0), (1, 2)]], [0, 1, 2]),  # in a circle
        ([[(0, 1)], [(1, 2), (0, 1)], [(1, 2)]], []),
        ([[(0, 1)], [(1, 2), (0, 1)], []], [0, 1]),  # a stream that its receiver does not open
        ([[], [(0, 1)]], [1]),  # nor its sender
        ([[(0, 1)], [(0, 1), (1, 2)], [(1, 2)]], []),
    ],
)
def test_the_model_of_first_messages_finds_who_waits_for_ever(
    programs: list[list[tuple[int, int]]], expected: list[int]
) -> None:
    """A schedule of the user's may have first messages that cross."""
    assert blocked(programs) == expected
