"""Streams of a device that is the host: torch's sanitizer holds who uses memory in which order.

Within `PretendStreams` the host has streams and events. Work is done at once, so numbers are always
right; but each operator is told to torch's own ``torch.cuda._sanitizer``, with the storages that it
reads and writes and the stream on which it would run, and so are waits and records. A use that no
wait orders after a write, or a write that no wait orders after a use, is an error.

Beside what torch looks at: storages that are freed while a stream other than that of their making
may still have a use of them queued, unless ``record_stream`` was called, as their memory would be
given to the next tensor; and memory that is new belongs to the stream that asked for it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_TOUCH_NO_MEMORY = ("aten::set_", "aten::resize_")


class Unordered(AssertionError):
    """Two uses of a storage that nothing orders."""


class PretendStreams(TorchDispatchMode):
    """Context in which the host's streams order work; it takes the place of a device's module."""

    def __init__(self) -> None:
        super().__init__()
        self._handler = EventHandler()
        self._numbers = count(1)
        self._keys: dict[int, int] = {}
        """Numbers of storages, by the id of the object that torch keeps of each while it lives."""
        self._homes: dict[int, int] = {}
        self._recorded: dict[int, set[int]] = {}
        self._kept: set[int] = set()
        """Page-locked storages, by the id of their objects."""
        self.problems: list[str] = []
        self.default = _Stream(self)
        self._current = [self.default]

    # What a device's module has -------------------------------------------------------------------

    def Stream(self, *args: Any, **kwargs: Any) -> "_Stream":
        """Make a stream."""
        return _Stream(self)

    def Event(self, **kwargs: Any) -> "_Event":
        """Make an event."""
        return _Event(self)

    def current_stream(self, device: Any = None) -> "_Stream":
        """Stream on which work is queued at this moment."""
        return self._current[-1]

    @contextmanager
    def stream(self, stream: "_Stream") -> Iterator[None]:
        """Context in which work is queued on a stream."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    # Looking --------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        """Begin to look."""

        def record_stream(tensor: Tensor, stream: "_Stream") -> None:
            self._record_stream(tensor, stream)

        self._patches = [
            mock.patch.object(torch, "get_device_module", return_value=self),
            mock.patch.object(Tensor, "record_stream", record_stream),
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop; raise what was found, unless something else went wrong."""
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()
        if self.problems and error[0] is None:
            raise Unordered("\n".join(self.problems))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tell the sanitizer of an operator."""
        kwargs = kwargs or {}
        given = {id(s): s for s in _storages((args, kwargs))}
        pinned = kwargs.get("pin_memory")
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        if pinned:  # the host's allocator waits for whatever uses its memory
            self._kept |= {id(s) for s in _storages(result)}
        made = {id(s): s for s in _storages(result) if id(s) not in given}
        written: set[int] = set()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {id(s) for s in _storages(value)}
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None:
                written |= {id(s) for s in _storages(kwargs[argument.name])}
        if func._schema.name in _TOUCH_NO_MEMORY:
            return result
        if not made and not written:
            returns = func._schema.returns
            if all(r.alias_info is not None for r in returns):
                return result  # a view reads nothing
        keys = {key: self._key(storage) for key, storage in {**given, **made}.items()}
        self._launch(
            str(func),
            read={keys[key] for key in given if key not in written},
            written={keys[key] for key in {*written, *made}},
        )
        return result

    def _key(self, storage: Any) -> int:
        if id(storage) not in self._keys:
            key = next(self._numbers)
            self._keys[id(storage)] = key
            self._homes[key] = self._current[-1].number
            weakref.finalize(storage, self._freed, id(storage), key).atexit = False
        return self._keys[id(storage)]

    def _launch(self, name: str, read: set[int], written: set[int]) -> None:
        stream = self._current[-1].number
        aliases: dict[int, list[str]] = {key: [] for key in read | written}
        errors = self._handler._handle_kernel_launch(stream, read, written, set(), name, aliases)
        self.problems += [
            f"{name} on stream {stream} is not ordered after "
            f"{error.previous_access.operator} on stream {error.previous_access.stream}"
            for error in errors
        ]

    def _record_stream(self, tensor: Tensor, stream: "_Stream") -> None:
        self._recorded.setdefault(self._key(tensor.untyped_storage()), set()).add(stream.number)

    def _freed(self, storage: int, key: int) -> None:
        self._keys.pop(storage, None)
        if storage in self._kept:
            self._kept.discard(storage)
            return
        home, accessed = self._homes.pop(key), self._handler.tensors_accessed
        write = accessed.get_write(key)
        uses = [*accessed.get_reads(key), *([] if write is None else [write])]
        for use in uses:
            ordered = self._handler.syncs.is_ordered_after(home, use.seq_num, use.stream)
            if not ordered and use.stream not in self._recorded.get(key, ()):
                self.problems.append(
                    f"memory of stream {home} is freed, and {use.operator} on stream {use.stream} "
                    "may still use it"
                )


class _Stream:
    """A queue of work."""

    _numbers = count()

    def __init__(self, owner: PretendStreams) -> None:
        self.owner, self.number = owner, next(self._numbers)
        owner._handler._handle_stream_creation(self.number)

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event(self.owner)
        event.record(self)
        return event

    def wait_event(self, event: "_Event") -> None:
        self.owner._handler._handle_event_wait(event.number, self.number)

    def wait_stream(self, stream: "_Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.owner._handler._handle_stream_synchronization(self.number)


class _Event:
    """A place in a queue."""

    _numbers = count(1)

    def __init__(self, owner: PretendStreams) -> None:
        self.owner, self.number = owner, next(self._numbers)
        owner._handler._handle_event_creation(self.number)

    def record(self, stream: _Stream | None = None) -> None:
        number = (stream or self.owner.current_stream()).number
        self.owner._handler._handle_event_record(self.number, number)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self.owner.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.owner._handler._handle_event_synchronization(self.number)

    def query(self) -> bool:
        return True


def _storages(tree: Any) -> list[Any]:
    leaves = pytree.tree_leaves(tree)
    return [x.untyped_storage() for x in leaves if isinstance(x, Tensor) and x.device.type == "cpu"]
