"""Which message passes between which ranks, in which order.

A forward sends its output to the next stage, a backward (or its input part) the gradient of its
input to the stage before. All messages from one rank to another travel in one channel, in the order
in which the sender's list of actions makes them; as every rank knows the whole schedule, the
receiver posts its receives in that order. Where it needs them in another order (a custom schedule),
what arrives early waits. So no two ranks can wait for each other's transfers, with backends that
match messages by order alone (NCCL) too. Stages on the same rank hand their tensors over directly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch import tree_map
from lightning_megatron.comm.point_to_point import Channel, DeviceChannel, InlineChannel
from lightning_megatron.pipeline.schedule import Action, Kind, Schedule
from lightning_megatron.topology.mesh import Topology

_TAG = 1


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank under a schedule; a message is named by the action that needs it."""

    schedule: Schedule
    rank: int

    @cached_property
    def incoming(self) -> dict[int, tuple[Action, ...]]:
        """For every other rank what it sends here, in order."""
        found: dict[int, list[Action]] = {}
        for sender, actions in enumerate(self.schedule.actions):
            for action in actions:
                target = receiver_of(action, self.schedule)
                if target is not None and self._rank_of(target) == self.rank != sender:
                    found.setdefault(sender, []).append(target)
        return {sender: tuple(actions) for sender, actions in found.items()}

    @cached_property
    def outgoing(self) -> dict[int, int]:
        """For every other rank the number of messages that it gets from here."""
        found: dict[int, int] = {}
        for action in self.schedule.row(self.rank):
            target = receiver_of(action, self.schedule)
            owner = self.rank if target is None else self._rank_of(target)
            if owner != self.rank:
                found[owner] = found.get(owner, 0) + 1
        return found

    def _rank_of(self, action: Action) -> int:
        return self.schedule.rank_of_stage(action.stage)


def receiver_of(action: Action, schedule: Schedule) -> Action | None:
    """The action that waits for what ``action`` makes; its kind is ``F`` or ``B`` (for ``I`` too).

    >>> from lightning_megatron.pipeline.schedule import make_schedule
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


class Links:
    """This rank's connections to the other ranks of its pipeline.

    Args:
        topology: the layout.
        host_group: gloo group over the pp axis, where the device's own group is not gloo.
            Constructing is then collective over all processes.
    """

    def __init__(self, topology: Topology, host_group: dist.ProcessGroup | None = None) -> None:
        self._pp, self._device, self._host_group = topology.pp, topology.device, host_group
        # Messages up and down the ranks must not queue behind each other on a device.
        self._device_groups = (
            (topology.new_group("pp"), topology.new_group("pp")) if host_group is not None else None
        )
        self._to: dict[int, Channel] = {}
        self._from: dict[int, Channel] = {}
        self._arrived: dict[Action, Any] = {}
        self._due: dict[int, Iterator[Action]] = {}
        self._traffic: Traffic

    def begin(self, traffic: Traffic) -> None:
        """Start a step; the other ranks must do so with the same schedule."""
        self._traffic = traffic
        self._arrived.clear()
        self._due = {}
        for sender, actions in traffic.incoming.items():
            self._due[sender] = iter(actions)
            channel = self._channel(self._from, sender, sends=False)
            channel.expect(len(actions))
            channel.prepost()
        for receiver, count in traffic.outgoing.items():
            self._channel(self._to, receiver, sends=True).expect(count)

    def send(self, action: Action, tree: Any) -> None:
        """Pass on what ``action`` made; its tensors may be freed at once."""
        target = receiver_of(action, self._traffic.schedule)
        if target is None:
            return
        owner = self._traffic.schedule.rank_of_stage(target.stage)
        if owner == self._traffic.rank:
            self._arrived[target] = tree_map(_handed_over, tree)
        else:
            self._to[owner].send(tree)

    def receive(self, action: Action) -> Any:
        """What ``action`` needs from another stage."""
        kind, stage, microbatch = action
        kind = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        wanted = Action(kind, stage, microbatch)
        if wanted not in self._arrived:
            source = stage - 1 if kind is Kind.FORWARD else stage + 1
            sender = self._traffic.schedule.rank_of_stage(source)
            channel = self._from[sender]
            for due in self._due[sender]:
                message = channel.receive()
                if due == wanted:
                    return message
                self._arrived[due] = message
        return self._arrived.pop(wanted)

    def end(self) -> None:
        """Wait until everything sent has left."""
        for channel in self._to.values():
            channel.flush()

    def _channel(self, channels: dict[int, Channel], peer: int, *, sends: bool) -> Channel:
        if peer not in channels:
            channels[peer] = self._make_channel(peer, sends=sends)
        return channels[peer]

    def _make_channel(self, peer: int, *, sends: bool) -> Channel:
        pp = self._pp
        rank = pp.ranks[peer]
        if pp.group is None:
            raise RuntimeError("a pipeline needs a pp axis of at least two ranks")
        if self._host_group is None or self._device_groups is None:
            return InlineChannel(rank, pp.group, _TAG, pp.meter)
        ascends = (peer > pp.rank) == sends
        group = self._device_groups[0 if ascends else 1]
        assert group is not None
        host = InlineChannel(rank, self._host_group, _TAG)
        return DeviceChannel(rank, group, host, self._device, pp.meter)


def _handed_over(leaf: Any) -> Any:
    """A tensor as the other stage's own: the graph ends between the two."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
