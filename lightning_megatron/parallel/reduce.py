"""ZeRO 0 in one number format: the mean of whole gradients, taken while backward still runs.

Where nothing is sharded and parameters compute in the format they rest in, FSDP2 has nothing to do
but reduce, and its flat copies of every gradient cost more than the reduction (measured on two CPU
processes: a step of 1.06 to 1.20 of `DistributedDataParallel`'s, against 0.93 to 0.99 here). So
these parameters stay plain tensors. They are grouped in *buckets*, last parameters first, as
backward reaches them. A bucket whose gradients are all there is copied together and summed by one
asynchronous all-reduce (Li et al., arXiv 2006.15704, section 3.2); buckets are started in a fixed
order, so that all ranks agree whatever each of them found unused. Gradients narrower than float32
are summed in float32.

The reduction has a process group of its own: other collectives over the same ranks, such as those
of SyncBatchNorm, may then come between two buckets in any order.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.topology.meter import Meter

BUCKET_BYTES = 25 << 20
"""Gradients that are reduced together; a smaller first bucket would start earlier, but is as much
work for the host as a large one."""


class _Started(NamedTuple):
    """A bucket under way."""

    work: dist.Work | None
    """None for a bucket of frozen parameters."""
    flat: Tensor
    """Gradients one after the other, then one flag each: whether this rank has one."""
    members: list[nn.Parameter]


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    waiting: set[int] = field(default_factory=set)
    """Positions of the parameters whose gradient is still to come."""
    watched: set[int] = field(default_factory=set)
    """Positions of the parameters that have a hook."""


class MeanReducer:
    """Averages the gradients of whole parameters over the ranks of a group.

    Args:
        parameters: plain tensors, the same on every rank, in the order of the network.
        group: whose ranks average.
        bucket_bytes: size at which a bucket is full.
        meter: counts what is sent, and how long nothing else is done.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        meter: Meter | None = None,
    ) -> None:
        self._meter = Meter() if meter is None else meter
        self._group = group
        self._buckets = _in_buckets(parameters, bucket_bytes)
        self._started: list[_Started] = []
        self._armed = False

    def arm(self) -> None:
        """Reduce with the coming backward: what ``.grad`` holds after it."""
        self._armed = True
        for number, bucket in enumerate(self._buckets):
            bucket.waiting = {i for i, p in enumerate(bucket.parameters) if p.requires_grad}
            for position in bucket.waiting - bucket.watched:  # may have been frozen until now
                bucket.watched.add(position)
                hook = _Arrival(weakref.ref(self), number, position)
                bucket.parameters[position].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Reduce what ``.grad`` holds now, beginning with what has not begun yet."""
        while len(self._started) < len(self._buckets):
            self._start_next()

    def finish(self) -> None:
        """After the backward: wait until every ``.grad`` is the mean; collective.

        A rank without a gradient counts as zeros and receives the mean; one that no rank has stays
        None.
        """
        self.start()
        self._armed = False
        for started in self._started:
            if started.work is not None:
                self._meter.wait(started.work)
                self._write(started)
        self._started.clear()

    def arrived(self, number: int, position: int) -> None:
        """A gradient of a bucket is complete; start every one that is full and next in order."""
        if not self._armed:
            return
        self._buckets[number].waiting.discard(position)
        while (
            len(self._started) < len(self._buckets)
            and not self._buckets[len(self._started)].waiting
        ):
            self._start_next()

    def _start_next(self) -> None:
        members = [p for p in self._buckets[len(self._started)].parameters if p.requires_grad]
        pieces = [
            (torch.zeros_like(p) if p.grad is None else p.grad.detach()).reshape(-1)
            for p in members
        ]
        if not members:
            self._started.append(_Started(None, torch.empty(0), members))
            return
        wide = torch.promote_types(pieces[0].dtype, torch.float32)
        held = [float(p.grad is not None) for p in members]
        flags = torch.tensor(held, dtype=wide, device=pieces[0].device)
        flat = torch.cat([*(piece.to(wide) for piece in pieces), flags])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        ranks = self._group.size()
        self._meter.count(2 * flat.numel() * flat.element_size() * (ranks - 1) / ranks)
        self._meter.started(work)
        self._started.append(_Started(work, flat, members))

    def _write(self, started: _Started) -> None:
        count = len(started.members)
        flags, flat = started.flat[-count:], started.flat[:-count]
        flat.mul_(1.0 / self._group.size())
        # Reading the flags waits for the device, so only a rank that misses a gradient looks.
        missing = any(p.grad is None for p in started.members)
        held = flags.tolist() if missing else [1.0] * count
        pieces = torch.split(flat, [p.numel() for p in started.members])
        for parameter, piece, holders in zip(started.members, pieces, held, strict=True):
            if holders:
                # Of the same format: a view of the bucket, which saves a copy of all gradients.
                held_in = parameter.grad_dtype or parameter.dtype
                parameter.grad = piece.view(parameter.shape).to(held_in)


@dataclass(frozen=True)
class _Arrival:
    """Hook on a parameter; knows its place, as parameters compare by element.

    It refers to the reducer weakly, and to no parameter: torch holds it where Python's garbage
    collector does not look, so that a cycle through it would keep the model, its gradients and the
    process group (with its threads) for as long as the process lives.
    """

    reducer: "weakref.ref[MeanReducer]"
    number: int
    """Of the bucket."""
    position: int

    def __call__(self, parameter: Tensor) -> None:
        if (reducer := self.reducer()) is not None:
            reducer.arrived(self.number, self.position)


def _in_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Buckets of one format and device each, the last parameters first."""
    buckets: list[_Bucket] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for parameter in reversed(parameters):
        key = parameter.dtype, parameter.device
        bucket, size = open_.get(key, (None, bucket_bytes))
        if bucket is None or size >= bucket_bytes:
            bucket, size = _Bucket([]), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_[key] = bucket, size + parameter.numel() * parameter.element_size()
    return buckets
