"""The mean of whole gradients over the data-parallel ranks, taken while backward still runs.

Parameters are grouped in *buckets* of about 25 MB, last parameters first, as backward reaches them.
A bucket whose gradients are all there is copied together and communicated at once, while backward
goes on (Li et al., arXiv 2006.15704, section 3.2). Buckets are started in a fixed order, so that
all ranks agree whatever each of them found unused. What a bucket becomes depends on who needs it:

* *whole* (ZeRO 0, and any stage below 3 while somebody looks at gradients): one all-reduce, after
  which every ``.grad`` is the mean;
* *rows* (ZeRO 1 and 2): one reduce-scatter. The bucket is laid out by owner, each part being the
  rows that one rank owns of every member (`zero.owned_rows`). The whole gradients are freed at
  once. ZeRO 2 does this for every microbatch, and adds the rows up.

With ``P`` elements and ``n`` ranks that is ``2 P (n - 1) / n`` sent by each rank for whole
gradients, and half of it for rows, whose parts are padded to equal lengths.

A rank that has no gradient for a parameter counts as zeros, and a gradient that no rank has stays
None: every part ends with one flag per member that says whether this rank had one. Gradients
narrower than float32 are summed in float32 unless told otherwise.

*Memory.* At most `IN_FLIGHT` buckets are under way at a time: before a further one starts, the
oldest is taken in. With float32 sums a backward needs, beside what it keeps itself, ``4 P`` bytes
for whole gradients (``.grad`` becomes a view of its bucket when that sets out, so there is no
second copy), and for rows ``4 P / n`` bytes, the buckets under way and one that is filled. On a GPU
the stream waits, and the host goes on.

The reduction has process groups of its own: other collectives over the same ranks, such as those of
SyncBatchNorm, may then come between two buckets in any order. Where there are such collectives
(`GradientBuckets.meets`) no backward waits for a bucket: a rank that leaves a parameter unused
starts the bucket at its end only, and would wait there for the collective of the one that waits.
Buckets are then taken in as far as they have ended.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron._torch.collectives import start_reduce_scatter
from lightning_megatron._torch.devices import from_host
from lightning_megatron.topology.meter import Meter
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.owned_rows import OwnedRows

BUCKET_BYTES = 25 << 20
"""Gradients that are reduced together; a smaller first bucket would start earlier, but is as much
work for the host as a large one."""
IN_FLIGHT = 2
"""Buckets that are under way at a time; the next is filled meanwhile."""


@dataclass(frozen=True, kw_only=True)
class ReductionGroups:
    """Groups of ranks that average the gradients of a parameter."""

    everyone: dist.ProcessGroup
    """All ranks over which gradients are averaged."""
    shard: dist.ProcessGroup | None = None
    """The ranks that divide the rows of parameters; None where none are divided."""
    replicate: dist.ProcessGroup | None = None
    """The ranks that own the same rows; None where there are no others."""


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    groups: ReductionGroups
    waiting: set[int] = field(default_factory=set)
    """Positions of the parameters whose gradient is still to come."""
    watched: set[int] = field(default_factory=set)
    """Positions of the parameters that have a hook."""
    members: list[nn.Parameter] = field(default_factory=list)
    """The parameters that take part in the reduction that is under way, or in the batch's rows."""
    rows: list[OwnedRows] = field(default_factory=list)
    """Rows that this rank owns of the members, where ranks divide them."""
    had: set[int] = field(default_factory=set)
    """Positions among the members for which this rank has had a gradient in this batch."""
    work: dist.Work | None = None
    sent: Tensor | None = None
    """The tensor given to the collective; it stays until it has ended."""
    is_gradient: bool = False
    """Whether every member's ``.grad`` is a piece of `sent`."""
    received: Tensor | None = None
    total: Tensor | None = None
    """This rank's part with its flags, summed over the microbatches of a batch."""

    def pieces(self) -> list[Tensor]:
        """Gradients of the members in what was sent; no views of it: ``detach_()`` is allowed."""
        assert self.sent is not None
        sizes = [parameter.numel() for parameter in self.members]
        pieces = torch.split(self.sent[: sum(sizes)], sizes)
        return [
            piece.view(parameter.shape).detach()
            for piece, parameter in zip(pieces, self.members, strict=True)
        ]


@memory_of_parts
class GradientBuckets:
    """Averages the gradients of whole parameters.

    Args:
        parameters: plain tensors, the same on every rank, in the order of the network.
        groups: whose ranks average each of them. Ranks of one group have the same parameters.
        rows: what this rank owns of the parameters; None where all ranks own everything.
        names: of the parameters, for messages.
        bucket_bytes: size at which a bucket is full.
        reduction: format of the sums; None: that of the gradients, at least float32.
        meter: counts what is sent, and how long nothing else is done.
        meets: whether ranks that average also communicate with each other in the midst of a
            backward.
        alone: whether `finish` follows at once upon the last backward of a batch. What is full with
            the last gradients is then left to it: a hook on each parameter costs more.

    Attributes:
        whole: whether ``.grad`` is to hold the mean, also where rows have owners; these get them if
            not.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Mapping[nn.Parameter, ReductionGroups],
        *,
        rows: Mapping[nn.Parameter, OwnedRows] | None = None,
        names: Mapping[nn.Parameter, str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        reduction: torch.dtype | None = None,
        meter: Meter | None = None,
        meets: bool = False,
        alone: bool = False,
    ) -> None:
        self._meter = Meter() if meter is None else meter
        self._meets = meets
        self._alone = alone
        self._rows = rows or {}
        self._names = names or {}
        self._reduction = reduction
        self._buckets = _in_buckets(parameters, groups, bucket_bytes)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._under_way: deque[_Bucket] = deque()
        self._started = 0
        self._armed = False
        self._last = True
        self.whole = False

    def arm(self, *, last: bool = True) -> None:
        """Reduce with the coming backward: what ``.grad`` holds after it.

        Args:
            last: whether it is the last of a batch. Gradients that stay whole wait for it in
                ``.grad``.
        """
        self._armed = True
        self._last = last
        watched = len(self._buckets) - (self._alone and last)
        for number, bucket in enumerate(self._buckets):
            bucket.waiting = {i for i, p in enumerate(bucket.parameters) if p.requires_grad}
            if number >= watched:
                continue
            for position in bucket.waiting - bucket.watched:  # may have been frozen until now
                bucket.watched.add(position)
                hook = _Arrival(weakref.ref(self), number, position)
                parameter = bucket.parameters[position]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def start(self, *, last: bool = True) -> None:
        """Reduce what ``.grad`` holds now, beginning with what has not begun yet; see `arm`."""
        self._last = last
        while self._started < len(self._buckets):
            self._take_in(IN_FLIGHT - 1)
            self._start_next()

    def finish(self) -> None:
        """Take in what was reduced, after the backward; collective.

        A rank without a gradient counts as zeros and receives the mean; one that no rank has stays
        None. Rows are added up until `settle`.
        """
        self.start(last=self._last)
        self._armed = False
        self._started = 0
        self._take_in(0)

    def settle(self) -> None:
        """The microbatches of a batch have ended: give the rows their mean; collective."""
        buckets = [bucket for bucket in self._buckets if bucket.total is not None]
        copied = [bucket for bucket in buckets if bucket.groups.replicate is not None]
        for work in [self._sum_over_copies(bucket) for bucket in copied]:
            self._meter.wait(work)
        for bucket in buckets:
            self._give_rows(bucket)
            bucket.total, bucket.had = None, set()

    def forget(self) -> None:
        """Drop what was reduced of a batch that did not end."""
        self._armed = False
        self._last = True
        self._started = 0
        self._under_way.clear()
        for bucket in self._buckets:
            bucket.total, bucket.had = None, set()
            bucket.work = bucket.sent = bucket.received = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for bucket in self._buckets:
            bucket.watched.clear()

    def arrived(self, number: int, position: int) -> None:
        """A gradient of a bucket is complete; start every one that is full and next in order.

        Raises:
            RuntimeError: the bucket was reduced already; what came now would be lost.
        """
        if not self._armed:
            return
        bucket = self._buckets[number]
        if number < self._started:
            name = self._names.get(bucket.parameters[position], "a parameter")
            raise RuntimeError(
                f"{name}: one backward gave it two gradients, one after the other, and the first "
                "was averaged over the data-parallel ranks already. A checkpoint with "
                "use_reentrant=True does that to parameters that are used in and outside of it, or "
                "in two of them; use_reentrant=False does not"
            )
        bucket.waiting.discard(position)
        while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
            self._take_in(IN_FLIGHT - 1, wait=not self._meets)
            self._start_next()

    def _take_in(self, most: int, *, wait: bool = True) -> None:
        """Take in the oldest buckets under way until ``most`` are left.

        Args:
            most: number of buckets that may stay under way.
            wait: whether to wait for them, or to leave what has not ended.
        """
        while len(self._under_way) > most:
            bucket = self._under_way[0]
            assert bucket.work is not None
            if not (wait or bucket.work.is_completed()):
                return
            self._meter.wait(bucket.work)
            with torch.no_grad():
                if self._sums(bucket):
                    self._write(bucket)
                else:
                    self._add_part(bucket)
            bucket.work = bucket.sent = bucket.received = None
            self._under_way.popleft()

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        self._started += 1
        if self._sums(bucket) and not self._last:
            return
        members = [p for p in bucket.parameters if p.requires_grad]
        if not _same(members, bucket.members):
            if bucket.total is not None:
                raise RuntimeError("parameters began or ceased to be trained between microbatches")
            bucket.members = members
            bucket.rows = [self._rows[p] for p in members if p in self._rows]
        if not members:
            return
        held = [p.grad is not None for p in members]
        wide, device = self._summed_in(members), members[0].device
        flags = from_host(held, wide, device)
        with torch.no_grad():
            if self._sums(bucket):
                self._start_sum(bucket, flags)
            else:
                self._start_scatter(bucket, flags)
                bucket.had |= {i for i, has in enumerate(held) if has}
        self._under_way.append(bucket)
        self._meter.started(bucket.work)

    def _summed_in(self, members: Sequence[nn.Parameter]) -> torch.dtype:
        """Format of a bucket's sums."""
        if self._reduction is not None:
            return self._reduction
        held = next((p.grad for p in members if p.grad is not None), members[0])
        return torch.promote_types(held.dtype, torch.float32)

    def _sums(self, bucket: _Bucket) -> bool:
        """Whether a bucket's gradients stay whole."""
        return self.whole or bucket.groups.shard is None

    # Whole gradients -----------------------------------------------------------------------------

    def _start_sum(self, bucket: _Bucket, flags: Tensor) -> None:
        pieces = [
            flags.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1)
            for p in bucket.members
        ]
        length = sum([p.numel() for p in bucket.members]) + len(flags)
        bucket.sent = flat = flags.new_empty(length)
        torch.cat([*pieces, flags], out=flat)
        bucket.is_gradient = True
        for parameter, piece in zip(bucket.members, bucket.pieces(), strict=True):
            if parameter.grad is not None and _is_gradient_of(piece, parameter):
                parameter.grad = piece
            else:
                bucket.is_gradient = False
        everyone = bucket.groups.everyone
        bucket.work = dist.all_reduce(flat, group=everyone, async_op=True)
        ranks = everyone.size()
        sent = 2 * flat.numel() * flat.element_size() * (ranks - 1) / ranks
        self._meter.ring(sent, everyone)

    def _write(self, bucket: _Bucket) -> None:
        assert bucket.sent is not None
        members, count = bucket.members, len(bucket.members)
        held = _holders(bucket.sent[-count:], all(p.grad is not None for p in members))
        bucket.sent.mul_(1.0 / bucket.groups.everyone.size())
        if bucket.is_gradient:
            return
        for parameter, mean, holders in zip(members, bucket.pieces(), held, strict=True):
            if not holders:
                continue
            if _is_gradient_of(mean, parameter):
                parameter.grad = mean
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
            parameter.grad.copy_(mean)

    # Rows ----------------------------------------------------------------------------------------

    def _start_scatter(self, bucket: _Bucket, flags: Tensor) -> None:
        group = bucket.groups.shard
        assert group is not None
        ranks, members = group.size(), bucket.rows
        pieces = []
        for parameter, rows in zip(bucket.members, members, strict=True):
            gradient, parameter.grad = parameter.grad, None  # parts that are padded are a copy
            if gradient is None:
                pieces.append(flags.new_zeros(ranks, rows.size))
            else:
                pieces.append(rows.parts_of(gradient))
            del gradient
        length = sum([rows.size for rows in members]) + len(members)
        sent = flags.new_empty(ranks, length)
        torch.cat([*pieces, flags.expand(ranks, -1)], 1, out=sent)
        bucket.sent, bucket.received = sent, flags.new_empty(length)
        self._meter.ring(sent.numel() * sent.element_size() * (ranks - 1) / ranks, group)
        bucket.work = start_reduce_scatter(bucket.received, sent.view(-1), group)

    def _add_part(self, bucket: _Bucket) -> None:
        assert bucket.received is not None
        if bucket.total is None:
            bucket.total = bucket.received
        else:
            bucket.total.add_(bucket.received)

    def _sum_over_copies(self, bucket: _Bucket) -> dist.Work:
        group, total = bucket.groups.replicate, bucket.total
        assert group is not None
        assert total is not None
        work: dist.Work | None = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        ranks = group.size()
        self._meter.ring(2 * total.numel() * total.element_size() * (ranks - 1) / ranks, group)
        self._meter.started(work)
        return work

    def _give_rows(self, bucket: _Bucket) -> None:
        total, members = bucket.total, bucket.rows
        assert total is not None
        flags = total[-len(members) :]
        held = _holders(flags, len(bucket.had) == len(members))
        total = total[: -len(members)].mul_(1.0 / bucket.groups.everyone.size())
        parts = torch.split(total, [rows.size for rows in members])
        for rows, part, holders in zip(members, parts, held, strict=True):
            if not holders:
                continue
            mean = part[: rows.shape.numel()].view(rows.shape)
            if rows.gradient is None:
                rows.gradient = mean
            else:
                rows.gradient.add_(mean)


def _same(one: Sequence[nn.Parameter], other: Sequence[nn.Parameter]) -> bool:
    return list(map(id, one)) == list(map(id, other))


def _is_gradient_of(piece: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a piece of a bucket can be the parameter's ``.grad``."""
    return parameter.is_contiguous() and parameter.grad_dtype in (piece.dtype, None)


def _holders(flags: Tensor, complete: bool) -> list[float]:
    """Number of ranks that had each gradient.

    Reading the flags waits for the device, so only a rank that misses a gradient looks.
    """
    return [1.0] * len(flags) if complete else flags.tolist()


class OwnHook:
    """Base of this library's hooks on gradients that are added up."""


@dataclass(frozen=True)
class _Arrival(OwnHook):
    """Hook on a parameter; knows its place, as parameters compare by element.

    It refers to the buckets weakly, and to no parameter: torch holds it where Python's garbage
    collector does not look, so that a cycle through it would keep the model, its gradients and the
    process group (with its threads) for as long as the process lives.
    """

    buckets: "weakref.ref[GradientBuckets]"
    number: int
    """The index of the bucket."""
    position: int

    def __call__(self, parameter: Tensor) -> None:
        if (buckets := self.buckets()) is not None:
            buckets.arrived(self.number, self.position)


def _in_buckets(
    parameters: Sequence[nn.Parameter],
    groups: Mapping[nn.Parameter, ReductionGroups],
    bucket_bytes: int,
) -> list[_Bucket]:
    """Buckets of one format, device and group each, the last parameters first."""
    buckets: list[_Bucket] = []
    open_: dict[tuple[torch.dtype, torch.device, int], tuple[_Bucket, int]] = {}
    for parameter in reversed(parameters):
        key = parameter.dtype, parameter.device, id(groups[parameter])
        bucket, size = open_.get(key, (None, bucket_bytes))
        if bucket is None or size >= bucket_bytes:
            bucket, size = _Bucket([], groups[parameter]), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_[key] = bucket, size + parameter.numel() * parameter.element_size()
    return buckets
