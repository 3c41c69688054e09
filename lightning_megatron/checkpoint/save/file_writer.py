"""The program of the process that writes shards (see writer_process.py).

It is run as a file, by its path, and imports the standard library only: it starts in some 50 ms and
holds 10 MB, where torch would take seconds. It knows nothing of tensors or formats. A request names
a file and the pieces that it consists of: bytes, or places in the memory shared with the training
process. The answer is size and hash, taken on the way to the disk, or the error of the system.

It ends with the training process, however that ends: by the end of the pipe, by the kernel's signal
on Linux, or because its parent is another one. A file that it was writing then stays unfinished in
a directory without a manifest, which nobody takes for a checkpoint.
"""

import ctypes
import hashlib
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

Piece = bytes | tuple[int, int]
"""Content, or where it lies in the shared memory: offset and length."""

STOP = "stop"
END = "end"

_BLOCK_BYTES = 1 << 22
"""Written at a time; between two blocks we look whether to go on."""
_LOOK_S = 5.0
"""How often to look for the parent, where no signal tells that it has died."""
_PR_SET_PDEATHSIG = 1


class _Stopped(Exception):
    """The training process gives the file up."""


class Service:
    """Answers requests until the training process ends.

    Args:
        connection: to the training process.
        memory: descriptor of the shared memory, which may grow between requests.
        parent: number of the training process.
    """

    def __init__(self, connection: Connection, memory: int, parent: int) -> None:
        self._connection, self._memory, self._parent = connection, memory, parent
        self._view = memoryview(b"")

    def run(self) -> None:
        """Serve; returns when there is nobody to serve."""
        while (request := self._next()) != END:
            if request != STOP:  # it came too late for the request before
                self._connection.send(self._answer(*request))

    def _next(self) -> Any:
        while not self._connection.poll(_LOOK_S):
            if os.getppid() != self._parent:
                return END
        return self._connection.recv()

    def _answer(self, path: str, memory_size: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        try:
            if len(self._view) != memory_size:
                self._view = memoryview(mmap.mmap(self._memory, memory_size, mmap.MAP_SHARED))
            return self._write(path, pieces)
        except _Stopped:
            return {"stopped": True}
        except OSError as error:
            return {"errno": error.errno, "strerror": error.strerror, "filename": path}
        except MemoryError as error:
            return {"errno": None, "strerror": repr(error), "filename": path}

    def _write(self, path: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0
        with open(path, "wb", buffering=0) as file:
            for piece in pieces:
                for block in self._blocks(piece):
                    self._go_on()
                    _write_all(file.fileno(), block)
                    digest.update(block)
                    size += len(block)
            os.fsync(file.fileno())
        return {"size": size, "sha256": digest.hexdigest()}

    def _blocks(self, piece: Piece) -> Sequence[memoryview]:
        if isinstance(piece, bytes):
            return [memoryview(piece)]
        offset, length = piece
        return [
            self._view[start : min(start + _BLOCK_BYTES, offset + length)]
            for start in range(offset, offset + length, _BLOCK_BYTES)
        ]

    def _go_on(self) -> None:
        if self._connection.poll():
            self._connection.recv()  # STOP, or the end of the connection
            raise _Stopped


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies, where the kernel can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)


def main(connection: int, memory: int, parent: int, niceness: int) -> None:
    """Serve on these descriptors."""
    die_with(parent)
    os.nice(niceness)
    with suppress(EOFError, ConnectionError):  # the training process has ended
        Service(Connection(connection), memory, parent).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
