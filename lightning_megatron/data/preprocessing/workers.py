"""Processes that share the parts of a corpus.

Each process makes whole shards: text is read, and tokens are written, where they are used, and
nothing but a few numbers goes between processes. A process gets the next part of the file that it
has open, if there is one, because a compressed file is only unpacked once by whoever reads it in
order; else the first part of a file that nobody reads.

Processes are spawned, not forked: the tokenizers library has threads. They end when the command
does, also when it is killed: the pipe to it then breaks.
"""

import contextlib
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from lightning_megatron import env
from lightning_megatron.data.preprocessing.parts import Part
from lightning_megatron.data.preprocessing.work import Job, Made, Report, Worker
from lightning_megatron.errors import ConfigError, MegatronError

Done = Callable[[Part, Made], None]
"""Is told of every part that is made."""


def make_shards(job: Job, parts: Sequence[Part], workers: int, report: Report, done: Done) -> None:
    """Make the shards of parts.

    Args:
        job: what all processes know.
        parts: what is to be made.
        workers: number of processes; 1 works in this one.
        report: is told the bytes and tokens of every batch.
        done: is told of every part that is made, in any order.

    Raises:
        ConfigError: a record cannot be read, or a process was killed.
    """
    with env.sequential_tokenizers():
        if workers == 1:
            worker = Worker(job)
            for part in parts:
                done(part, worker.make(part, report))
            return
        _share(job, list(parts), min(workers, len(parts)), report, done)


@dataclass
class _Peer:
    """A process, the part that it works on, and the file that it has open."""

    process: BaseProcess
    connection: Connection
    part: Part | None = None
    source: int | None = None


def _share(job: Job, waiting: list[Part], workers: int, report: Report, done: Done) -> None:
    context = get_context("spawn")
    peers: dict[Connection, _Peer] = {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, job), daemon=True)
            process.start()
            there.close()
            peers[here] = _Peer(process, here)
        for peer in peers.values():
            _hand_out(peer, waiting, peers)
        while any(peer.part is not None for peer in peers.values()):
            busy = [here for here, peer in peers.items() if peer.part is not None]
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                _hear(peers[ready], waiting, peers, report, done)
    finally:
        for peer in peers.values():
            peer.connection.close()
            peer.process.terminate()
        for peer in peers.values():
            peer.process.join()


def _hear(
    peer: _Peer,
    waiting: list[Part],
    peers: dict[Connection, _Peer],
    report: Report,
    done: Done,
) -> None:
    try:
        message = peer.connection.recv()
    except (EOFError, ConnectionError):
        peer.process.join()
        raise ConfigError(_death(peer)) from None
    if isinstance(message, tuple):
        report(*message)
    elif isinstance(message, Made):
        assert peer.part is not None
        done(peer.part, message)
        peer.part = None
        _hand_out(peer, waiting, peers)
    elif isinstance(message, MegatronError):
        raise message
    else:
        raise RuntimeError(f"a worker failed:\n{message}")


def _hand_out(peer: _Peer, waiting: list[Part], peers: dict[Connection, _Peer]) -> None:
    if not waiting:
        return
    taken = {other.source for other in peers.values()}
    firsts = [part.pieces[0].source for part in waiting]
    index = next((i for i, first in enumerate(firsts) if first == peer.source), None)
    if index is None:
        index = next((i for i, first in enumerate(firsts) if first not in taken), 0)
    peer.part = waiting.pop(index)
    peer.source = peer.part.pieces[-1].source
    with contextlib.suppress(ConnectionError):  # what it said before it ended is read next
        peer.connection.send(peer.part)


def _death(peer: _Peer) -> str:
    code = peer.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    why = "; the machine may be out of memory: use fewer --workers" if code == -9 else ""
    shard = peer.part.name if peer.part is not None else "no shard"
    return (
        f"a worker {how} while it made {shard}{why}. Finished shards are kept: go on with --resume"
    )


def _serve(connection: Connection, job: Job) -> None:
    """Make shards until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its workers itself
    try:
        worker = Worker(job)
        while True:
            part: Part = connection.recv()
            made = worker.make(part, lambda size, tokens: connection.send((size, tokens)))
            connection.send(made)
    except (EOFError, ConnectionError):
        return
    except MegatronError as error:
        connection.send(error)
    except Exception:  # the command says it
        connection.send(traceback.format_exc())
