"""Activations in host memory from the forward of a block to its backward.

What autograd keeps of a block is not needed until its backward, which is a long time for the first
blocks of a network. The memory of the host is large, and the bus to it idle in between: a block of
``f`` operations that keeps ``n`` bytes can be sent there and fetched again beside the computation
of its neighbours where ``n / f`` is below the ratio of the bus and the device (64 GB/s to 500
TFLOP/s, say: 1 byte to 8000 operations; a transformer block that is recomputed keeps 2 bytes for
``24 h`` operations). With recomputation a block offloads its input, and the results it keeps; both
together leave next to nothing of the activations on the device.

Order of events, for blocks ``A B C`` and the two streams of copies::

    compute  A        B        C        | C'          B'          A'
    out               A to host  B ...  |
    in                                  | B from host A from host

- A block is copied while its successor runs, all of it at once: then what several operations keep
  of one tensor is known, and copied once. When a third block begins, the computation waits for the
  copy of the first, so that what is on the device are two blocks, whatever the host does ahead of
  it. (Marking memory as used by another stream instead would return it when the host notices.)
- The latest block is not copied until another begins: its backward may come first.
- When the backward reaches a block, the one before it is fetched.
- Memory is taken from, and returned to, the pool of the computing stream, which each copy waits for
  or is waited for by. Copies to the host go to pinned memory.

What stays on the device: weights and buffers of the block (ZeRO frees and gathers them by itself),
inputs without gradients, such as masks, which all blocks share, and small tensors. On a CPU the
same happens without streams, which is of use for tests only.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_megatron._torch.devices import device_module, on_host, pins
from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.parallel.forward_wrapper import BlockForward, address

_SMALL_PART = 8
"""A tensor stays where it is if its memory is so many times as large as itself."""


class Offloader:
    """Moves what the blocks of a network keep.

    Args:
        device: where the network computes; tensors elsewhere are left alone.
        min_bytes: smaller tensors are left alone.

    Attributes:
        instant: whether copies have ended when they return, so that nothing waits for them.
        held: bytes in host memory now.
        most: the most there were.
    """

    def __init__(self, device: torch.device, min_bytes: int = 0) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self.instant = on_host(device)
        self.held = self.most = 0
        self._latest: _Passage | None = None
        self._leaving: _Passage | None = None
        self._own: set[int] = set()
        self._streams: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy of the network: no transfer is under way in it."""
        return {
            **self.__dict__,
            **{"held": 0, "most": 0, "_latest": None, "_leaving": None, "_streams": None},
        }

    @contextmanager
    def passage(self, position: int, own: set[int]) -> Iterator[None]:
        """Take what autograd keeps of the block that runs forward within.

        Args:
            position: of the block in the network.
            own: addresses of memory to leave alone.
        """
        self._begin(position)
        own, self._own = self._own, own
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._own = own

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor of the block that runs."""
        passage = self._latest
        if passage is None or not self._worth_it(tensor):
            return tensor
        stored = passage.stored_at(address(tensor))
        if stored is None:
            stored = _Stored(self, tensor)
            passage.add(address(tensor), stored)
        else:
            stored.note(tensor)
        return _Packed(passage, stored, tensor)

    def unpack(self, packed: Any) -> Any:
        """Give a tensor back."""
        if not isinstance(packed, _Packed):
            return packed
        passage, stored = packed.passage, packed.stored
        before = passage.take_previous()
        if stored.device is None:
            self._fetch(passage)
        elif passage.sent is not None and stored.fetched is None and not self.instant:
            # Its copy may be under way: memory that is freed now is not given away before its end.
            stored.device.record_stream(self._lanes()[1])
        if before is not None:
            self._fetch(before)
        return packed.view(stored.arrived())

    def _worth_it(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        return (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and tensor.device.type == self._device.type
            and size > 0
            and size >= self._min_bytes
            and size * _SMALL_PART >= tensor.untyped_storage().nbytes()
            and address(tensor) not in self._own
        )

    def _begin(self, position: int) -> None:
        leaving, latest = self._leaving, self._latest
        if leaving is not None:
            self.wait_for(leaving.sent)
            leaving.let_go()
        if latest is not None:
            self._send(latest)
            if self.instant:
                latest.let_go()
        self._leaving = None if self.instant else latest
        self._latest = _Passage(position, latest)

    def _send(self, passage: "_Passage") -> None:
        """Begin to copy to the host."""
        kind, out, _ = self._lanes()
        out.wait_stream(kind.current_stream())
        pin = pins(self._device)
        leaving = [stored for stored in passage.alive() if stored.host is None]
        with kind.stream(out), torch.no_grad():
            for stored in leaving:
                assert stored.device is not None
                stored.check()
                self.held += stored.size
                stored.host = torch.empty(stored.size, dtype=torch.uint8, pin_memory=pin)
                stored.host.copy_(stored.device, non_blocking=True)
        self.most = max(self.most, self.held)
        passage.sent = out.record_event()

    def _fetch(self, passage: "_Passage") -> None:
        """Begin to copy from the host what is there only."""
        kind, _, into = self._lanes()
        absent = [stored for stored in passage.alive() if stored.device is None]
        with torch.no_grad():
            for stored in absent:
                stored.device = torch.empty(stored.size, dtype=torch.uint8, device=self._device)
            into.wait_stream(kind.current_stream())
            if passage.sent is not None:
                into.wait_event(passage.sent)
            with kind.stream(into):
                for stored in absent:
                    assert stored.device is not None
                    assert stored.host is not None
                    stored.device.copy_(stored.host, non_blocking=True)
            event = into.record_event()
        for stored in absent:
            stored.fetched = event

    def wait_for(self, event: Any) -> None:
        """Let the computation wait for a copy."""
        if event is not None:
            device_module(self._device).current_stream().wait_event(event)

    def _lanes(self) -> tuple[Any, Any, Any]:
        kind: Any = device_module(self._device)
        if self._streams is None:
            self._streams = kind.Stream(), kind.Stream()
        return kind, *self._streams


class _Stored:
    """A piece of memory, on the device, on the host, or on both."""

    def __init__(self, owner: Offloader, tensor: Tensor) -> None:
        self._owner = owner
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.device: Tensor | None = _bytes(storage, tensor.device)
        self.host: Tensor | None = None
        self.fetched: Any = None
        self._versions: list[tuple[Tensor, int]] = []
        self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        """A tensor in this memory is kept for the backward, with the values it has now."""
        same = tensor.detach()  # shares the count of changes with the tensor
        self._versions.append((same, same._version))

    def check(self) -> None:
        """Refuse what autograd refuses where it keeps tensors itself."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                "A tensor that the backward of a block needs was changed in place after it had "
                "been used (activations.offload=True noticed it; autograd would have)"
            )

    def arrived(self) -> Tensor:
        """The bytes on the device, once they are there."""
        self.check()
        self._owner.wait_for(self.fetched)
        self.fetched = None
        assert self.device is not None
        return self.device

    def leave(self) -> None:
        """Free the bytes on the device."""
        self.device = None
        self._versions.clear()

    def __del__(self) -> None:
        # Fetched and never used: the memory must not be used for something else before.
        self._owner.wait_for(self.fetched)
        if self.host is not None:
            self._owner.held -= self.size


class _Passage:
    """One forward of one block; lives as long as something of it is kept."""

    def __init__(self, position: int, previous: "_Passage | None") -> None:
        self._position = position
        follows = previous is not None and previous._position == position - 1
        self._previous = weakref.ref(previous) if previous is not None and follows else None
        self._stored: dict[int, weakref.ref[_Stored]] = {}
        self.sent: Any = None
        """Event at the end of the copies to the host."""

    def stored_at(self, place: int) -> _Stored | None:
        """Entry of the tensor at a device address, if it is still kept."""
        found = self._stored.get(place)
        return None if found is None else found()

    def add(self, place: int, stored: _Stored) -> None:
        """Take note of something new."""
        self._stored[place] = weakref.ref(stored)

    def alive(self) -> list[_Stored]:
        """Entries that are still kept."""
        return [found for entry in self._stored.values() if (found := entry()) is not None]

    def take_previous(self) -> "_Passage | None":
        """The passage of the block before, once: the backward comes to it next."""
        previous, self._previous = self._previous, None
        return None if previous is None else previous()

    def let_go(self) -> None:
        """Free what has been copied."""
        for stored in self.alive():
            stored.leave()


class _Packed:
    """A tensor in memory that may be away."""

    def __init__(self, passage: _Passage, stored: _Stored, tensor: Tensor) -> None:
        self.passage = passage
        self.stored = stored
        self._dtype = tensor.dtype
        self._where = tensor.storage_offset()
        self._shape = tensor.size()
        self._strides = tensor.stride()

    def view(self, held: Tensor) -> Tensor:
        """The tensor, made of the bytes of its memory."""
        empty = torch.empty(0, dtype=self._dtype, device=held.device)
        return empty.set_(held.untyped_storage(), self._where, self._shape, self._strides)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class _Offloaded(BlockForward):
    """A forward whose activations wait in host memory.

    Args:
        block: whose.
        position: of the block in the network.
        offloader: who moves them.
    """

    def __init__(self, block: nn.Module, position: int, offloader: Offloader) -> None:
        super().__init__(block)
        self._position = position
        self._offloader = offloader

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        own = {address(t) for t in (*self._block.parameters(), *self._block.buffers())}
        own |= {address(t) for t in inputs if not t.requires_grad}
        with self._offloader.passage(self._position, own):
            return self._forward(*args, **kwargs)


def offload(block: nn.Module, position: int, offloader: Offloader) -> None:
    """Let the activations of a block, whose neighbours are at ``position +- 1``, wait elsewhere."""
    _Offloaded(block, position, offloader)
