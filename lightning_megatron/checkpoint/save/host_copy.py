"""The copy in host memory from which a checkpoint is written while training goes on.

The memory is kept from one save to the next, as allocating it costs more than copying.

Copies from a GPU do not stop the host. They run on a stream of their own, after the work that
training has enqueued so far, into page-locked memory. The next forward and backward run at the same
time, as they only read parameters and optimizer state. Buffers, which a forward writes, are copied
by the training stream itself, in order. Before the update of the next step the training stream
waits for the copies on the device (`HostCopy.before_update`); the thread that writes the checkpoint
waits for them on the host (`HostCopy.complete`). If something else, like a callback, writes to the
tensors before that, torch's count of writes shows it, and the save fails: half of the copy might be
newer than the other half.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.devices import device_module, on_host, pins
from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.errors import CheckpointError

Stamp = tuple[int, int, torch.Size]


class HostCopy:
    """The copy of this rank's tensors, page-locked if they are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stamps: dict[str, Stamp] | None = None
        self._chunks: dict[str, Chunk] = {}
        self._transfer = _Transfer()

    def is_current(self, chunks: Mapping[str, Chunk]) -> bool:
        """Return whether these tensors were not written to since `take`, as torch counts writes."""
        return self._stamps is not None and _stamps(chunks) == self._stamps

    def take(self, chunks: Mapping[str, Chunk], names: Collection[str]) -> dict[str, Chunk]:
        """Copy tensors into the buffers of the last call.

        Args:
            chunks: all chunks of this rank.
            names: names of the chunks to copy.

        Returns:
            The copies, by name; other threads may read them after `complete`.
        """
        self._stamps = None  # for as long as the copy is neither the old one nor the new one
        wanted = {name: chunk for name, chunk in chunks.items() if name in names}
        buffers = self._provide(wanted)
        with torch.no_grad():
            for name, chunk in wanted.items():
                if on_host(chunk.tensor.device):
                    buffers[name].copy_(chunk.tensor)
            self._transfer.start(
                {n: c for n, c in wanted.items() if not on_host(c.tensor.device)}, buffers
            )
        self._chunks = {name: replace(wanted[name], tensor=buffers[name]) for name in wanted}
        self._stamps = _stamps(chunks)
        return self._chunks

    @property
    def chunks(self) -> dict[str, Chunk]:
        """Result of the last `take`."""
        return self._chunks

    def before_update(self) -> None:
        """Have later work on the device wait for the copies; called by training."""
        self._transfer.hold_up_writers()

    def complete(self) -> None:
        """Wait until the copies are complete; called by the thread that reads them.

        Raises:
            CheckpointError: the tensors were written to before that.
        """
        self._transfer.wait()

    def close(self) -> None:
        """Release the memory."""
        self._chunks = {}
        self._stamps = None
        self._buffers = {}

    def _provide(self, chunks: Mapping[str, Chunk]) -> dict[str, Tensor]:
        """Return a buffer for each chunk; those of the last call are used where they fit."""
        fitting = {n: b for n, b in self._buffers.items() if n in chunks and _fits(b, chunks[n])}
        self._buffers = fitting  # other buffers are freed first
        for name, chunk in chunks.items():
            if name not in fitting:
                source = chunk.tensor
                fitting[name] = torch.empty(
                    source.shape, dtype=source.dtype, pin_memory=pins(source.device)
                )
        return fitting


class _Transfer:
    """Copies from GPUs, which may be under way."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._events: dict[torch.device, Any] = {}
        # Sources and their first stamps; two threads read the pair, so it is set at once.
        self._watched: tuple[dict[str, Chunk], dict[str, Stamp] | None] = {}, {}
        self._holds_up = True
        """Whether the training streams wait for the copies from here on."""
        self._undisturbed = True
        """Whether the tensors had not been written to when that wait was enqueued."""

    def start(self, chunks: Mapping[str, Chunk], buffers: Mapping[str, Tensor]) -> None:
        """Enqueue copies of tensors on GPUs."""
        self._events = {}
        read_beside = {name: chunk for name, chunk in chunks.items() if chunk.identical}
        self._watched = read_beside, _stamps(read_beside)
        self._holds_up = not chunks
        self._undisturbed = True
        for device in {chunk.tensor.device for chunk in chunks.values()}:
            here = {name: c for name, c in chunks.items() if c.tensor.device == device}
            self._start_on(device, here, buffers)
        if self._watched[1] is None:  # nothing would tell
            self.hold_up_writers()

    def _start_on(
        self, device: torch.device, chunks: Mapping[str, Chunk], buffers: Mapping[str, Tensor]
    ) -> None:
        kind = device_module(device)
        training = kind.current_stream(device)
        if device not in self._streams:
            self._streams[device] = kind.Stream(device)
        beside = self._streams[device]
        for name, chunk in chunks.items():
            if not chunk.identical:
                buffers[name].copy_(chunk.tensor, non_blocking=True)
        beside.wait_stream(training)
        with kind.stream(beside):
            for name, chunk in chunks.items():
                if chunk.identical:
                    buffers[name].copy_(chunk.tensor, non_blocking=True)
                    # Should it be freed meanwhile, its memory is not given to another tensor.
                    chunk.tensor.record_stream(beside)
            # The thread that waits for it sleeps instead of spinning.
            event = kind.Event(blocking=True)
            event.record(beside)
        self._events[device] = event

    def hold_up_writers(self) -> None:
        if self._holds_up:
            return
        sources, before = self._watched
        self._undisturbed = _stamps(sources) == before
        for device, event in self._events.items():
            device_module(device).current_stream(device).wait_event(event)
        self._holds_up = True

    def wait(self) -> None:
        for event in self._events.values():
            event.synchronize()
        sources, before = self._watched
        # In this order: once writers are held up, they may write.
        self._undisturbed &= _stamps(sources) == before or self._holds_up
        self._watched = {}, {}
        if not self._undisturbed:
            raise CheckpointError(
                "parameters or optimizer state were changed outside of the optimizer step, before "
                "their copy was complete; nearest valid: do that in a hook before the checkpoint "
                "is saved, or CheckpointConfig(mode='sync')"
            )


def _fits(buffer: Tensor, chunk: Chunk) -> bool:
    source = chunk.tensor
    return (
        buffer.shape == source.shape
        and buffer.dtype == source.dtype
        and buffer.is_pinned() == pins(source.device)
    )


def _stamps(chunks: Mapping[str, Chunk]) -> dict[str, Stamp] | None:
    try:
        return {
            n: (c.tensor.data_ptr(), c.tensor._version, c.tensor.shape) for n, c in chunks.items()
        }
    except RuntimeError:  # tensors made in inference mode do not count
        return None
