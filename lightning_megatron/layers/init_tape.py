"""What code does to tensors that have no memory yet, so that it can be done to one of them later.

``configure_model`` runs on the meta device, where a write has no effect: ``load_state_dict``,
``nn.init.zeros_(layer.weight)``, ``self.apply(init)``, ``weight[0] = 0``. `InitTape` notes every
operator that makes or writes a tensor there. Afterwards it tells the tensors whose value is what
the ``reset_parameters`` of their own module makes it, which `layers.init` draws by name, from the
*written* ones. A written tensor gets its value by doing again, on real memory, the noted operators
that it depends on, and no others: one parameter is whole at a time, however large the model.

Why operators, and not the user's calls: every way of writing (views, ``.data``, an initialisation
of torch or of the user's, a copy of another parameter) comes down to operators, and tensors are
told apart by their storage, whatever object they are seen through. Why not simply real values on
every rank: eight ranks of a node would hold the model eight times.

An operator that draws random numbers does so, when it is done again, from a seed that follows from
the run's seed and from its place among the noted ones, so that every rank and every layout draws
alike, and tensors that come of one draw agree. The numbers are not those of a process that draws
everything in a row. Where values cannot be had this way, `InitTape.reason` says why, and the
caller builds real tensors: something reads a value, is given a generator of its own or seeds
torch's, or comes from where no operator is seen.

torchdistx had deferred initialisation on the same principle, below Python (``deferred_init``).
"""

import hashlib
import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch import TorchDispatchMode, tree_flatten, tree_map
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.rng import derive_seed

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods with which modules give values to their own tensors."""
_EMPTY = frozenset(
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
"""Leave nothing of what was there, if they write all of it."""
_MOVE = frozenset({"aten::set_", "aten::resize_"})
"""Give a tensor other memory, which a storage cannot stand for."""


@dataclass(frozen=True)
class _View:
    """A tensor on meta, as a place in a storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        return cls(
            _key(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One operator; its tensors on meta are `_View`."""

    call: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: tuple[_View | None, ...]
    """Results, where they have memory of their own."""
    reads: frozenset[int]
    writes: frozenset[int]
    erased: frozenset[int]
    """Storages of which nothing that was there before is left."""
    by: nn.Module | None
    """Whose ``reset_parameters`` runs."""
    layer: ParallelLayer | None
    """Whose constructor makes a tensor that it leaves empty."""
    random: bool
    dtype: torch.dtype
    """Default format at that moment."""

    @property
    def touched(self) -> set[int]:
        return {view.storage for view in self.made if view is not None} | self.writes


class ValueNeededError(RuntimeError):
    """A value of a tensor without one was asked for."""


class InitTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, notes what gives values to tensors on the meta device.

    Args:
        module: what is built; its real tensors get their values back from `undo`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []
        self._events: dict[int, list[int]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._sources: dict[int, Tensor] = {}
        self._seed = torch.initial_seed()
        self.reason: str | None = None
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}
        self._existing: set[int] = set()
        self._guarded: set[int] = set()
        for tensor in (*module.parameters(), *module.buffers()):
            (self._existing if tensor.is_meta else self._guarded).add(self._keep(tensor))

    def undo(self) -> None:
        """Give tensors that were real before the block the values of then."""
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
        inputs = _tensors((args, kwargs))
        written = _written(func, args, kwargs)
        for tensor in written:
            if not tensor.is_meta:
                self._before_write(tensor)
        on_meta = any(t.is_meta for t in inputs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if on_meta:
                self._give_up(f"{func} has no result without values")
            raise
        if on_meta and isinstance(result, bool | int | float):
            self._give_up(f"{func} reads values")
            raise ValueNeededError(self.reason)
        if any(t.is_meta for t in (*written, *_tensors(result))):
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
        known = {_key(t) for t in inputs if t.is_meta}
        results = list(result) if isinstance(result, list | tuple) else [result]
        made = tuple(
            _View.of(t) if isinstance(t, Tensor) and _key(t) not in known else None for t in results
        )
        writes = frozenset(_key(t) for t in written if t.is_meta)
        if not writes and not any(made):
            return  # another view of the same
        name = _name(func)
        if name in _MOVE:
            self._give_up(f"{name} gives a tensor other memory")
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if random:
            self._check_draw(kwargs)
        for tensor in (*inputs, *(t for t in results if isinstance(t, Tensor))):
            if tensor.is_meta:
                self._keep(tensor)
        reads = self._reads(func, args, kwargs, writes)
        step = _Step(
            call=func,
            name=name,
            args=self._stored(args),
            kwargs=self._stored(kwargs),
            made=made,
            reads=reads,
            writes=writes,
            erased=frozenset(
                _key(t)
                for t in written
                if name in _OVERWRITES and _is_all(t) and _key(t) not in reads
            ),
            by=_resetting(sys._getframe(2)) if writes else None,
            layer=_constructing(sys._getframe(2)) if name in _EMPTY else None,
            random=random,
            dtype=torch.get_default_dtype(),
        )
        self._add(step)

    def note_initialisation(
        self, function: Callable[..., Any], tensor: Tensor, given: Mapping[str, Any]
    ) -> None:
        """Note a call of ``torch.nn.init`` that does nothing on the meta device.

        Args:
            function: what is called.
            tensor: what it would fill.
            given: its arguments by name, ``tensor`` among them.
        """
        self._check_draw(given)
        key = frozenset({self._keep(tensor)})
        self._add(
            _Step(
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

    def _add(self, step: _Step) -> None:
        for key in step.touched:
            self._events.setdefault(key, []).append(len(self._steps))
        self._steps.append(step)

    def _check_draw(self, arguments: Mapping[str, Any]) -> None:
        if arguments.get("generator") is not None:
            self._give_up("weights are drawn from a generator of your own")
        if torch.initial_seed() != self._seed:
            self._give_up("torch is seeded there before weights are drawn")

    def _reads(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], writes: frozenset[int]
    ) -> frozenset[int]:
        """Storages whose values count; what is only written is among them if it is given twice."""
        given = [_key(t) for t in _tensors((args, kwargs)) if t.is_meta]
        return frozenset(key for key in given if key not in writes or given.count(key) > 1)

    def _stored(self, tree: Any) -> Any:
        return tree_map(self._stored_leaf, tree)

    def _stored_leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_meta:
            return _View.of(value)
        # Memory that is not torch's own may be filled anew behind its back (numpy, files).
        kept = value.detach()
        kept = kept if kept.untyped_storage().resizable() else kept.clone()
        self._sources[_key(kept)] = kept
        return kept

    def _before_write(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._sources:
            self._give_up("a tensor that weights were copied from is written to afterwards")
        if key in self._guarded and key not in self._overwritten:
            storage = tensor.detach().as_strided((_length(tensor),), (1,), 0)
            self._overwritten[key] = storage, storage.clone()

    def _keep(self, tensor: Tensor) -> int:
        key = _key(tensor)
        self._storages.setdefault(key, tensor.untyped_storage())
        return key

    def _give_up(self, reason: str) -> None:
        self.reason = self.reason or reason

    # Afterwards ----------------------------------------------------------------------------------

    def written(self, module: nn.Module) -> "WrittenValues":
        """The tensors inside ``module`` that were written; sets `reason` if that cannot be told."""
        tensors = [
            (name, local, child, tensor)
            for name, child in module.named_modules(remove_duplicate=False)
            for own in (child._parameters, child._buffers)
            for local, tensor in own.items()
            if tensor is not None and tensor.is_meta
        ]
        owners: dict[int, set[nn.Module]] = {}
        for _, _, child, tensor in tensors:
            owners.setdefault(_key(tensor), set()).add(child)
        reaching = {
            step.by
            for step in self._steps
            if step.by is not None
            and any(step.by not in owners.get(k, {step.by}) for k in step.writes)
        }
        views: dict[str, _View] = {}
        drawn: dict[str, _View] = {}
        for name, local, _, tensor in tensors:
            key, full = _key(tensor), f"{name}.{local}" if name else local
            if key not in self._events and key not in self._existing:
                self._give_up(f"{full} comes from where no operator is seen")
            is_drawn = any(self._is_drawn(key, o, owners, reaching) for o in owners[key])
            (drawn if is_drawn else views)[full] = _View.of(tensor)
        needed = self._needed({view.storage for view in views.values()})
        shared = {key for index in needed for key in self._steps[index].touched}
        for name, view in drawn.items():
            if view.storage in shared and not self._is_left_empty(view.storage):
                views[name] = view
        needed = self._needed({view.storage for view in views.values()})
        names = {child: name for name, child in module.named_modules()}
        fillers = {
            index: self._filler(self._steps[index], names)
            for index in needed
            if self._steps[index].layer is not None
        }
        return WrittenValues(self, views, needed, fillers)

    def _filler(
        self, step: _Step, names: Mapping[nn.Module, str]
    ) -> tuple[ParallelLayer, str, str] | None:
        """Layer, local name and full name of the parameter that a step made."""
        layer = step.layer
        assert layer is not None
        for local, parameter in layer._parameters.items():
            if parameter is not None and parameter.is_meta and _key(parameter) in step.touched:
                name = names.get(layer)
                if name is not None:
                    return layer, local, f"{name}.{local}" if name else local
        self._give_up(f"weights of a {type(layer).__name__} are copied, and it is left")
        return None

    def _is_drawn(
        self,
        key: int,
        owner: nn.Module,
        owners: Mapping[int, set[nn.Module]],
        reaching: set[nn.Module],
    ) -> bool:
        """Whether the value is what ``reset_parameters`` of its module makes it."""
        events = self._events.get(key)
        if not events:
            return True
        last = self._steps[events[-1]]
        if last.by is not None:
            return last.by is owner and owner not in reaching
        if len(events) > 1 or last.writes:
            return False
        if last.name == "aten::_to_copy" and len(last.reads) == 1:
            (source,) = last.reads
            return source not in owners and self._is_drawn(source, owner, owners, reaching)
        return last.name in _EMPTY

    def _is_left_empty(self, key: int) -> bool:
        events = self._events.get(key, [])
        return len(events) == 1 and self._steps[events[0]].layer is not None

    def _needed(self, storages: set[int]) -> list[int]:
        """Indices of the steps that what is in ``storages`` depends on."""
        need: set[int] = set()
        left: list[int] = []  # what may be needed, negated: the latest comes first

        def add(keys: Iterable[int], before: int) -> None:
            for key in keys:
                if key not in need:
                    need.add(key)
                    for index in self._events.get(key, ()):
                        if index < before:
                            heapq.heappush(left, -index)

        add(storages, len(self._steps))
        found: list[int] = []
        while left:
            index = -heapq.heappop(left)
            step = self._steps[index]
            if index in found[-1:] or need.isdisjoint(step.touched):
                continue
            found.append(index)
            need -= step.erased
            add(step.reads, index)
        return found[::-1]


class WrittenValues:
    """Values of written tensors, by their names in the module; made by `InitTape.written`."""

    def __init__(
        self,
        tape: InitTape,
        views: Mapping[str, _View],
        needed: Sequence[int],
        fillers: Mapping[int, tuple[ParallelLayer, str, str] | None],
    ) -> None:
        self._tape, self._views, self._fillers = tape, views, fillers
        draws = [index for index in needed if tape._steps[index].random]
        self._place = {index: place for place, index in enumerate(draws)}
        self._steps = needed

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def value(self, name: str, seed: int, device: torch.device) -> Tensor:
        """The whole tensor ``name``, on ``device``."""
        view, tape = self._views[name], self._tape
        memory: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            if isinstance(value, torch.device):
                return device if value.type == "meta" else value
            return _at(memory, value, tape._storages, device) if isinstance(value, _View) else value

        default = torch.get_default_dtype()
        cuda = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            try:
                for index in tape._needed({view.storage}):
                    step = tape._steps[index]
                    torch.set_default_dtype(step.dtype)
                    if step.random:
                        torch.manual_seed(derive_seed(seed, "init", "written", self._place[index]))
                    result = step.call(*tree_map(real, step.args), **tree_map(real, step.kwargs))
                    if step.made:
                        _bind(memory, step.made, result)
                    self._fill(index, step, memory, seed, device)
            finally:
                torch.set_default_dtype(default)
            return _at(memory, view, tape._storages, device).clone()

    def _fill(
        self,
        index: int,
        step: _Step,
        memory: Mapping[int, torch.UntypedStorage],
        seed: int,
        device: torch.device,
    ) -> None:
        """Draw what a parallel layer leaves to `layers.init`."""
        filler, (view, *_) = self._fillers.get(index), step.made or (None,)
        if filler is None or view is None:
            return
        layer, local, name = filler
        full = torch.empty(view.shape, dtype=torch.float32, device=device)
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "init", name))
        layer.init_parameter(local, full, generator)
        _at(dict(memory), view, {}, device).copy_(full)

    def signature(self) -> str:
        """A text that is equal on ranks whose values are."""
        numbers: dict[int, int] = {}
        digest = hashlib.sha256(repr(sorted(self._views)).encode())

        def plain(value: Any) -> Any:
            if isinstance(value, _View):
                number = numbers.setdefault(value.storage, len(numbers))
                return ("view", number, value.shape, value.stride, value.offset)
            if isinstance(value, Tensor):
                total = value.double().sum() if not value.is_complex() else value.abs().sum()
                return ("tensor", tuple(value.shape), float(total))
            return value

        for index in self._steps:
            step = self._tape._steps[index]
            leaves = [plain(leaf) for leaf in tree_flatten((step.args, dict(step.kwargs)))[0]]
            digest.update(repr((step.name, leaves, [plain(v) for v in step.made])).encode())
        return digest.hexdigest()


def _at(
    memory: dict[int, torch.UntypedStorage],
    view: _View,
    storages: Mapping[int, torch.UntypedStorage],
    device: torch.device,
) -> Tensor:
    if view.storage not in memory:
        size = storages[view.storage].nbytes()
        memory[view.storage] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    empty = torch.empty(0, dtype=view.dtype, device=device)
    return empty.set_(memory[view.storage], view.offset, view.shape, view.stride)


def _bind(
    memory: dict[int, torch.UntypedStorage], made: Iterable[_View | None], result: Any
) -> None:
    results = list(result) if isinstance(result, list | tuple) else [result]
    for view, tensor in zip(made, results, strict=True):
        if view is None:
            continue
        laid_out = tensor
        if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
            end = view.offset + sum(
                (n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)
            )
            base = torch.empty(end + 1, dtype=view.dtype, device=tensor.device)
            laid_out = base.as_strided(view.shape, view.stride, view.offset).copy_(tensor)
        memory[view.storage] = laid_out.untyped_storage()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    schema = getattr(func, "_schema", None)
    found: list[Tensor] = []
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return str(func) if schema is None else str(schema.name)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _length(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _is_all(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage."""
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
