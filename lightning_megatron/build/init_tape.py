"""Record of the operators that write tensors on the meta device, to be replayed on real memory.

``configure_model`` runs on the meta device, where a write has no effect: ``load_state_dict``,
``nn.init.zeros_(layer.weight)``, ``self.apply(init)``, ``weight[0] = 0``. `InitTape` records every
operator that makes or writes a tensor there. `build.written_values` replays, on real memory, the
operators that one tensor depends on.

The tape records operators and not the user's calls, because every way of writing (views, ``.data``,
an initialisation of torch or of the user's, a copy of another parameter) comes down to operators on
a storage. Real values on every rank would be simpler, but eight ranks of a node would hold the
model eight times.

Some code cannot be replayed: it reads a value, uses a generator of its own, seeds torch's, or makes
tensors where no operator is seen. `InitTape.reason` then says why, and the caller builds real
tensors.

torchdistx had deferred initialisation on the same principle, below Python (``deferred_init``).
"""

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch.graphs import TorchDispatchMode, tree_flatten, tree_map
from lightning_megatron.layers.base import ParallelLayer

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods with which modules give values to their own tensors."""
EMPTY = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    )
)
_OVERWRITES = frozenset(
    f"aten::{name}" for name in ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_")
)
"""Operators that overwrite all values of a tensor, if they write the whole of it."""
_MOVE = frozenset({"aten::set_", "aten::resize_"})
"""Operators that give a tensor other memory, after which its storage does not identify it."""


@dataclass(frozen=True)
class View:
    """Tensor on meta, as a view of a storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """Return the view that ``tensor`` is."""
        return cls(
            storage_of(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class RecordedOp:
    """Recorded operator; its tensors on meta are `View`."""

    call: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: tuple[View | None, ...]
    """Results that have memory of their own."""
    reads: frozenset[int]
    writes: frozenset[int]
    erased: frozenset[int]
    """Storages whose earlier values are all overwritten."""
    by: nn.Module | None
    """Module whose ``reset_parameters`` runs."""
    layer: ParallelLayer | None
    """Layer whose constructor makes a tensor that it leaves empty."""
    random: bool
    dtype: torch.dtype
    """Default dtype at that time."""

    @property
    def touched(self) -> set[int]:
        """Storages that the operator makes or writes."""
        return {view.storage for view in self.made if view is not None} | self.writes


class ValueNeededError(RuntimeError):
    """The value of a tensor on meta was read."""


class InitTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records the operators which give values to tensors on the meta device.

    Args:
        module: module that is built; `undo` restores the values of its real tensors.

    Attributes:
        steps: recorded operators, in order.
        events: positions in ``steps`` of the operators that made or wrote each storage.
        storages: every storage on meta that was seen, kept so that no address is used twice.
        existing: storages that ``module`` had before.
        reason: reason why the tape cannot be replayed; None if it can.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[RecordedOp] = []
        self.events: dict[int, list[int]] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._sources: dict[int, Tensor] = {}
        self._seed = torch.initial_seed()
        self.reason: str | None = None
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}
        self.existing: set[int] = set()
        self._guarded: set[int] = set()
        for tensor in (*module.parameters(), *module.buffers()):
            (self.existing if tensor.is_meta else self._guarded).add(self._keep(tensor))

    def undo(self) -> None:
        """Restore the values of tensors that were real before the block."""
        with torch.no_grad():
            for tensor, value in self._overwritten.values():
                tensor.copy_(value)
        self._overwritten.clear()

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = tensors_in((args, kwargs))
        written = _written(func, args, kwargs)
        for tensor in written:
            if not tensor.is_meta:
                self._before_write(tensor)
        on_meta = any(t.is_meta for t in inputs)
        try:
            result = func(*args, **kwargs)
        except Exception:  # raised again; operators raise what they like about meta tensors
            if on_meta:
                self.give_up(f"{func} has no result without values")
            raise
        if on_meta and isinstance(result, bool | int | float):
            self.give_up(f"{func} reads values")
            raise ValueNeededError(self.reason)
        if any(t.is_meta for t in (*written, *tensors_in(result))):
            self._note(func, args, kwargs, inputs, written, result)
        return result

    def _note(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        written: list[Tensor],
        result: Any,
    ) -> None:
        known = {storage_of(t) for t in inputs if t.is_meta}
        results = list(result) if isinstance(result, list | tuple) else [result]
        made = tuple(
            View.of(t) if isinstance(t, Tensor) and storage_of(t) not in known else None
            for t in results
        )
        writes = frozenset(storage_of(t) for t in written if t.is_meta)
        if not writes and not any(made):
            return  # another view of the same
        name = _name(func)
        if name in _MOVE:
            self.give_up(f"{name} gives a tensor other memory")
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if random:
            self._check_draw(kwargs)
        for tensor in (*inputs, *(t for t in results if isinstance(t, Tensor))):
            if tensor.is_meta:
                self._keep(tensor)
        reads = self._reads(func, args, kwargs, writes)
        step = RecordedOp(
            call=func,
            name=name,
            args=self._stored(args),
            kwargs=self._stored(kwargs),
            made=made,
            reads=reads,
            writes=writes,
            erased=frozenset(
                storage_of(t)
                for t in written
                if name in _OVERWRITES and _is_all(t) and storage_of(t) not in reads
            ),
            by=_resetting(sys._getframe(2)) if writes else None,
            layer=_constructing(sys._getframe(2)) if name in EMPTY else None,
            random=random,
            dtype=torch.get_default_dtype(),
        )
        self._add(step)

    def note_initialisation(
        self, function: Callable[..., Any], tensor: Tensor, given: Mapping[str, Any]
    ) -> None:
        """Record a call of ``torch.nn.init`` that does nothing on the meta device.

        Args:
            function: function of ``torch.nn.init``.
            tensor: tensor that it would fill.
            given: arguments by name, including ``tensor``.
        """
        self._check_draw(given)
        key = frozenset({self._keep(tensor)})
        self._add(
            RecordedOp(
                call=function,
                name=function.__name__,
                args=(),
                kwargs=self._stored(dict(given)),
                made=(),
                reads=frozenset(),
                writes=key,
                erased=key if _is_all(tensor) else frozenset(),
                by=_resetting(sys._getframe(2)),
                layer=None,
                random=True,
                dtype=torch.get_default_dtype(),
            )
        )

    def _add(self, step: RecordedOp) -> None:
        for key in step.touched:
            self.events.setdefault(key, []).append(len(self.steps))
        self.steps.append(step)

    def _check_draw(self, arguments: Mapping[str, Any]) -> None:
        if arguments.get("generator") is not None:
            self.give_up("weights are drawn from a generator of your own")
        if torch.initial_seed() != self._seed:
            self.give_up("torch is seeded there before weights are drawn")

    def _reads(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], writes: frozenset[int]
    ) -> frozenset[int]:
        """Storages whose values the operator reads; one that is passed twice counts as read."""
        given = [storage_of(t) for t in tensors_in((args, kwargs)) if t.is_meta]
        return frozenset(key for key in given if key not in writes or given.count(key) > 1)

    def _stored(self, tree: Any) -> Any:
        return tree_map(self._stored_leaf, tree)

    def _stored_leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_meta:
            return View.of(value)
        # Memory that is not torch's own may be filled anew behind its back (numpy, files).
        kept = value.detach()
        kept = kept if kept.untyped_storage().resizable() else kept.clone()
        self._sources[storage_of(kept)] = kept
        return kept

    def _before_write(self, tensor: Tensor) -> None:
        key = storage_of(tensor)
        if key in self._sources:
            self.give_up("a tensor that weights were copied from is written to afterwards")
        if key in self._guarded and key not in self._overwritten:
            storage = tensor.detach().as_strided((_length(tensor),), (1,), 0)
            self._overwritten[key] = storage, storage.clone()

    def _keep(self, tensor: Tensor) -> int:
        key = storage_of(tensor)
        self.storages.setdefault(key, tensor.untyped_storage())
        return key

    def give_up(self, reason: str) -> None:
        """Set `reason`, unless an earlier one is set."""
        self.reason = self.reason or reason

    def steps_for(self, storages: set[int]) -> list[int]:
        """Indices of the steps that the values in ``storages`` depend on."""
        need: set[int] = set()
        left: list[int] = []  # what may be needed, negated: the latest comes first

        def add(keys: Iterable[int], before: int) -> None:
            for key in keys:
                if key not in need:
                    need.add(key)
                    for index in self.events.get(key, ()):
                        if index < before:
                            heapq.heappush(left, -index)

        add(storages, len(self.steps))
        found: list[int] = []
        while left:
            index = -heapq.heappop(left)
            step = self.steps[index]
            if index in found[-1:] or need.isdisjoint(step.touched):
                continue
            found.append(index)
            need -= step.erased
            add(step.reads, index)
        return found[::-1]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    schema = getattr(func, "_schema", None)
    found: list[Tensor] = []
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return str(func) if schema is None else str(schema.name)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, equal for all its views as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def _length(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _is_all(tensor: Tensor) -> bool:
    """Whether a tensor covers its whole storage."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()


def _resetting(frame: FrameType | None) -> nn.Module | None:
    """The module whose ``reset_parameters`` runs, innermost."""
    return next((m for m in _callers(frame, RESETS) if isinstance(m, nn.Module)), None)


def _constructing(frame: FrameType | None) -> ParallelLayer | None:
    """The parallel layer whose constructor runs, innermost."""
    return next((m for m in _callers(frame, ("__init__",)) if isinstance(m, ParallelLayer)), None)


def _callers(frame: FrameType | None, methods: Sequence[str]) -> Iterator[Any]:
    """The objects whose methods of these names are running, innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in methods and code.co_varnames:
            yield frame.f_locals.get(code.co_varnames[0])
        frame = frame.f_back
