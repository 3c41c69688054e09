"""Rows of parameters back from their owners, after an optimizer step (ZeRO 1 and 2).

Each rank's optimizer has stepped on the rows it owns (`parallel.owned_rows`); now every rank needs
all of them. They travel in the format of the parameter, so in bfloat16 where the rows are float32
and the parameter is narrow (or as a `RowCodec` packs them), in buckets of about 25 MB in the order
of the network: ``P (n - 1) / n`` elements sent by each of ``n`` ranks for ``P`` elements.

All buckets are started as soon as the step is done, and each is written while the next is under
way. On a GPU waiting is a matter of streams: the host goes on at once, and whatever reads a weight
afterwards runs after its gather. On a CPU the host waits. It could wait later, in front of the
first forward that needs a weight; but anything may read weights before and beside forwards
(``F.linear(x, self.net[0].weight)``, a data set that asks the network, a hook, a logger), where
nothing would tell it to wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron._torch import start_all_gather
from lightning_megatron.comm.scratch import Scratch
from lightning_megatron.comm.two_levels import TwoLevelGather, Wires
from lightning_megatron.parallel.grad_buckets import BUCKET_BYTES
from lightning_megatron.parallel.owned_rows import OwnedRows
from lightning_megatron.topology.mesh import Levels
from lightning_megatron.topology.meter import Meter


class RowCodec(Protocol):
    """Packing of one parameter's rows for transfer."""

    dtype: torch.dtype
    """Type of the packed elements, one for each element of the rows."""

    def pack(self, values: Tensor) -> Tensor:
        """Packed form of this rank's rows; all ranks call it in the same order."""
        ...

    def unpack(self, packed: Tensor) -> Tensor:
        """Values of the parameter from packed rows of any rank."""
        ...

    def round_trip(self, values: Tensor) -> Tensor:
        """Values of the parameter from the rows that were packed last."""
        ...


@dataclass
class _Bucket:
    members: list[OwnedRows]
    wire: torch.dtype
    works: list[dist.Work] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    """Buffers of the transfer: on CPUs one for every rank."""
    gather: TwoLevelGather | None = None
    """Gather of the parts where the ranks are on several nodes."""


class RowGather:
    """Gathers rows into the parameters they belong to.

    Args:
        group: the ranks that divide the rows.
        meter: counts what is sent, and how long nothing else is done.
        bucket_bytes: size at which a bucket is full.
        scratch: memory for what is sent and received.
        levels: the group inside and across nodes; None where it is on one node.

    Attributes:
        codecs: how rows are packed, where a cast is not what is wanted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        meter: Meter | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        scratch: Scratch | None = None,
        levels: Levels | None = None,
    ) -> None:
        self._scratch = Scratch() if scratch is None else scratch
        self._group = group
        self._meter = Meter() if meter is None else meter
        self._wires = None if levels is None else Wires(levels, self._meter, self._scratch)
        self._bucket_bytes = bucket_bytes
        self._plans: dict[tuple[int, ...], list[_Bucket]] = {}
        self.codecs: dict[nn.Parameter, RowCodec] = {}

    def forget_plans(self) -> None:
        """Ways of packing have changed."""
        self._plans.clear()

    def gather(self, members: Sequence[OwnedRows]) -> None:
        """Make the parameters of ``members`` whole and new; collective.

        Args:
            members: the same parameters in the same order on all ranks.
        """
        key = tuple(map(id, members))
        if key not in self._plans:
            self._plans[key] = self._in_buckets(members)
        for bucket in self._plans[key]:
            self._start(bucket)
        for bucket in self._plans[key]:
            if bucket.gather is not None:
                bucket.gather.advance()
        for bucket in self._plans[key]:
            self._finish(bucket)

    def _in_buckets(self, members: Sequence[OwnedRows]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        open_: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
        for rows in members:
            parameter = rows.parameter
            codec = self.codecs.get(parameter)
            wire = parameter.dtype if codec is None else codec.dtype
            key = wire, parameter.device
            bucket, size = open_.get(key, (None, self._bucket_bytes))
            if bucket is None or size >= self._bucket_bytes:
                bucket, size = _Bucket([], wire), 0
                buckets.append(bucket)
            bucket.members.append(rows)
            open_[key] = bucket, size + parameter.numel() * wire.itemsize
        return buckets

    def _start(self, bucket: _Bucket) -> None:
        device = bucket.members[0].parameter.device
        if device.type == "cpu" and self._wires is not None:
            self._start_two_levels(bucket, self._wires)
        elif device.type == "cpu":
            self._start_broadcasts(bucket, device)
        else:
            self._start_padded(bucket, device)

    def _packed(self, rows: OwnedRows) -> Tensor:
        values, codec = rows.values.detach(), self.codecs.get(rows.parameter)
        return (values if codec is None else codec.pack(values)).reshape(-1)

    def _start_two_levels(self, bucket: _Bucket, wires: Wires) -> None:
        """Start the gather on two levels, so that every rank's rows reach another node once."""
        sizes = [sum(_sizes(bucket.members, rank)) for rank in range(self._group.size())]
        bucket.gather = gather = TwoLevelGather(wires, sizes, bucket.wire)
        bucket.parts, own = gather.parts, gather.parts[self._group.rank()]
        if own.numel():
            torch.cat([self._packed(r).to(bucket.wire) for r in bucket.members], out=own)
        gather.start()

    def _start_broadcasts(self, bucket: _Bucket, device: torch.device) -> None:
        """Start one broadcast per rank: on gloo quicker than an all-gather."""
        mine = self._group.rank()
        for rank in range(self._group.size()):
            part = self._scratch.take(sum(_sizes(bucket.members, rank)), bucket.wire, device)
            if rank == mine and part.numel():
                torch.cat([self._packed(r).to(bucket.wire) for r in bucket.members], out=part)
            bucket.parts.append(part)
            if part.numel():
                source = dist.get_global_rank(self._group, rank)
                work = dist.broadcast(part, source, group=self._group, async_op=True)
                assert work is not None
                self._meter.started(work)
                bucket.works.append(work)
        self._meter.broadcasts(bucket.parts[mine].nbytes * (self._group.size() - 1), self._group)

    def _start_padded(self, bucket: _Bucket, device: torch.device) -> None:
        sizes = [rows.numel_of(0) for rows in bucket.members]
        sent = torch.empty(sum(sizes), dtype=bucket.wire, device=device)
        offset = 0
        for rows, size in zip(bucket.members, sizes, strict=True):
            packed = self._packed(rows)
            sent[offset : offset + packed.numel()].copy_(packed)
            offset += size
        received = sent.new_empty(self._group.size() * len(sent))
        bucket.parts = [sent, received]
        self._meter.ring(sent.nbytes * (self._group.size() - 1), self._group)
        bucket.works = [start_all_gather(received, sent, self._group)]
        self._meter.started(bucket.works[0])

    def _finish(self, bucket: _Bucket) -> None:
        for work in bucket.works:
            self._meter.wait(work)
        if bucket.gather is not None:
            bucket.gather.wait()
        with torch.no_grad():
            if bucket.members[0].parameter.device.type == "cpu":
                self._write_parts(bucket)
            else:
                self._write_padded(bucket)
        if bucket.gather is not None:
            bucket.gather.release()
        else:
            for part in bucket.parts:
                self._scratch.give(part)
        bucket.works, bucket.parts, bucket.gather = [], [], None
        for rows in bucket.members:
            rows.told()

    def _write_parts(self, bucket: _Bucket) -> None:
        for rank, part in enumerate(bucket.parts):
            pieces = torch.split(part, _sizes(bucket.members, rank))
            for rows, piece in zip(bucket.members, pieces, strict=True):
                # What this rank owns is there already, unless it is a copy.
                if not piece.numel() or (rank == self._group.rank() and not rows.is_copy):
                    continue
                codec = self.codecs.get(rows.parameter)
                target = rows.part_of(rows.parameter.detach(), rank)
                values = piece.view(target.shape)
                target.copy_(values if codec is None else codec.unpack(values))

    def _write_padded(self, bucket: _Bucket) -> None:
        ranks = self._group.size()
        received = bucket.parts[1].view(ranks, -1)
        offset = 0
        for rows in bucket.members:
            codec, size = self.codecs.get(rows.parameter), rows.numel_of(0)
            parts = received[:, offset : offset + size]
            offset += size
            rows.write_parts(parts, None if codec is None else codec.unpack)


def _sizes(members: Sequence[OwnedRows], rank: int) -> list[int]:
    """Elements that ``rank`` owns of every member."""
    return [rows.numel_of(rank) for rows in members]
