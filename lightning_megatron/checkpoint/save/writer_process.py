"""Shards written by another process.

Threads of one process share Python's lock, so a thread that writes takes time from training even
where cores are idle. A process does not. What it must not cost is memory, a second torch and a
second format. So tensors are copied into memory that the process maps (shared_memory.py), and what
DCP would write is recorded rather than written: its writer runs over these copies, into a stream
that keeps the small pieces (archive headers) and for the large ones notes where in the shared
memory they lie. The pieces are sent to a small program (file_writer.py), which writes, hashes and
syncs. As nothing of this depends on the values, the record serves for all saves with the same plan;
the archives' own checksums, which would, are left out: the manifest has better ones.

Ranks agree, and the index is written, where they are without the process. If it dies, the save
fails and the next one starts another.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from torch.serialization import get_crc32_options, set_crc32_options
from typing_extensions import override

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.dcp_files import WritePlan, Written, write_shards
from lightning_megatron.checkpoint.directory.digest import DigestingFileSystem
from lightning_megatron.checkpoint.directory.rank_manifest import FileEntry
from lightning_megatron.checkpoint.save import file_writer
from lightning_megatron.checkpoint.save.file_writer import END, STOP, Piece
from lightning_megatron.checkpoint.save.shared_memory import SharedMemory
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.errors import CheckpointError

_NICENESS = 10
"""Training has the cores first, but on a full machine the writer is not starved: at 19 it would get
a seventieth of a core, and the next save would have to wait for it."""

# Sent to whole process groups; the writer has to finish what the training process wants to finish.
_NOT_FOR_THE_WRITER = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LOOK_S = 0.05


@dataclass(frozen=True)
class _Record:
    """What is to be written under one plan."""

    plan: WritePlan
    layout: object
    """Of the shared memory."""
    written: Written
    files: Mapping[str, list[Piece]]


class WriterProcess:
    """Writes this rank's shards in a process of its own; started when it is needed.

    All calls come from one thread.

    Args:
        memory: where the tensors lie.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._record: _Record | None = None

    @property
    def pid(self) -> int | None:
        """Number of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def write(
        self,
        directory: Path,
        plan: WritePlan,
        chunks: Mapping[str, Chunk],
        stop: Callable[[], bool] = lambda: False,
    ) -> Written | None:
        """Do what `write_shards` does, with tensors that lie in the shared memory."""
        record = self._recorded(directory, plan, chunks)
        files = {}
        for name, pieces in record.files.items():
            entry = None if stop() else self._write(directory / name, pieces, plan.size, stop)
            if entry is None:
                return None
            files[name] = entry
        return replace(record.written, files=files)

    def close(self) -> None:
        """End the process."""
        process, connection = self._process, self._connection
        self._process = self._connection = self._record = None
        if process is None or connection is None:
            return
        with suppress(OSError):
            connection.send(END)  # closing it may go unseen: forked workers hold copies of it
        connection.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _recorded(self, directory: Path, plan: WritePlan, chunks: Mapping[str, Chunk]) -> _Record:
        record, layout = self._record, self._memory.layout
        if record is None or record.plan is not plan or record.layout is not layout:
            recorder = _Recorder(self._memory)
            with _without_checksums():
                written = write_shards(directory, plan, chunks, file_system=recorder)
            assert written is not None
            self._record = record = _Record(plan, layout, written, recorder.pieces)
        return record

    def _write(
        self, path: Path, pieces: list[Piece], needed: int, stop: Callable[[], bool]
    ) -> FileEntry | None:
        answer = self._ask((str(path), self._memory.size, pieces), path, stop)
        if "stopped" in answer:
            return None
        if "strerror" in answer:
            reason = (answer["errno"], answer["strerror"], answer["filename"])
            raise write_error(OSError(*reason), path.parent, needed)
        return FileEntry(size=answer["size"], sha256=answer["sha256"])

    def _ask(self, request: Any, path: Path, stop: Callable[[], bool]) -> dict[str, Any]:
        process, connection = self._running()
        try:
            connection.send(request)
            told = False
            while not connection.poll(_LOOK_S):
                if not told and stop():
                    connection.send(STOP)
                    told = True
            answer: dict[str, Any] = connection.recv()
            return answer
        except (EOFError, OSError) as error:
            pid, end = process.pid, self._how_it_ended()
            raise CheckpointError(
                f"{path}: the process that was writing it (pid {pid}) {end}; the next save starts "
                "another"
            ) from error

    def _running(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is not None and self._process.poll() is not None:
            self._how_it_ended()
        if self._process is None or self._connection is None:
            self._process, self._connection = _start(self._memory.descriptor)
        return self._process, self._connection

    def _how_it_ended(self) -> str:
        """Describe the end of the process, and forget it."""
        assert self._process is not None
        process = self._process
        self.close()
        code = process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _start(memory: int) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    arguments = (theirs.fileno(), memory, os.getpid(), _NICENESS)
    with theirs, _blocked(_NOT_FOR_THE_WRITER):  # a new process inherits what is blocked
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", file_writer.__file__, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), memory),
            cwd="/",
        )
    return process, Connection(ours.detach())


@contextmanager
def _blocked(signals: tuple[signal.Signals, ...]) -> Generator[None, None, None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_checksums() -> Generator[None, None, None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Recorder(DigestingFileSystem):
    """Keeps what would be written, by name of the file."""

    syncs = False

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self._memory = memory
        self.pieces: dict[str, list[Piece]] = {}

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        stream = _RecordingStream(self._memory)
        yield stream
        self.pieces[Path(path).name] = stream.pieces


class _RecordingStream:
    """A file that is written from front to back."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory, self._size = memory, 0
        self.pieces: list[Piece] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        piece = self._place(view)
        if piece is not None:
            self.pieces.append(piece)
        elif self.pieces and isinstance(self.pieces[-1], bytes):
            self.pieces[-1] += view.tobytes()
        else:
            self.pieces.append(view.tobytes())
        self._size += view.nbytes
        return view.nbytes

    def _place(self, view: memoryview) -> Piece | None:
        if not view.nbytes:
            return None
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        offset = self._memory.offset(address, view.nbytes)
        return None if offset is None else (offset, view.nbytes)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
