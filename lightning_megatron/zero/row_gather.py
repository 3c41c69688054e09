"""Rows of parameters back from their owners, after an optimizer step (ZeRO 1 and 2).

Each rank's optimizer has stepped on the rows it owns (`zero.owned_rows`); now every rank needs
all of them. They travel in the format of the parameter, so in bfloat16 where the rows are float32
and the parameter is narrow (or as a `RowCodec` packs them), in buckets of about 25 MB in the order
of the network: ``P (n - 1) / n`` elements sent by each of ``n`` ranks for ``P`` elements.

Buckets are started as soon as the step is done, `IN_FLIGHT` at a time, and each is written while
the next is under way: so much a gather needs beside the parameters. On a GPU waiting is a matter of
streams: the host goes on at once, and whatever reads a weight afterwards runs after its gather. On
a CPU the host waits. It could wait later, in front of the first forward that needs a weight; but
anything may read weights before and beside forwards (``F.linear(x, self.net[0].weight)``, a data
set that asks the network, a hook, a logger), where nothing would tell it to wait.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron._torch.collectives import start_all_gather
from lightning_megatron.topology.meter import Meter
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.grad_buckets import BUCKET_BYTES
from lightning_megatron.zero.owned_rows import OwnedRows

IN_FLIGHT = 2
"""Buckets that are under way at a time."""


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
    wire: torch.dtype
    members: list[OwnedRows] = field(default_factory=list)
    codecs: list[RowCodec | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Elements of each member in a rank's part."""
    work: dist.Work | None = None
    received: Tensor | None = None


@memory_of_parts
class RowGather:
    """Gathers rows into the parameters they belong to.

    Args:
        group: the ranks that divide the rows.
        meter: counts what is sent, and how long nothing else is done.
        bucket_bytes: size at which a bucket is full.

    Attributes:
        codecs: how rows are packed, where a cast is not what is wanted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        meter: Meter | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._meter = Meter() if meter is None else meter
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
            self._plans[key] = self._in_buckets(members, self.codecs)
        self._gather(self._plans[key])

    def gather_plainly(self, members: Sequence[OwnedRows]) -> None:
        """`gather` without codecs, in the formats that the parameters have at this moment."""
        self._gather(self._in_buckets(members, {}))

    def _gather(self, buckets: Sequence[_Bucket]) -> None:
        under_way: deque[_Bucket] = deque()
        for bucket in buckets:
            if len(under_way) == IN_FLIGHT:
                self._finish(under_way.popleft())
            self._start(bucket)
            under_way.append(bucket)
        for bucket in under_way:
            self._finish(bucket)

    def gather_gradients(self, members: Sequence[OwnedRows]) -> None:
        """Make ``.grad`` whole of what the owners hold; collective.

        Args:
            members: the same parameters in the same order on all ranks, all with gradients.
        """
        waiting: list[OwnedRows] = []
        size = 0
        for rows in members:
            gradient = rows.gradient
            assert gradient is not None
            first = gradient if not waiting else waiting[0].gradient
            if size >= self._bucket_bytes or (first is not None and first.dtype != gradient.dtype):
                self._gather_gradients(waiting)
                waiting, size = [], 0
            waiting.append(rows)
            size += rows.parameter.numel() * gradient.itemsize
        if waiting:
            self._gather_gradients(waiting)

    def _gather_gradients(self, members: Sequence[OwnedRows]) -> None:
        found = [rows.gradient for rows in members if rows.gradient is not None]
        sizes = [rows.numel_of(0) for rows in members]
        sent = found[0].new_zeros(sum(sizes))
        for place, gradient in zip(torch.split(sent, sizes), found, strict=True):
            place[: gradient.numel()].copy_(gradient.reshape(-1))
        received = sent.new_empty(self._group.size() * len(sent))
        self._meter.ring(sent.nbytes * (self._group.size() - 1), self._group)
        work = start_all_gather(received, sent, self._group)
        self._meter.started(work)
        self._meter.wait(work)
        with torch.no_grad():
            pieces = torch.split(received.view(self._group.size(), -1), sizes, dim=1)
            for rows, parts in zip(members, pieces, strict=True):
                rows.take_whole_gradient(parts)

    def _in_buckets(
        self, members: Sequence[OwnedRows], codecs: Mapping[nn.Parameter, RowCodec]
    ) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        open_: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
        for rows in members:
            parameter = rows.parameter
            codec = codecs.get(parameter)
            wire = parameter.dtype if codec is None else codec.dtype
            key = wire, parameter.device
            bucket, size = open_.get(key, (None, self._bucket_bytes))
            if bucket is None or size >= self._bucket_bytes:
                bucket, size = _Bucket(wire), 0
                buckets.append(bucket)
            bucket.members.append(rows)
            bucket.codecs.append(codec)
            bucket.sizes.append(rows.size)
            open_[key] = bucket, size + parameter.numel() * wire.itemsize
        return buckets

    def _start(self, bucket: _Bucket) -> None:
        device = bucket.members[0].parameter.device
        pieces = []
        for rows, codec, size in zip(bucket.members, bucket.codecs, bucket.sizes, strict=True):
            values = rows.values if codec is None else codec.pack(rows.values.detach())
            piece = values.reshape(-1) if values.device == device else values.to(device).view(-1)
            pieces.append(piece)
            if piece.numel() < size:
                pieces.append(piece.new_zeros(size - piece.numel()))
        ranks, rank, length = self._group.size(), self._group.rank(), sum(bucket.sizes)
        bucket.received = torch.empty(ranks * length, dtype=bucket.wire, device=device)
        sent = bucket.received.narrow(0, rank * length, length)  # where it belongs, as FSDP2 does
        torch.cat(pieces, out=sent)
        self._meter.ring(sent.nbytes * (ranks - 1), self._group)
        bucket.work = start_all_gather(bucket.received, sent, self._group)
        self._meter.started(bucket.work)

    def _finish(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        assert bucket.received is not None
        self._meter.wait(bucket.work)
        received = bucket.received.view(self._group.size(), -1)
        parts = torch.split(received, bucket.sizes, 1)
        with torch.no_grad():
            for rows, codec, part in zip(bucket.members, bucket.codecs, parts, strict=True):
                rows.write_parts(part, None if codec is None else codec.unpack)
        bucket.work = bucket.received = None
