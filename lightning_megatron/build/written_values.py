"""Values of tensors that the user's code wrote on the meta device.

`written_values` finds, among the tensors that `build.init_tape` has recorded, the *written* ones:
those whose value is not the one that ``reset_parameters`` of their own module gives (`build.init`
draws these by name). The value of a written tensor is computed by replaying the recorded operators
that it depends on, and no others: one parameter is whole at a time, however large the model.

An operator that draws random numbers is replayed with a seed that depends on the run's seed and on
the operator's position, so that every rank and every layout draws alike, and tensors that depend on
one draw agree. The numbers are not those of a process that draws everything in a row.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.devices import random_numbers_kept
from lightning_megatron._torch.graphs import tree_flatten, tree_map
from lightning_megatron.build.init_tape import EMPTY, InitTape, RecordedOp, View, storage_of
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.rng import derive_seed

_Filler = tuple[ParallelLayer, str, str]
"""Layer, local name and full name of a parameter that a constructor leaves empty."""


def draw(
    layer: ParallelLayer,
    local: str,
    name: str,
    shape: Sequence[int],
    seed: int,
    device: torch.device,
    *,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw a parameter of a parallel layer, from numbers that seed and name alone determine.

    Each matrix of a stack is drawn by itself, in float32, with its index in the stack for a third
    seed.

    Args:
        layer: has the rule.
        local: name of the parameter in the layer.
        name: canonical name in the model.
        shape: of the whole parameter, or of some matrices of a stack.
        seed: seed of the run.
        device: device of the values.
        first: index of the first of these matrices.
        dtype: number format of a stack of them; any other parameter is float32.
    """

    def drawn(size: Sequence[int], *seeds: Any) -> Tensor:
        values = torch.empty(tuple(size), dtype=torch.float32, device=device)
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "init", name, *seeds))
        with torch.no_grad():
            layer.init_parameter(local, values, generator)
        return values

    if local not in layer.stacked:
        return drawn(shape)
    stack = torch.empty(tuple(shape), dtype=dtype, device=device)
    for place, matrix in enumerate(stack):
        matrix.copy_(drawn(shape[1:], first + place))
    return stack


def written_values(tape: InitTape, module: nn.Module) -> "WrittenValues":
    """Find the written tensors inside ``module``; sets ``tape.reason`` if that is impossible.

    Args:
        tape: tape that recorded the construction of the module.
        module: the module; parts of it may be real.
    """
    tensors = [
        (name, local, child, tensor)
        for name, child in module.named_modules(remove_duplicate=False)
        for own in (child._parameters, child._buffers)
        for local, tensor in own.items()
        if tensor is not None and tensor.is_meta
    ]
    owners: dict[int, set[nn.Module]] = {}
    for _, _, child, tensor in tensors:
        owners.setdefault(storage_of(tensor), set()).add(child)
    reaching = {
        step.by
        for step in tape.steps
        if step.by is not None and any(step.by not in owners.get(k, {step.by}) for k in step.writes)
    }
    views: dict[str, View] = {}
    drawn: dict[str, View] = {}
    for name, local, _, tensor in tensors:
        key, full = storage_of(tensor), f"{name}.{local}" if name else local
        if key not in tape.events and key not in tape.existing:
            tape.give_up(f"{full} comes from where no operator is seen")
        is_drawn = any(_is_drawn(tape, key, o, owners, reaching) for o in owners[key])
        (drawn if is_drawn else views)[full] = View.of(tensor)
    needed = tape.steps_for({view.storage for view in views.values()})
    shared = {key for index in needed for key in tape.steps[index].touched}
    for name, view in drawn.items():
        if view.storage in shared and not _is_left_empty(tape, view.storage):
            views[name] = view
    needed = tape.steps_for({view.storage for view in views.values()})
    names = {child: name for name, child in module.named_modules()}
    fillers = {
        index: _filler(tape, tape.steps[index], names)
        for index in needed
        if tape.steps[index].layer is not None
    }
    return WrittenValues(tape, views, needed, fillers)


def _filler(tape: InitTape, step: RecordedOp, names: Mapping[nn.Module, str]) -> _Filler | None:
    """Return the parameter that a step made, if it is still there."""
    layer = step.layer
    assert layer is not None
    for local, parameter in layer._parameters.items():
        if parameter is not None and parameter.is_meta and storage_of(parameter) in step.touched:
            name = names.get(layer)
            if name is not None:
                return layer, local, f"{name}.{local}" if name else local
    tape.give_up(f"weights of a {type(layer).__name__} are copied, and it is left")
    return None


def _is_drawn(
    tape: InitTape,
    key: int,
    owner: nn.Module,
    owners: Mapping[int, set[nn.Module]],
    reaching: set[nn.Module],
) -> bool:
    """Whether ``reset_parameters`` of its own module gives the tensor its value."""
    events = tape.events.get(key)
    if not events:
        return True
    last = tape.steps[events[-1]]
    if last.by is not None:
        return last.by is owner and owner not in reaching
    if len(events) > 1 or last.writes:
        return False
    if last.name == "aten::_to_copy" and len(last.reads) == 1:
        (source,) = last.reads
        return source not in owners and _is_drawn(tape, source, owner, owners, reaching)
    return last.name in EMPTY


def _is_left_empty(tape: InitTape, key: int) -> bool:
    events = tape.events.get(key, [])
    return len(events) == 1 and tape.steps[events[0]].layer is not None


class WrittenValues:
    """Values of written tensors by name; made by `written_values`."""

    def __init__(
        self,
        tape: InitTape,
        views: Mapping[str, View],
        needed: Sequence[int],
        fillers: Mapping[int, _Filler | None],
    ) -> None:
        self._tape = tape
        self._views = views
        self._fillers = fillers
        draws = [index for index in needed if tape.steps[index].random]
        self._place = {index: place for place, index in enumerate(draws)}
        self._steps = needed

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def value(self, name: str, seed: int, device: torch.device) -> Tensor:
        """Compute the whole tensor ``name``, on ``device``."""
        view, tape = self._views[name], self._tape
        memory: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            if isinstance(value, torch.device):
                return device if value.type == "meta" else value
            return _at(memory, value, tape.storages, device) if isinstance(value, View) else value

        default = torch.get_default_dtype()
        with torch.no_grad(), random_numbers_kept(device):
            try:
                for index in tape.steps_for({view.storage}):
                    step = tape.steps[index]
                    torch.set_default_dtype(step.dtype)
                    if step.random:
                        torch.manual_seed(derive_seed(seed, "init", "written", self._place[index]))
                    result = step.call(*tree_map(real, step.args), **tree_map(real, step.kwargs))
                    if step.made:
                        _bind(memory, step.made, result)
                    self._fill(index, step, memory, seed, device)
            finally:
                torch.set_default_dtype(default)
            return _at(memory, view, tape.storages, device).clone()

    def _fill(
        self,
        index: int,
        step: RecordedOp,
        memory: Mapping[int, torch.UntypedStorage],
        seed: int,
        device: torch.device,
    ) -> None:
        """Draw a parameter that a parallel layer leaves to `build.init`."""
        filler, (view, *_) = self._fillers.get(index), step.made or (None,)
        if filler is None or view is None:
            return
        layer, local, name = filler
        drawn = draw(layer, local, name, view.shape, seed, device)
        _at(dict(memory), view, {}, device).copy_(drawn)

    def signature(self) -> str:
        """Return a text that is equal on ranks with equal values."""
        numbers: dict[int, int] = {}
        digest = hashlib.sha256(repr(sorted(self._views)).encode())

        def plain(value: Any) -> Any:
            if isinstance(value, View):
                number = numbers.setdefault(value.storage, len(numbers))
                return ("view", number, value.shape, value.stride, value.offset)
            if isinstance(value, Tensor):
                total = value.double().sum() if not value.is_complex() else value.abs().sum()
                return ("tensor", tuple(value.shape), float(total))
            return value

        for index in self._steps:
            step = self._tape.steps[index]
            leaves = [plain(leaf) for leaf in tree_flatten((step.args, dict(step.kwargs)))[0]]
            digest.update(repr((step.name, leaves, [plain(v) for v in step.made])).encode())
        return digest.hexdigest()


def _at(
    memory: dict[int, torch.UntypedStorage],
    view: View,
    storages: Mapping[int, torch.UntypedStorage],
    device: torch.device,
) -> Tensor:
    if view.storage not in memory:
        size = storages[view.storage].nbytes()
        memory[view.storage] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    empty = torch.empty(0, dtype=view.dtype, device=device)
    return empty.set_(memory[view.storage], view.offset, view.shape, view.stride)


def _bind(
    memory: dict[int, torch.UntypedStorage], made: Iterable[View | None], result: Any
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
