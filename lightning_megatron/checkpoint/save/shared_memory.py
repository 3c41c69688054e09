"""Host memory for copies of tensors, which another process can read.

One anonymous file in memory holds all copies, one after the other. It has no name, so nothing can
be left behind in /dev/shm whatever dies, and the size of that file system (64 MB in most
containers) does not matter. It only grows; descriptors of it stay good, and whoever has mapped the
smaller one maps it again. Where the kernel has no such files, a deleted temporary file serves.

For copies from a GPU the memory is page-locked (``cudaHostRegister``): without that, the copies
would stop the host.
"""

import contextlib
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_megatron.checkpoint.chunks import Chunk

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
Place = tuple[int, tuple[int, ...], torch.dtype]
"""Offset, shape and format."""


class SharedMemory:
    """Buffers in memory that has a descriptor."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._mapping: mmap.mmap | None = None
        self._places: dict[str, Place] = {}
        self._buffers: dict[str, Tensor] = {}
        self._address = 0
        self._is_pinned = False
        self._may_pin = True

    @property
    def descriptor(self) -> int:
        """For another process to map."""
        return self._descriptor

    @property
    def size(self) -> int:
        """Bytes to map."""
        return 0 if self._mapping is None else len(self._mapping)

    @property
    def layout(self) -> object:
        """Another object whenever buffers have moved."""
        return self._places

    def provide(self, chunks: Mapping[str, Chunk]) -> dict[str, Tensor]:
        """Return a buffer for each chunk; those of the last call, if shapes are the same.

        Raises:
            OSError: there is not enough memory.
        """
        places, size = _lay_out(chunks)
        on_device = any(chunk.tensor.is_cuda for chunk in chunks.values())
        if places != self._places or self._mapping is None:
            self._places, self._buffers = {}, {}
            if size > self.size:
                self._grow(size)
            self._buffers = {name: self._buffer(place) for name, place in places.items()}
            self._places = places
        if on_device and self._may_pin and not self._is_pinned:
            self._pin()
        return self._buffers

    def offset(self, address: int, length: int) -> int | None:
        """Return where in the memory the bytes at ``address`` are; None if they are elsewhere."""
        offset = address - self._address
        return offset if 0 <= offset <= self.size - length else None

    def close(self) -> None:
        """Release the memory, as soon as nobody uses the buffers."""
        self._unpin()
        self._places, self._buffers, self._mapping = {}, {}, None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _grow(self, size: int) -> None:
        if self._descriptor < 0:
            self._descriptor = _anonymous_file()
        self._unpin()
        # Without this, too little memory would be a bus error in the middle of copying.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, size)
        else:
            os.ftruncate(self._descriptor, size)
        self._mapping = mmap.mmap(self._descriptor, size, mmap.MAP_SHARED)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()

    def _buffer(self, place: Place) -> Tensor:
        offset, shape, dtype = place
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        assert self._mapping is not None
        count = math.prod(shape) * dtype.itemsize
        # A storage of its own for each buffer: what is saved of a tensor is its storage.
        data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)
        return data.view(dtype).reshape(shape)

    def _pin(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(self._address, self.size, 0))
        self._is_pinned = self._may_pin = not error  # not tried again: it would fail again
        if error:
            # CUDA also tells the next kernel of it, which shall not be one of training's.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            logger.warning(
                "the memory for checkpoints cannot be pinned (CUDA error %d): copying to it will "
                "take longer; CheckpointConfig(process='thread') has pinned memory of its own",
                error,
            )

    def _unpin(self) -> None:
        if self._is_pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._address)
        self._is_pinned = False


def _lay_out(chunks: Mapping[str, Chunk]) -> tuple[dict[str, Place], int]:
    places: dict[str, Place] = {}
    end = 0
    for name, chunk in chunks.items():
        tensor = chunk.tensor
        places[name] = (end, tuple(tensor.shape), tensor.dtype)
        end += -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, mmap.PAGESIZE)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
