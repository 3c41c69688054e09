"""Which message passes between which ranks, in which order.

A forward sends its output to the next stage, a backward (or its input part) the gradient of its
input to the stage before. All messages from one rank to another travel in one channel, in the order
in which the sender's list of actions makes them; as every rank knows the whole schedule, the
receiver posts its receives in that order. Where it needs them in another order (a custom schedule),
what arrives early waits. Stages on the same rank hand their tensors over directly.

A device does the transfers of one group one after the other, in the order in which the host asked
for them, and a message beyond the backend's buffers (a few megabytes on NCCL) leaves only when its
receiver is ready. So each direction of each pair of ranks that exchange messages is a *stream* with
a group of its own (`stream_rounds`). Then no schedule that can run at all can block: of the actions
that are not done take one that needs only what is done. Earlier messages of its stream were made by
earlier actions of the sender, and asked for by earlier actions of the receiver; so nothing stands
before the message that it needs. With one group for several neighbours dualpipev blocks on four
ranks: a forward to one neighbour stands behind a gradient to the other, and so on in a circle.

That a send returns at once is not true of the first message of a stream on NCCL: it connects the
two ranks, and its host waits until the receiver asks. In a schedule of the user's, two ranks may
each send to the other first. So every stream is opened with one byte when its group is made, in the
order of the rounds, in which no rank has two streams.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron.comm.point_to_point import Channel, DeviceChannel, InlineChannel
from lightning_megatron.pipeline.scatter_gather import (
    ScatterGather,
    ScatterGatherChoice,
    scatters_to,
)
from lightning_megatron.schedules.schedule import Action, Kind, Schedule
from lightning_megatron.schedules.simulate import simulate
from lightning_megatron.topology.mesh import Topology

_TAG = 1
_SLACK = 3.0
"""Time by which a receiver may fall behind before its sender waits: a forward and a backward."""


@dataclass(frozen=True)
class MessagePlan:
    """The messages of one rank under a schedule; a message is named by the action that needs it."""

    schedule: Schedule
    rank: int

    @cached_property
    def incoming(self) -> dict[int, tuple[Action, ...]]:
        """Messages from every other rank to this one, in order."""
        found: dict[int, list[Action]] = {}
        for sender, actions in enumerate(self.schedule.actions):
            for action in actions:
                target = receiver_of(action, self.schedule)
                if target is not None and self._rank_of(target) == self.rank != sender:
                    found.setdefault(sender, []).append(target)
        return {sender: tuple(actions) for sender, actions in found.items()}

    @cached_property
    def outgoing(self) -> dict[int, tuple[int, ...]]:
        """Number of earlier messages that a rank has received, for each message to it.

        These may be waited for: where every action takes its ideal time (`simulate`) the receiver
        asked for them at least a forward and a backward before. Every wait is for something earlier
        on that time line, so no waits form a circle, however long the actions really take.
        """
        timeline = simulate(self.schedule)
        starts = {span.action: span.start for row in timeline.spans for span in row}
        times: dict[int, list[tuple[float, float]]] = {}
        for span in timeline.spans[self.rank]:
            target = receiver_of(span.action, self.schedule)
            owner = self.rank if target is None else self._rank_of(target)
            if target is not None and owner != self.rank:
                if target.kind is Kind.BACKWARD:
                    target = self.schedule.input_gradient(target.stage, target.microbatch)
                times.setdefault(owner, []).append((span.end, starts[target]))
        found = {}
        for owner, sent in times.items():
            # A message is received with the first that is needed of those sent after it.
            received = [*accumulate((start for _, start in reversed(sent)), min)][::-1]
            found[owner] = tuple(
                bisect_left(received, end - _SLACK, hi=index) for index, (end, _) in enumerate(sent)
            )
        return found

    def _rank_of(self, action: Action) -> int:
        return self.schedule.rank_of_stage(action.stage)


def receiver_of(action: Action, schedule: Schedule) -> Action | None:
    """The action that waits for what ``action`` makes; its kind is ``F`` or ``B`` (for ``I`` too).

    >>> from lightning_megatron.schedules.schedule import make_schedule
    >>> print(receiver_of(Action(Kind.FORWARD, 0, 3), make_schedule("1f1b", 2, 4)))
    F1.3
    """
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        last = stage == schedule.num_stages - 1
        return None if last else Action(Kind.FORWARD, stage + 1, microbatch)
    if kind is Kind.BACKWARD_WEIGHT or stage == 0:
        return None
    return Action(Kind.BACKWARD, stage - 1, microbatch)


def stream_rounds(stage_ranks: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Sender and receiver of every stream of messages, in rounds that name a rank at most once.

    Neighbouring stages on two ranks exchange activations one way and gradients the other, so both
    directions of the pair are there. Groups of one round can be made at once; there are four rounds
    for stages in a row or a V, a few more where the last rank sends to the first.

    >>> stream_rounds((0, 1, 2, 2, 1, 0))
    (((0, 1),), ((1, 0),), ((1, 2),), ((2, 1),))
    """
    neighbours = {frozenset(pair) for pair in pairwise(stage_ranks)}
    streams = sorted(
        stream for a, *b in map(sorted, neighbours) for stream in ((a, *b), (*b, a)) if b
    )
    rounds: list[list[tuple[int, int]]] = []
    for sender, receiver in streams:
        for found in rounds:
            if not any({sender, receiver} & set(other) for other in found):
                found.append((sender, receiver))
                break
        else:
            rounds.append([(sender, receiver)])
    return tuple(map(tuple, rounds))


class Links:
    """This rank's connections to the other ranks of its pipeline.

    Args:
        topology: the layout.
        stage_ranks: pipeline rank of every stage.
        host_group: gloo group over the pp axis, where messages between stages are not on the host.
            Constructing is then collective over all processes.
        scatter_gather: whether tp ranks send parts of what they hold alike (see
            `pipeline.scatter_gather`).

    Attributes:
        parts: takes messages apart and puts them together; None where all go whole.
    """

    def __init__(
        self,
        topology: Topology,
        stage_ranks: Sequence[int],
        host_group: dist.ProcessGroup | None = None,
        scatter_gather: ScatterGatherChoice = "auto",
    ) -> None:
        self._pp = topology.pp
        self._device = topology.device
        self._host_group = host_group
        self._streams: dict[tuple[int, int], dist.ProcessGroup] = {}
        if host_group is not None:
            self._streams = _open_streams(topology, stage_ranks)
        self._to: dict[int, Channel] = {}
        self._from: dict[int, Channel] = {}
        self._arrived: dict[Action, Any] = {}
        self._due: dict[int, Iterator[Action]] = {}
        self._settled: dict[int, Iterator[int]] = {}
        self._traffic: MessagePlan
        others = (rank for rank in range(topology.pp.size) if rank != topology.pp.rank)
        self._in_parts = {p for p in others if scatters_to(topology, p, scatter_gather)}
        self.parts: ScatterGather | None = None
        if self._in_parts:
            least = {"least_bytes": 1} if scatter_gather is True else {}
            self.parts = ScatterGather(topology.tp, **least)

    def begin(self, traffic: MessagePlan) -> None:
        """Start a step; the other ranks must do so with the same schedule."""
        self._traffic = traffic
        self._arrived.clear()
        if self.parts is not None:
            self.parts.begin()
        self._due = {}
        for sender, actions in traffic.incoming.items():
            self._due[sender] = iter(actions)
            channel = self._channel(self._from, sender, sends=False)
            channel.expect(len(actions))
            channel.prepost()
        self._settled = {peer: iter(counts) for peer, counts in traffic.outgoing.items()}
        for receiver, counts in traffic.outgoing.items():
            self._channel(self._to, receiver, sends=True).expect(len(counts))

    def send(self, action: Action, tree: Any) -> None:
        """Pass on what ``action`` made; the caller may let go of its tensors at once."""
        target = receiver_of(action, self._traffic.schedule)
        if target is None:
            return
        owner = self._traffic.schedule.rank_of_stage(target.stage)
        if owner == self._traffic.rank:
            self._arrived[target] = tree_map(_handed_over, tree)
        else:
            channel = self._to[owner]
            channel.settle(next(self._settled[owner]))
            if self.parts is not None and owner in self._in_parts:
                tree = self.parts.take_apart((target.kind.name, target.stage), tree)
            channel.send(tree)

    def receive(self, action: Action) -> Any:
        """Inputs of ``action`` that another stage sends."""
        kind, stage, microbatch = action
        kind = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        wanted = Action(kind, stage, microbatch)
        if wanted not in self._arrived:
            source = stage - 1 if kind is Kind.FORWARD else stage + 1
            sender = self._traffic.schedule.rank_of_stage(source)
            channel = self._from[sender]
            for due in self._due[sender]:
                message = channel.receive()
                if self.parts is not None and sender in self._in_parts:
                    message = self.parts.put_together(message)
                if due == wanted:
                    return message
                self._arrived[due] = message
        return self._arrived.pop(wanted)

    def end(self) -> None:
        """Wait until everything sent has left.

        Raises:
            ConfigError: what came in parts is not what the senders held.
        """
        for channel in self._to.values():
            channel.flush()
        if self.parts is not None:
            self.parts.check()

    def _channel(self, channels: dict[int, Channel], peer: int, *, sends: bool) -> Channel:
        if peer not in channels:
            channels[peer] = self._make_channel(peer, sends=sends)
        return channels[peer]

    def _make_channel(self, peer: int, *, sends: bool) -> Channel:
        pp = self._pp
        rank = pp.ranks[peer]
        if pp.group is None:
            raise RuntimeError("a pipeline needs a pp axis of at least two ranks")
        if self._host_group is None:
            return InlineChannel(rank, pp.group, _TAG, pp.meter, self._device)
        group = self._streams[(pp.rank, peer) if sends else (peer, pp.rank)]
        host = InlineChannel(rank, self._host_group, _TAG)
        return DeviceChannel(rank, group, host, self._device, pp.meter)


def _open_streams(
    topology: Topology, stage_ranks: Sequence[int]
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The groups of this rank's streams; collective over all processes."""
    pp, found = topology.pp, {}
    for streams in stream_rounds(stage_ranks):
        busy = {rank for stream in streams for rank in stream}
        alone = tuple((rank,) for rank in range(pp.size) if rank not in busy)
        # A group's ranks are a set: the direction is known by the round.
        group = topology.part_group("pp", streams + alone, "stream")
        for stream in streams:
            if pp.rank in stream and group is not None:
                found[stream] = group
                _open(group, sends=pp.rank == stream[0], device=topology.device)
    return found


def _open(group: dist.ProcessGroup, *, sends: bool, device: torch.device) -> None:
    """Send the first byte of a stream; the hosts of its two ranks wait for each other."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    peer = next(r for r in dist.get_process_group_ranks(group) if r != dist.get_rank())
    if sends:
        dist.send(byte, peer, group)
    else:
        dist.recv(byte, peer, group)


def _handed_over(leaf: Any) -> Any:
    """A tensor as the other stage's own: the graph ends between the two."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
