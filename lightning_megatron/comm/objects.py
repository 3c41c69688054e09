"""Objects of any kind from one rank to the others of an axis, their tensors as tensors.

The object collectives of ``torch.distributed`` pickle tensors with the rest: all bytes go through
the host, and a tensor is unpickled on the device *of the rank that sent it*: rank 0 of a node gets
tensors on another rank's GPU, and a context there. Here the pickle holds what is not a tensor, and
in the place of each tensor its format and shape. It travels between the hosts, and only when it
differs from the last one. The tensors follow by the axis' own group, in their exact size, and land
on the receiver's device. Tensors in host memory stay there. `ObjectBroadcast` is the form of
`comm.peers.Peers.broadcast` for every batch.

Pickle is as safe here as in ``torch.distributed``: only the ranks of one run take part.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.topology.axis import Axis

_SAME = -1
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, dict, list, tuple, set))
"""Types of most objects in a pickle, which need no check."""
Take: TypeAlias = Callable[[torch.dtype, torch.Size, bool], Tensor]
"""Function that returns a new tensor for a dtype, a shape and whether it is in host memory."""


def dump(
    value: Any, device_type: str, refused: tuple[type, ...] = ()
) -> tuple[bytes, list[Tensor]]:
    """Pickle ``value`` without its tensors, which are returned beside it.

    Args:
        value: anything that can be pickled.
        device_type: kind of device whose tensors are taken out, beside those in host memory.
            Tensors of other kinds or layouts, and those of subclasses, are pickled.
        refused: classes whose objects may not occur.

    Raises:
        StaysInProcessError: ``value`` holds an object of a refused class.
    """
    file, leaves = io.BytesIO(), list[Tensor]()
    _Pickler(file, leaves, device_type, refused).dump(value)
    return file.getvalue(), leaves


def load(skeleton: bytes, take: Take) -> Any:
    """Reverse `dump`; ``take`` returns the tensors in their order."""
    return _Unpickler(skeleton, take).load()


class StaysInProcessError(pickle.PicklingError):
    """An object is of a class that `dump` was asked to refuse."""


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        leaves: list[Tensor],
        device_type: str,
        refused: tuple[type, ...],
    ) -> None:
        super().__init__(file)
        self._leaves = leaves
        self._types = "cpu", device_type
        self._refused = refused
        self._places: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _PLAIN:
            return None
        if isinstance(obj, self._refused):
            raise StaysInProcessError(f"{type(obj).__name__} stays in its process")
        if type(obj) not in (Tensor, nn.Parameter):
            return None
        if obj.layout != torch.strided or obj.is_quantized or obj.device.type not in self._types:
            return None
        place = self._places.setdefault(id(obj), len(self._leaves))
        if place == len(self._leaves):
            self._leaves.append(obj)
        is_parameter, on_host = type(obj) is nn.Parameter, in_host_memory(obj.device)
        return place, obj.dtype, tuple(obj.shape), on_host, obj.requires_grad, is_parameter


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, take: Take) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._take = take
        self._taken = dict[int, Tensor]()

    @override
    def persistent_load(self, pid: Any) -> Any:
        place, dtype, shape, on_host, requires_grad, is_parameter = pid
        if place not in self._taken:
            leaf = self._take(dtype, torch.Size(shape), on_host)
            self._taken[place] = (
                nn.Parameter(leaf, requires_grad)
                if is_parameter
                else leaf.requires_grad_(requires_grad)
            )
        return self._taken[place]


class ObjectBroadcast:
    """Broadcast of objects over an axis from one of its ranks.

    Args:
        axis: axis whose ranks take part.
        source: global rank that has the objects.
        device: device of this process, for tensors that are on a device at the source.
        host_group: gloo group over the axis, where the axis' own group is not gloo.
    """

    def __init__(
        self,
        axis: Axis,
        source: int,
        device: torch.device,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._axis = axis
        self._source = source
        self._device = device
        self._host_group = axis.group if host_group is None else host_group
        self._is_source = axis.ranks[axis.rank] == source
        self._skeleton = b""

    def __call__(self, value: Any) -> Any:
        """Return the source's ``value``; collective over the axis.

        The source gets the object itself; the others get a copy whose tensors are contiguous.
        """
        if self._axis.group is None:
            return value
        if not self._is_source:
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            self._on_host(length)
            if length.item() != _SAME:
                text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
                self._on_host(text)
                self._skeleton = text.numpy().tobytes()
            return load(self._skeleton, self._receive)
        skeleton, leaves = dump(value, self._device.type)
        changed = skeleton != self._skeleton
        self._on_host(torch.tensor([len(skeleton) if changed else _SAME], device="cpu"))
        if changed:
            self._skeleton = skeleton
            self._on_host(torch.frombuffer(bytearray(skeleton), dtype=torch.uint8))
        for leaf in leaves:
            plain = leaf.detach().resolve_conj().resolve_neg().contiguous()
            self._axis.meter.exchange(plain.numel() * plain.element_size(), self._axis.group)
            self._tensor(plain, on_host=in_host_memory(plain.device))
        return value

    def _receive(self, dtype: torch.dtype, shape: torch.Size, on_host: bool) -> Tensor:
        leaf = torch.empty(shape, dtype=dtype, device="cpu" if on_host else self._device)
        self._tensor(leaf, on_host=on_host)
        return leaf

    def _tensor(self, leaf: Tensor, *, on_host: bool) -> None:
        if leaf.numel():
            raw = leaf.view(-1).view(torch.uint8)  # gloo does not know every format
            group = self._host_group if on_host else self._axis.group
            dist.broadcast(raw, self._source, group=group)

    def _on_host(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, self._source, group=self._host_group)
