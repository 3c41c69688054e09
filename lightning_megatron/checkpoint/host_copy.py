"""Copies of tensors on the host, from which a checkpoint is written while training goes on.

The memory is kept from one save to the next: allocating it costs more than copying. Copies of
device tensors are pinned, so that all of them travel at once and the host waits for them once.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_megatron.checkpoint.state import Chunk

Stamp = tuple[int, int, torch.Size]


class HostCopy:
    """One copy of this rank's part of a checkpoint."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stamps: dict[str, Stamp] | None = None
        self._chunks: dict[str, Chunk] = {}

    def is_current(self, chunks: Mapping[str, Chunk]) -> bool:
        """Whether nothing was written to these tensors since `take` (as torch counts writes)."""
        return self._stamps is not None and _stamps(chunks) == self._stamps

    def take(self, chunks: Mapping[str, Chunk], names: Collection[str]) -> dict[str, Chunk]:
        """Copy tensors, over those of the last call.

        Args:
            chunks: all of this rank.
            names: those to copy.

        Returns:
            The copies, by name; complete when this returns.
        """
        self._stamps = None  # for as long as the copy is neither the old one nor the new one
        wanted = {name: chunk for name, chunk in chunks.items() if name in names}
        fitting = {n: b for n, b in self._buffers.items() if n in wanted and _fits(b, wanted[n])}
        self._buffers = fitting
        streams = set()
        with torch.no_grad():
            for name, chunk in wanted.items():
                source = chunk.tensor
                if name not in fitting:
                    fitting[name] = torch.empty(
                        source.shape, dtype=source.dtype, pin_memory=source.is_cuda
                    )
                fitting[name].copy_(source, non_blocking=source.is_cuda)
                if source.is_cuda:
                    streams.add(torch.cuda.current_stream(source.device))
        for stream in streams:
            stream.synchronize()
        self._chunks = {name: replace(wanted[name], tensor=fitting[name]) for name in wanted}
        self._stamps = _stamps(chunks)
        return self._chunks

    @property
    def chunks(self) -> dict[str, Chunk]:
        """What `take` returned last."""
        return self._chunks


def _fits(buffer: Tensor, chunk: Chunk) -> bool:
    source = chunk.tensor
    return (
        buffer.shape == source.shape
        and buffer.dtype == source.dtype
        and buffer.is_pinned() == source.is_cuda
    )


def _stamps(chunks: Mapping[str, Chunk]) -> dict[str, Stamp] | None:
    try:
        return {
            n: (c.tensor.data_ptr(), c.tensor._version, c.tensor.shape) for n, c in chunks.items()
        }
    except RuntimeError:  # tensors made in inference mode do not count
        return None
