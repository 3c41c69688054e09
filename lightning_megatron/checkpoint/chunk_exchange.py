"""Chunks that ranks hand to each other in memory, from any layout to any other.

A checkpoint is written from the chunks that ranks have and read into the chunks that ranks need, so
a run can go on under any layout (chunks.py). `ChunkExchange` is the same with messages in the place
of files. The ranks tell each other the forms of what they have and of what they need; each computes
the same list of intersections, and every intersection goes from one rank that has it straight into
the tensor that needs it. A rank takes from itself what it has. Where several others have the same,
receivers turn to different ones.

Tensors are exchanged in batches: until a rank would send or receive more than `AT_ONCE` bytes. What
is under way at a rank is therefore at most that, or one tensor if that is larger; and a tensor that
nobody waits for any more is let go of, so that memory is free for what comes next.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.checkpoint.chunks import Chunk, ChunkForm, Form, describe
from lightning_megatron.checkpoint.directory.manifest import TensorEntry
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any

AT_ONCE = 32 << 20
"""Bytes that a rank sends, and that it receives, before it waits for both."""
_ALIGNED = 16
"""Multiple of bytes at which a tensor begins in a message, whatever its dtype."""

_Forms = Mapping[str, ChunkForm]


@dataclass(frozen=True)
class _Route:
    """Way of an intersection of two rectangles."""

    name: str
    source: int
    target: int
    held: Form
    """Rectangle of the source."""
    needed: Form
    """Rectangle of the target."""
    common: Form
    """Their intersection."""
    dtype: torch.dtype
    """Dtype of the source, and of the message."""

    @property
    def numbytes(self) -> int:
        """Bytes in a message, with the gap behind them."""
        size = prod(self.common[1]) * self.dtype.itemsize
        return -(-size // _ALIGNED) * _ALIGNED


class ChunkExchange:
    """Brings chunks from the ranks that have them to those that need them; collective.

    Args:
        what: the occasion, for error messages, like ``moving LAYERS``.
        held: chunks of this rank, by names that mean the same on all ranks. It is emptied as the
            exchange goes on.
        peers: the ranks.
        group: the same ranks in the same order, for tensors; the default group when None.
        device: device of the messages.

    Attributes:
        tensors: shape and dtype of what can be had, by name; the same on all ranks.

    Raises:
        ConfigError: ranks have chunks of different tensors under one name.
    """

    def __init__(
        self,
        what: str,
        held: dict[str, Chunk],
        *,
        peers: Peers,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._what = what
        self._held = held
        self._peers = peers
        self._group = group
        self._device = device
        self._everyone: list[_Forms] = peers.run(what, lambda: _forms(held), _agreed)
        self.tensors: dict[str, TensorEntry] = {}
        for forms in self._everyone:
            for name, (shape, _, dtype) in forms.items():
                if name not in self.tensors:
                    self.tensors[name] = TensorEntry(
                        dtype=str(dtype).removeprefix("torch."), shape=shape, runs=()
                    )

    def fill(self, needed: Mapping[str, Chunk]) -> None:
        """Fill chunks in place; collective, and once.

        Args:
            needed: chunks of this rank, of the shapes in ``tensors`` and of any dtype.

        Raises:
            ConfigError: what some rank needs, none has. Nothing was changed then.
        """
        wishes = self._peers.run(self._what, lambda: _forms(needed), self._possible)
        with torch.no_grad():
            for names, routes in _batches(self._routes(wishes)):
                self._carry(routes, needed)
                for name in names:
                    self._held.pop(name, None)
        self._held.clear()

    def _possible(self, wishes: list[_Forms]) -> list[_Forms]:
        """Return what the ranks need, if they have it together."""
        problems = []
        for rank, forms in enumerate(wishes):
            for name, form in forms.items():
                entry = self.tensors.get(name)
                if entry is None or entry.shape != form.shape:
                    found = "none" if entry is None else f"one of shape {entry.shape}"
                    problems.append(
                        f"{self._what}: rank {rank} needs {name!r} of shape {form.shape}, the "
                        f"ranks have {found}; nearest valid: the tensors of the layout before"
                    )
        raise_if_any(problems)
        lacks: list[str] = []
        for _ in self._routes(wishes, lacks):
            pass
        raise_if_any(lacks)
        return wishes

    def _routes(
        self, wishes: Sequence[_Forms], lacks: list[str] | None = None
    ) -> Iterator[tuple[str, list[_Route]]]:
        """Yield the ways of every tensor; on all ranks the same, in the same order.

        Args:
            wishes: what each rank needs.
            lacks: gets one sentence for each chunk of which no rank has some part.
        """
        holders: dict[str, list[int]] = defaultdict(list)
        takers: dict[str, list[int]] = defaultdict(list)
        for rank, forms in enumerate(self._everyone):
            for name in forms:
                holders[name].append(rank)
        for rank, forms in enumerate(wishes):
            for name in forms:
                takers[name].append(rank)
        for name, having in holders.items():
            routes: list[_Route] = []
            for target in takers[name]:
                begin = target % len(having)
                own = [target] if name in self._everyone[target] else []
                sources = [*own, *having[begin:], *having[:begin]]
                for needed in wishes[target][name].rectangles:
                    missing = [needed] if prod(needed[1]) else []
                    routes += self._ways(name, sources, target, needed, missing)
                    if missing and lacks is not None:
                        lacks.append(
                            f"{self._what}: no rank has {name!r} from {missing[0][0]} on, "
                            f"{missing[0][1]} elements, which rank {target} needs; nearest valid: "
                            "the chunks of all ranks"
                        )
            yield name, routes

    def _ways(
        self, name: str, sources: Sequence[int], target: int, needed: Form, missing: list[Form]
    ) -> Iterator[_Route]:
        """Yield ways from ``sources`` in turn, until nothing of a rectangle is ``missing``."""
        for source in sources:
            if not missing:
                return
            form = self._everyone[source][name]
            for held in form.rectangles:
                for common in _take(missing, held):
                    yield _Route(name, source, target, held, needed, common, form.dtype)

    def _carry(self, routes: Sequence[_Route], needed: Mapping[str, Chunk]) -> None:
        """Send, receive and copy what is under way at once."""
        here = self._peers.rank
        outgoing: dict[int, list[_Route]] = defaultdict(list)
        incoming: dict[int, list[_Route]] = defaultdict(list)
        for route in routes:
            if route.source == route.target == here:
                _part(needed, route.name, route.needed, route.common).copy_(
                    _part(self._held, route.name, route.held, route.common)
                )
            elif route.source == here:
                outgoing[route.target].append(route)
            elif route.target == here:
                incoming[route.source].append(route)
        messages = {rank: self._message(parts) for rank, parts in sorted(incoming.items())}
        ops = [
            dist.P2POp(dist.irecv, message, self._global(rank), self._group)
            for rank, message in messages.items()
        ]
        for rank, parts in sorted(outgoing.items()):
            message = self._message(parts)
            for route, place in _places(parts, message):
                place.copy_(_part(self._held, route.name, route.held, route.common))
            ops.append(dist.P2POp(dist.isend, message, self._global(rank), self._group))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for rank, message in messages.items():
            for route, place in _places(incoming[rank], message):
                _part(needed, route.name, route.needed, route.common).copy_(place)

    def _message(self, routes: Sequence[_Route]) -> Tensor:
        """Return memory for a message; bytes, which every backend knows."""
        size = sum(route.numbytes for route in routes)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _forms(chunks: Mapping[str, Chunk]) -> _Forms:
    return {name: describe(chunk)[0] for name, chunk in chunks.items()}


def _agreed(everyone: list[_Forms]) -> list[_Forms]:
    """Return what the ranks have, if equal names mean equal tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    raise_if_any(
        [
            f"{name!r} has shape {form.shape} on rank {rank}, and {shapes[name]} on another; "
            "nearest valid: one name for each tensor"
            for rank, forms in enumerate(everyone)
            for name, form in forms.items()
            if shapes.setdefault(name, form.shape) != form.shape
        ]
    )
    return everyone


def _take(missing: list[Form], held: Form) -> list[Form]:
    """Take out of ``missing`` what lies in ``held``; return it."""
    found, left = [], []
    for each in missing:
        common = _common(each, held)
        if common is None:
            left.append(each)
        else:
            found.append(common)
            left += _beside(each, common)
    missing[:] = left
    return found


def _common(one: Form, other: Form) -> Form | None:
    """Return the intersection of two rectangles; None if they have none."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = zip(*one, *other, strict=True)
    sizes = tuple(
        min(a + n, b + m) - first for (a, n, b, m), first in zip(ends, offsets, strict=True)
    )
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def _beside(whole: Form, part: Form) -> Iterator[Form]:
    """Yield rectangles that make up ``whole`` together with ``part``, which lies in it."""
    offsets, sizes = map(list, whole)
    for dim, (first, length) in enumerate(zip(*part, strict=True)):
        begin, end = offsets[dim], offsets[dim] + sizes[dim]
        for start, stop in ((begin, first), (first + length, end)):
            if stop > start:
                offsets[dim], sizes[dim] = start, stop - start
                yield tuple(offsets), tuple(sizes)
        offsets[dim], sizes[dim] = first, length


def _batches(
    routes: Iterable[tuple[str, list[_Route]]],
) -> Iterator[tuple[list[str], list[_Route]]]:
    """Yield tensors, and the ways of all of them, that are under way at once."""
    names: list[str] = []
    batch: list[_Route] = []
    load: dict[tuple[int, bool], int] = defaultdict(int)
    for name, ways in routes:
        added: dict[tuple[int, bool], int] = defaultdict(int)
        for route in ways:
            if route.source != route.target:
                added[route.source, True] += route.numbytes
                added[route.target, False] += route.numbytes
        if batch and any(load[end] + size > AT_ONCE for end, size in added.items()):
            yield names, batch
            names, batch = [], []
            load.clear()
        names.append(name)
        batch += ways
        for end, size in added.items():
            load[end] += size
    yield names, batch


def _part(chunks: Mapping[str, Chunk], name: str, rectangle: Form, part: Form) -> Tensor:
    """Return the view of a part of one rectangle of a chunk."""
    found = next(r for r in chunks[name].rectangles() if (r.offsets, r.sizes) == rectangle)
    view = found.tensor
    for dim, (first, length) in enumerate(zip(*part, strict=True)):
        view = view.narrow(dim, first - found.offsets[dim], length)
    return view


def _places(routes: Sequence[_Route], message: Tensor) -> Iterator[tuple[_Route, Tensor]]:
    """Yield the tensors in a message."""
    begin = 0
    for route in routes:
        size = prod(route.common[1]) * route.dtype.itemsize
        yield route, message[begin : begin + size].view(route.dtype).view(route.common[1])
        begin += route.numbytes
