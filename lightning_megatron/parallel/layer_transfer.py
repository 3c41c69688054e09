"""Tensors that move from one pipeline stage to another, with their optimizer state.

The ranks of a pipeline that have the same coordinates on every other axis hold the same slices (tp)
of the same shards (ZeRO) of whatever they hold. So a parameter that changes its stage travels
shard by shard between such ranks, along pp alone: every byte moves once, and no rank ever sees more
than its own share. Only a parameter that becomes whole (because several stages of one rank share it
now) is gathered first, and one that ceases to be is cut where it arrives.

All ranks walk through the same list of tensors in the same order, one at a time: nothing can wait
in a circle, and what is under way is one tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_megatron._torch import shard_of
from lightning_megatron.topology.mesh import Topology

Key = tuple[str | int, ...]
"""Name of a tensor, the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Description of a tensor for the other ranks; travels as an object."""

    shape: tuple[int, ...]
    """Shape of this rank's part."""
    dtype: torch.dtype
    whole_shape: tuple[int, ...] | None = None
    """Shape of what the data-parallel ranks hold together; None if this rank holds it whole."""
    on_host: bool = False
    """Whether it lives on the host, whatever the device."""
    distributed: bool = False
    """Whether it is a DTensor for its owner."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A tensor that a rank gives away, or keeps for its new place."""

    tensor: Tensor
    """Plain, contiguous in no particular way; on the host if there was to be room on the device."""
    about: TensorInfo
    """Description for the others."""
    cut: "ZeroShard | None"
    """Place in the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class ZeroShard:
    """Shard of a tensor under ZeRO."""

    mesh: DeviceMesh
    placements: tuple[object, ...]
    shape: tuple[int, ...]
    """Shape of the whole (which may be a slice over tp)."""
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "ZeroShard | None":
        """The cut of a DTensor; None for a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        return cls(
            mesh=tensor.device_mesh,
            placements=tensor.placements,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor of which ``local`` is this rank's part."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,  # type: ignore[arg-type]
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that all data-parallel ranks hold whole."""
        cut = distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)  # type: ignore[arg-type]
        return shard_of(cut)


def parcel(tensor: Tensor, cut: ZeroShard | None) -> Parcel:
    """Take a tensor out of its place.

    Args:
        tensor: what this rank holds; a DTensor or plain.
        cut: of the parameter that ``tensor`` belongs to, if ``tensor`` is cut like it.
    """
    local = shard_of(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()
    return Parcel(
        tensor=local.cpu(),  # the same where it is there already
        about=TensorInfo(
            shape=tuple(local.shape),
            dtype=local.dtype,
            whole_shape=None if cut is None else cut.shape,
            on_host=local.device.type == "cpu",
            distributed=isinstance(tensor, DTensor),
        ),
        cut=cut,
    )


def relocate(
    parcels: dict[Key, Parcel],
    announced: Sequence[Mapping[Key, TensorInfo]],
    wanted: Mapping[Key, bool],
    deliver: Callable[[Key, Tensor, TensorInfo], None],
    topology: Topology,
) -> None:
    """Bring every tensor to the ranks of the pipeline that want it; collective.

    Args:
        parcels: what this rank gives; is emptied on the way.
        announced: of every rank of the pipeline, what it gives.
        wanted: what this rank wants, and whether whole (True) or its shard.
        deliver: is handed what arrives, on the device it is to live on; whole where that is what
            was announced, even if a shard is wanted.
        topology: the layout.
    """
    pp = topology.pp
    wishes: list[Mapping[Key, bool]] = pp.all_gather_object(dict(wanted))
    for key, takers in _routes(announced, wishes):
        gathered: Tensor | None = None
        for source, taker in takers:
            about = announced[source][key]
            to_whole = about.whole_shape is not None and wishes[taker][key]
            if pp.rank not in (source, taker):
                continue
            payload: Tensor | None = None
            if pp.rank == source:
                given = parcels[key]
                if to_whole and gathered is None:
                    assert given.cut is not None
                    gathered = given.cut.wrap(given.tensor.to(topology.device)).full_tensor()
                payload = gathered if to_whole else given.tensor
            if to_whole:
                assert about.whole_shape is not None
                about = replace(about, shape=about.whole_shape, whole_shape=None)
            if source != taker:
                payload = _pass_on(payload, about, pp.ranks[source], pp.ranks[taker], topology)
            if pp.rank == taker:
                assert payload is not None
                place = torch.device("cpu") if about.on_host else topology.device
                deliver(key, payload.to(place), about)
        parcels.pop(key, None)


def _routes(
    announced: Sequence[Mapping[Key, TensorInfo]], wishes: list[Mapping[Key, bool]]
) -> Iterator[tuple[Key, list[tuple[int, int]]]]:
    """Sender and receivers of every tensor; a rank that has it takes its own."""
    first: dict[Key, int] = {}
    for rank, given in enumerate(announced):
        for key in given:
            first.setdefault(key, rank)
    for key, source in first.items():
        yield (
            key,
            [
                (taker if key in announced[taker] else source, taker)
                for taker, wish in enumerate(wishes)
                if key in wish
            ],
        )


def _pass_on(
    payload: Tensor | None, about: TensorInfo, source: int, taker: int, topology: Topology
) -> Tensor | None:
    """Send a tensor or receive it; as bytes, which every backend knows."""
    group = topology.pp.group
    if payload is not None:
        if payload.numel():
            flat = payload.to(topology.device).contiguous().reshape(-1)
            dist.send(flat.view(torch.uint8), dst=taker, group=group)
        return None
    received = torch.empty(about.shape, dtype=about.dtype, device=topology.device)
    if received.numel():
        dist.recv(received.reshape(-1).view(torch.uint8), src=source, group=group)
    return received
