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
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron._torch import start_all_gather
from lightning_megatron.parallel.grad_buckets import BUCKET_BYTES, part_size
from lightning_megatron.parallel.owned_rows import OwnedRows
from lightning_megatron.topology.meter import Meter


class RowCodec(Protocol):
    """How the rows of one parameter are packed for the way."""

    dtype: torch.dtype
    """What is sent, one element for one."""

    def pack(self, values: Tensor) -> Tensor:
        """What to send of this rank's rows; all ranks call it in the same order."""
        ...

    def unpack(self, packed: Tensor) -> Tensor:
        """What the parameter is to hold of packed rows of any rank."""
        ...

    def round_trip(self, values: Tensor) -> Tensor:
        """What the parameter holds of rows that were packed last."""
        ...


@dataclass
class _Bucket:
    members: list[OwnedRows]
    sizes: list[int]
    wire: torch.dtype
    work: dist.Work | None = None
    sent: Tensor | None = None
    received: Tensor | None = None


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
        self, group: dist.ProcessGroup, meter: Meter | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._group, self._meter = group, Meter() if meter is None else meter
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
            assert bucket.work is not None
            self._meter.wait(bucket.work)
            with torch.no_grad():
                self._write(bucket)
            bucket.work = bucket.sent = bucket.received = None

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
                bucket, size = _Bucket([], [], wire), 0
                buckets.append(bucket)
            bucket.members.append(rows)
            bucket.sizes.append(part_size(parameter, rows.ranks))
            open_[key] = bucket, size + parameter.numel() * wire.itemsize
        return buckets

    def _start(self, bucket: _Bucket) -> None:
        device = bucket.members[0].parameter.device
        sent = torch.empty(sum(bucket.sizes), dtype=bucket.wire, device=device)
        offset = 0
        for rows, size in zip(bucket.members, bucket.sizes, strict=True):
            values, codec = rows.values.detach(), self.codecs.get(rows.parameter)
            packed = values if codec is None else codec.pack(values)
            sent[offset : offset + packed.numel()].copy_(packed.reshape(-1))
            offset += size
        bucket.sent = sent
        bucket.received = sent.new_empty(self._group.size() * len(sent))
        self._meter.count(sent.numel() * sent.element_size() * (self._group.size() - 1))
        bucket.work = start_all_gather(bucket.received, sent, self._group)
        self._meter.started(bucket.work)

    def _write(self, bucket: _Bucket) -> None:
        assert bucket.received is not None
        ranks, mine = self._group.size(), self._group.rank()
        received = bucket.received.view(ranks, -1)
        offset = 0
        for rows, size in zip(bucket.members, bucket.sizes, strict=True):
            parts = received[:, offset : offset + size]
            offset += size
            parameter = rows.parameter.detach()
            rows.told()
            codec = self.codecs.get(rows.parameter)
            if codec is None and parameter.numel() == ranks * size and parameter.is_contiguous():
                whole = parameter.view(ranks, size)
                # What this rank owns is there already, unless it is a copy.
                for part in ((slice(None),) if rows.is_copy else (slice(mine), slice(mine + 1, None))):
                    if whole[part].numel():
                        whole[part].copy_(parts[part])
                continue
            packed = parts.reshape(-1)[: parameter.numel()].view(parameter.shape)
            parameter.copy_(packed if codec is None else codec.unpack(packed))


