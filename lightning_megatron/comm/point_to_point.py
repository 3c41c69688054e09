"""Messages between pipeline stages: any number of tensors, any shapes, one transfer each.

A pipeline sends an activation per microbatch in one direction and its gradient back. Shapes may
differ from one message to the next (sequence lengths, a last microbatch of odd size), while gloo
aborts the process when a message is longer than the buffer that waits for it, and a separate
header would double the latency. So a message is one flat buffer::

    | bytes, meta length | meta (JSON), only if it changed | tensor | tensor | ...

and each receive is posted ahead with a *capacity* that both ends compute alike: the longest message
of earlier steps, and of this step up to the one consumed when the receive was posted. Buffers are
used again as soon as no tensor of their message is left. A message
that fits is sent as it is (gloo accepts shorter ones); one that does not is announced by a message
of one header and follows under another tag. `InlineChannel` does this. On devices whose header
could not be read without a synchronisation, `DeviceChannel` sends the meta, and tensors in host
memory, through an `InlineChannel` between the hosts, and each tensor of the device through the
device's group: in its exact size, as bytes, since NCCL knows fewer dtypes than torch.

`InlineChannel` copies the tensors of a message into the buffer, so the sender may free or change
them at once; `DeviceChannel` sends them from where they lie. Either payload is kept until the
transfer has been waited for, as no backend tells reliably that it is over. The sender waits early
for those that the receiver must have taken by then (`Channel.settle`): what is held depends on how
far the schedule lets two ranks drift apart, not on the number of messages.
"""

import json
import struct
import weakref
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.topology.meter import Meter

_HEADER_BYTES = 64
_ALIGN = 64
_NUMBERS = struct.Struct("<qq")
_OVERFLOW_TAG = 1 << 16
_FIRST_CAPACITY = 4096
LOOKAHEAD = 2
"""Receives posted before their message is needed."""

Tree: TypeAlias = Any
"""A tensor, None, number, string, or a tuple, list or dict of trees."""
_Take: TypeAlias = Callable[[torch.dtype, tuple[int, ...], bool], Tensor]


class Channel(Protocol):
    """An ordered stream of messages; one end sends, the other receives."""

    def expect(self, count: int) -> None:
        """Start a step of ``count`` messages; both ends call this."""
        ...

    def prepost(self) -> None:
        """Receiver: post the first receives of the step."""
        ...

    def send(self, tree: Tree) -> None:
        """Sender: post a message and return; the caller may let go of its tensors at once."""
        ...

    def settle(self, count: int) -> None:
        """Sender: wait until the first ``count`` messages of the step have left; free them."""
        ...

    @property
    def held(self) -> int:
        """Sender: messages whose payload is kept."""
        ...

    def receive(self) -> Tree:
        """Receiver: wait for the next message; tensors that required grad at the sender do here."""
        ...

    def flush(self) -> None:
        """Sender: wait until every posted message has left."""
        ...


def describe(tree: Tree, leaves: list[Tensor], device: torch.device | None = None) -> Any:
    """JSON-able structure of ``tree``; its tensors are appended to ``leaves`` in order.

    Args:
        tree: what is sent.
        leaves: is filled.
        device: on which the tensors are; others are marked. None: no matter where they are.

    Raises:
        TypeError: the tree holds an object that cannot pass between stages.
    """
    if isinstance(tree, Tensor):
        leaves.append(tree)
        elsewhere = device is not None and tree.device.type != device.type
        return [
            "H" if elsewhere else "T",
            str(tree.dtype).removeprefix("torch."),
            tree.requires_grad,
            *tree.shape,
        ]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if type(tree) in (tuple, list):
        return [
            "t" if type(tree) is tuple else "l",
            *(describe(item, leaves, device) for item in tree),
        ]
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {key: describe(item, leaves, device) for key, item in tree.items()}
    raise TypeError(
        f"A pipeline stage produced a {type(tree).__name__}; between stages pass tensors, numbers, "
        "strings and None, or tuples, lists and dicts (with string keys) of them"
    )


def rebuild(structure: Any, take: _Take, take_elsewhere: _Take | None = None) -> Tree:
    """Inverse of `describe`.

    Args:
        structure: what `describe` has returned.
        take: ``take(dtype, shape, requires_grad)`` yields the tensors in order.
        take_elsewhere: the same for those that are marked as not on the device; ``take`` when None.
    """
    if isinstance(structure, dict):
        return {key: rebuild(item, take, take_elsewhere) for key, item in structure.items()}
    if not isinstance(structure, list):
        return structure
    kind, rest = structure[0], structure[1:]
    if kind in ("T", "H"):
        taker = take_elsewhere or take if kind == "H" else take
        return taker(getattr(torch, rest[0]), tuple(rest[2:]), rest[1])
    items = [rebuild(item, take, take_elsewhere) for item in rest]
    return tuple(items) if kind == "t" else items


class _Lent(np.ndarray):
    """An array that tells when the last tensor made from it is gone."""


class Buffers:
    """Memory for messages, used again once no tensor of a message is left.

    Attributes:
        made: buffers allocated so far.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self.made = 0

    def take(self, size: int) -> Tensor:
        """A buffer of at least ``size`` bytes."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= size:
                return self._free.pop(index)
        self._free.clear()  # all too small: the messages have become longer
        self.made += 1
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def give(self, buffer: Tensor) -> None:
        """Return a buffer of which no tensor was made."""
        self._free.append(buffer)

    def lend(self, buffer: Tensor) -> Tensor:
        """Return the bytes as a tensor; the buffer is free once it and all its views are gone."""
        lent = buffer.numpy().view(_Lent)
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return torch.from_numpy(lent)


class _Outbox:
    """Payloads that are on their way, the oldest first.

    Args:
        meter: counts how long the sender waits for them to leave.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._sending: deque[tuple[int, dist.Work, Tensor]] = deque()

    def keep(self, index: int, work: dist.Work, payload: Tensor) -> None:
        """Hold a part of the message ``index``."""
        self._sending.append((index, work, payload))

    def settle(self, count: float) -> None:
        """Wait for the messages before ``count``."""
        while self._sending and self._sending[0][0] < count:
            self._meter.wait(self._sending.popleft()[1])

    def __len__(self) -> int:
        """Return the number of messages."""
        return len({index for index, _, _ in self._sending})


class InlineChannel:
    """Messages as single flat buffers over a gloo group.

    Args:
        peer: global rank at the other end.
        group: a gloo group that holds both ranks.
        tag: distinguishes the channels of one pair of ranks; below 65536.
        meter: counts what is sent, and how long a receiver waits.
        device: tensors that were on it at the sender are put on it at the receiver.
    """

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        tag: int,
        meter: Meter | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._meter = Meter() if meter is None else meter
        self._rank = peer
        # The group's own methods: torch.distributed.isend adds as much Python as all of a message.
        self._peer = dist.get_group_rank(group, peer)
        self._group = group
        self._tag = tag
        self._base = _FIRST_CAPACITY
        self._sizes: list[int] = []
        self._count = 0
        self._posted: deque[tuple[dist.Work, Tensor, int]] = deque()
        self._outbox = _Outbox(self._meter)
        self._structure: Any = None
        self.buffers = Buffers()

    def expect(self, count: int) -> None:
        """Start a step of ``count`` messages."""
        self._base = max([self._base, *self._sizes])
        self._sizes = []
        self._count = count

    def prepost(self) -> None:
        """Receiver: post the first receives of the step."""
        for index in range(min(LOOKAHEAD, self._count)):
            self._post(self._capacity(index))

    def send(self, tree: Tree) -> None:
        """Post one message."""
        buffer = self._pack(tree)
        index = len(self._sizes)
        capacity = self._capacity(index)
        self._sizes.append(buffer.numel())
        self._meter.message(buffer.numel(), self._rank)
        if buffer.numel() > capacity:
            self._isend(index, buffer[:_HEADER_BYTES].clone(), self._tag)
            self._isend(index, buffer, self._tag + _OVERFLOW_TAG)
        else:
            self._isend(index, buffer, self._tag)

    def receive(self) -> Tree:
        """Wait for the next message of the step."""
        index = len(self._sizes)
        work, buffer, capacity = self._posted.popleft()
        self._meter.wait(work)
        total = _read_header(buffer)[0]
        if total > capacity:
            self.buffers.give(buffer)
            buffer = self.buffers.take(total)
            self._meter.wait(self._group.recv([buffer], self._peer, self._tag + _OVERFLOW_TAG))
        self._sizes.append(total)
        if index + LOOKAHEAD < self._count:
            self._post(self._capacity(index + LOOKAHEAD))
        return self._unpack(self.buffers.lend(buffer))

    def settle(self, count: int) -> None:
        """Wait until the first ``count`` messages of the step have left."""
        self._outbox.settle(count)

    @property
    def held(self) -> int:
        """Messages whose payload is kept."""
        return len(self._outbox)

    def flush(self) -> None:
        """Wait for the posted messages to leave."""
        self._outbox.settle(inf)

    def _capacity(self, index: int) -> int:
        return max([self._base, *self._sizes[: max(index - LOOKAHEAD + 1, 0)]])

    def _post(self, capacity: int) -> None:
        buffer = self.buffers.take(capacity)
        work = self._group.recv([buffer], self._peer, self._tag)
        self._posted.append((work, buffer, capacity))

    def _isend(self, index: int, buffer: Tensor, tag: int) -> None:
        self._outbox.keep(index, self._group.send([buffer], self._peer, tag), buffer)

    def _pack(self, tree: Tree) -> Tensor:
        leaves: list[Tensor] = []
        structure = describe(tree, leaves, self._device)
        meta = b"" if structure == self._structure else json.dumps(structure).encode()
        self._structure = structure
        offset = _HEADER_BYTES + _aligned(len(meta))
        offsets = []
        for leaf in leaves:
            offsets.append(offset)
            offset += _aligned(leaf.numel() * leaf.element_size())
        buffer = torch.empty(offset, dtype=torch.uint8, device="cpu")
        raw = buffer.numpy()  # shares the memory; small accesses are much cheaper than a tensor's
        raw[: _NUMBERS.size] = bytearray(_NUMBERS.pack(offset, len(meta)))
        if meta:
            raw[_HEADER_BYTES : _HEADER_BYTES + len(meta)] = bytearray(meta)
        for leaf, begin in zip(leaves, offsets, strict=True):
            _view(buffer, begin, leaf.dtype, tuple(leaf.shape)).copy_(leaf.detach())
        return buffer

    def _unpack(self, buffer: Tensor) -> Tree:
        _, meta_length = _read_header(buffer)
        if meta_length:
            raw = buffer[_HEADER_BYTES : _HEADER_BYTES + meta_length].numpy().tobytes()
            self._structure = json.loads(raw)
        offset = _HEADER_BYTES + _aligned(meta_length)

        def take(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
            nonlocal offset
            leaf = _view(buffer, offset, dtype, shape)
            offset += _aligned(leaf.numel() * leaf.element_size())
            return leaf.requires_grad_(requires_grad)

        def take_to_device(
            dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
        ) -> Tensor:
            return take(dtype, shape, False).to(self._device).requires_grad_(requires_grad)

        on_host = in_host_memory(self._device)
        return rebuild(self._structure, take if on_host else take_to_device, take)


class DeviceChannel:
    """Meta between the hosts, tensors through the device's group.

    Args:
        peer: global rank at the other end.
        group: the group of the device's backend.
        host: channel between the same two ranks on a gloo group.
        device: device of received tensors.
        meter: counts what is sent, and how long the device waits for it.
    """

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        host: InlineChannel,
        device: torch.device,
        meter: Meter | None = None,
    ) -> None:
        self._meter = Meter() if meter is None else meter
        self._peer = peer
        self._group = group
        self._host = host
        self._device = device
        self._outbox = _Outbox(self._meter)
        self._sent = 0

    def expect(self, count: int) -> None:
        """Start a step of ``count`` messages."""
        self._sent = 0
        self._host.expect(count)

    def prepost(self) -> None:
        """Receiver: post the first receives of the step."""
        self._host.prepost()

    def send(self, tree: Tree) -> None:
        """Post one message."""
        leaves: list[Tensor] = []
        structure = json.dumps(describe(tree, leaves, self._device))
        elsewhere = [leaf for leaf in leaves if leaf.device.type != self._device.type]
        self._host.send((structure, elsewhere) if elsewhere else structure)
        for leaf in leaves:
            if leaf.device.type != self._device.type:
                continue
            payload = _bytes(leaf.detach().contiguous())
            work = _not_none(dist.isend(payload, self._peer, self._group))
            self._outbox.keep(self._sent, work, payload)
            self._meter.message(payload.numel() * payload.element_size(), self._peer)
        self._sent += 1

    def settle(self, count: int) -> None:
        """Wait until the first ``count`` messages of the step have left.

        On NCCL the current stream waits, for transfers that are long over, and the host goes on:
        the memory is used again in the order of the stream. The meta, of some hundred bytes, stays
        until `flush`, so that the hosts need not wait for each other.
        """
        self._outbox.settle(count)

    @property
    def held(self) -> int:
        """Messages whose payload is kept."""
        return len(self._outbox)

    def receive(self) -> Tree:
        """Wait for the next message of the step."""
        works: list[dist.Work] = []

        def take(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
            leaf = torch.empty(shape, dtype=dtype, device=self._device)
            works.append(_not_none(dist.irecv(_bytes(leaf), self._peer, self._group)))
            return leaf.requires_grad_(requires_grad)

        message = self._host.receive()
        structure, elsewhere = (message, []) if isinstance(message, str) else message
        on_host = iter(elsewhere)
        tree = rebuild(json.loads(structure), take, lambda *_: next(on_host))
        for work in works:
            self._meter.wait(work)
        return tree

    def flush(self) -> None:
        """Wait for the posted messages to leave."""
        self._host.flush()
        self._outbox.settle(inf)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return buffer[offset : offset + size].view(dtype).view(shape)


def _bytes(leaf: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    flat = leaf.reshape(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _read_header(buffer: Tensor) -> tuple[int, int]:
    total, meta_length = _NUMBERS.unpack(buffer.numpy()[: _NUMBERS.size].tobytes())
    return total, meta_length


def _not_none(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("A pipeline channel was used by a rank outside its group")
    return work
