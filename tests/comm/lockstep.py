"""All ranks of a job in one process, as threads that take turns: for more ranks than a pool has.

`run` is `WorkerPool.run` without processes. A rank runs alone until it waits for others, with a
random generator of its own, so that a job does what it does in a process. What a job patches in a
module it patches for all ranks: patch around `run` instead. The collectives are
those of torch's own tests.

The work of a job takes the same processor time here as on warm workers, and starting it a few
milliseconds less: jobs of a few ranks belong to the pool, whose groups are gloo's.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threads

from lightning_megatron.topology import axis, context

_turn = threading.Lock()
"""Held by the rank that runs."""

_messages: dict[tuple[str, int, int, int], Any] = defaultdict(queue.SimpleQueue)
"""Tensors on their way, by group, sender, receiver and tag."""


@contextmanager
def _turn_of_others() -> Iterator[None]:
    """Context in which this rank waits."""
    drawn = torch.get_rng_state()
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()
        torch.set_rng_state(drawn)


class _Collective(threads.Collective):
    def join(self, rank: int, data: Any) -> Any:
        with _turn_of_others():
            return super().join(rank, data)  # type: ignore[no-untyped-call]


class _Receipt(dist.Work):
    """Message that is expected."""

    def __init__(self, message: Any, tensor: Tensor) -> None:
        super().__init__()
        self._message, self._tensor = message, tensor

    def wait(self, timeout: Any = None) -> bool:
        with _turn_of_others():
            while not _Group._terminate.is_set():
                try:
                    found = self._message.get(timeout=1)
                except queue.Empty:
                    continue
                self._tensor.detach().copy_(found)
                return True
        raise SystemExit  # another rank failed


class _OfRank(threading.local):
    """Entries of this rank, by the names of groups, which are the same on all ranks."""

    def __init__(self) -> None:
        self.entries = WeakValueDictionary[str, Any]()

    def get(self, name: str) -> Any:
        return self.entries.get(name)

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def __setitem__(self, name: str, entry: Any) -> None:
        self.entries[name] = entry


class _Group(threads.ProcessLocalGroup):
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        _messages[self.pg_name, self._rank, to, tag].put(tensors[0].detach().clone())
        return threads.ret_work(tensors)  # type: ignore[no-untyped-call]

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return _Receipt(_messages[self.pg_name, source, self._rank, tag], tensors[0])


def _group(store: Any, rank: int, size: int, timeout: Any) -> _Group:
    """Group without torch's barrier, in which a rank would keep its turn."""
    return _Group(rank, size)  # type: ignore[no-untyped-call]


dist.Backend.register_backend("lockstep", _group, devices=["cpu"])


def run(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn(*args)`` on ranks that are in a process group already; returns their results.

    Raises:
        Exception: what the first rank that failed has raised.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    errors: list[BaseException] = []

    def as_rank(rank: int) -> Any:
        with _turn:
            dist.init_process_group("lockstep", rank=rank, world_size=world_size, store=store)
            torch.manual_seed(0)
            try:
                return fn(*args)
            except BaseException as error:
                errors.append(error)
                _Group.exception_handle(error)  # type: ignore[no-untyped-call]
            finally:
                dist.destroy_process_group()

    threads._install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with (
            patch.object(threads, "Collective", _Collective),
            patch.object(axis, "_axes", _OfRank()),
            patch.object(context, "_contexts", _OfRank()),
            ThreadPoolExecutor(world_size) as ranks,
        ):
            results = list(ranks.map(as_rank, range(world_size)))
    finally:
        _messages.clear()
        _Group.reset()  # type: ignore[no-untyped-call]
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
    if errors:
        raise errors[0]
    return results
