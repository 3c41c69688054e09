"""Weights of which this rank has a part, and which behave like the whole.

A parallel layer holds a slice of its weight, a rank of ZeRO 3 some rows, a rank of ep some of the
experts. While a run lasts, `WeightParts` gives such a parameter a class that knows its `Place`. Its
memory, its autograd and what optimizers step on stay what they are, but in user's code it is the
whole weight, on every rank::

    self.up.weight.shape                       # that of the whole
    penalty = self.up.weight.norm()            # that of the whole; each rank learns its part
    gram = self.up.weight @ self.up.weight.T   # right, too: it is gathered for this
    self.up.weight.grad[:4] = 0                # each rank clears what it has of these rows
    clip_grad_norm_(self.parameters(), 1.0)    # by the norm over all ranks

* A slice over tp that is one interval of a dim is computed with as a `SplitTensor`, by the same
  rules as the outputs of column-parallel layers (`whole.split_tensor`).
* Of any other part (rows of ZeRO 3, experts, slices of a fused projection) elementwise functions
  give such a part again, reductions to one number are completed over the ranks, and all else gets
  the whole. Losses of the ranks may differ that share out a batch, and so a part's gradient is then
  the mean of what they say.
* A weight that all tp ranks hold whole, and whose gradients are summed over them, gets from a
  penalty its share of the gradient.

What asks for numbers of other ranks is collective: all must ask. Layers compute with their own
parts, as do optimizers and all else of this library (`whole.memory`). `whole.places` says which
part a rank has, and `whole.part_numbers` completes numbers over the ranks. The file is long as its
classes share one table of what a weight's own attributes are.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from typing_extensions import override

from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass,
    break_graph,
    compare_memory_of_recomputed,
    compile_with_callers_only,
    outside_transforms,
    prepare_for_transforms,
    runs_compiled_backward,
    tree_flatten,
    tree_map,
)
from lightning_megatron.comm.functional import reduce_from
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole import split_rules, split_tensor
from lightning_megatron.whole.autograd_functions import InFunction
from lightning_megatron.whole.copied_view import as_views, copies_in
from lightning_megatron.whole.divided_gradient import LooksWhole
from lightning_megatron.whole.memory import computes_with_part, marked_functions, traces_users_code
from lightning_megatron.whole.part_numbers import (
    LEARNING,
    WholeOfParts,
    one_of,
    reduced,
    total_of,
)
from lightning_megatron.whole.places import Place
from lightning_megatron.whole.split_tensor import SplitTensor, gradients
from lightning_megatron.whole.splits import marked, part_of, place_of, split_of, whole
from lightning_megatron.whole.torch_functions import (
    OF_MEMORY,
    Args,
    Kind,
    Kwargs,
    Rule,
    by_place,
    changes,
    communicates,
    kind_of,
    name_of,
    told_by_shape,
)


class _PartOfWeight(Tensor):
    """Base of weights in parts, of their gradients and of what follows from them."""

    handles_split_tensors = True
    handles_weights = True
    _place: Place

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return _apply(func, types, args, kwargs or {})


class PartWeight(LooksWhole, _PartOfWeight, nn.Parameter):
    """Parameter of which this rank has a part (see the module's text)."""

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> "PartWeight":
        with DisableTorchFunctionSubclass():
            memo[id(self)] = made = type(self)(self.data.clone(), self.requires_grad)
            made._place = self._place
            return made


class SplitWeight(SplitTensor):
    """Slice over tp of a weight or gradient, or what followed from such by the rules."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return locked(func, super().__torch_function__(func, types, args, kwargs))


class _WeightInFunction(InFunction, SplitWeight):
    """The same, computed in the forward of a user's function for autograd."""

    outside = SplitWeight


SplitWeight.inside = _WeightInFunction


class PartTensor(_PartOfWeight):
    """Gradient of such a parameter, or what was computed from it element by element."""


class PartDTensor(_PartOfWeight, DTensor):
    """Parameter, gradient or result of which ZeRO 3 leaves some rows to this rank."""


class _Pipeline:
    """Whether this process runs a module whose weights are on several stages."""

    runs = False


_PIPELINE = _Pipeline()


class WeightParts:
    """The classes of a module's parameters while a run lasts; buffers are whole.

    Args:
        places: parameters of which this rank has a part, and their places.
        module: holds them.
    """

    def __init__(self, places: Sequence[tuple[nn.Parameter, Place]], module: nn.Module) -> None:
        self._parts = list(places)
        self._topologies = {id(place.topology) for _, place in self._parts}
        self._homes = {
            (id(child), name): id(parameter)
            for child in module.modules()
            for name, parameter in child._parameters.items()
        }
        self._hooks = [
            register_module_buffer_registration_hook(_whole_buffer),
            register_module_parameter_registration_hook(self._check_home),
        ]
        _PIPELINE.runs = any(place.stages is not None for _, place in self._parts)
        self._undo = prepare_for_transforms(_whole_arguments) if self._parts else None
        if self._parts:
            compare_memory_of_recomputed()
            rules_of: Any = SplitTensor.__torch_function__
            for function in (_apply, rules_of.__func__, *marked_functions()):
                compile_with_callers_only(function)
        self.show(self._parts)

    def _check_home(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        """Refuse a part in another place: checkpoints know of it by the name in its layer.

        ZeRO 3 puts it back into its own place by ``setattr`` where a module has a ``__setattr__``
        of its own, as recurrent networks have. Parts of other runs are not asked of: torch calls
        this for all modules of the process.
        """
        place = place_of(parameter)
        if place is None or not place.is_cut or id(place.topology) not in self._topologies:
            return
        if self._homes.get((id(module), name)) != id(parameter):
            raise ConfigError(
                f"{place.name}: it becomes another parameter, {name}, amid a run, as by "
                "torch.nn.utils.prune and parametrizations, and each rank holds a part of it; "
                "nearest valid: the same before the Trainer starts on a layer of torch.nn, zeros "
                "by hand (weight.data[weight.abs() < least] = 0), or tp=1 and zero=2 or lower"
            )

    def show(self, parts: Sequence[tuple[nn.Parameter, Place]]) -> None:
        """Let parameters know their places."""
        for weight, place in parts:
            known: Any = weight
            known.__class__ = PartDTensor if isinstance(weight, DTensor) else PartWeight
            known._place = place

    def hide(self) -> Sequence[tuple[nn.Parameter, Place]]:
        """Let what is whole on its stage be plain, and return it for `show`."""
        whole = [(w, place) for w, place in self._parts if not (place.is_cut or place.copies > 1)]
        for weight, _ in whole:
            known: Any = weight
            known.__class__ = nn.Parameter
            del known._place
        return whole

    def end(self) -> None:
        """Let the parameters be plain again."""
        for hook in self._hooks:
            hook.remove()
        if self._undo is not None:
            self._undo()
        with DisableTorchFunctionSubclass():
            for weight, _ in self._parts:
                for tensor in (weight, weight.grad):
                    if tensor is not None:
                        unmark(tensor, is_weight=tensor is weight)
        self._parts = []
        _PIPELINE.runs = False


def _whole_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> Any:
    """Gather what becomes a buffer, which is state that a checkpoint takes from one rank."""
    if split_of(buffer) is None and part_of(buffer) is None:
        return None
    return whole(buffer)


def _whole_arguments(tree: Any) -> Any:
    """Arguments of scripts and of ``torch.func``, which ask no class."""
    leaves = tree_flatten(tree)[0]
    if all(split_of(x) is None and part_of(x) is None and place_of(x) is None for x in leaves):
        return tree
    with outside_transforms():
        return tree_map(whole_weight, whole(tree))


def unmark(tensor: Tensor | None, *, is_weight: bool = False) -> None:
    """Let a part be no more than what this rank holds."""
    if tensor is None:
        return
    plain = nn.Parameter if is_weight else Tensor
    tensor.__class__ = DTensor if isinstance(tensor, DTensor) else plain
    for name in ("_place", "_split"):
        tensor.__dict__.pop(name, None)


# Functions ----------------------------------------------------------------------------------------


def _apply(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    if _PIPELINE.runs:
        # The memo of a copy has other weights, and says nothing of this one.
        stages = _stages(args[:1] if kind_of(func) == "deep_copy" else args, kwargs)
        if stages is not None:
            return stages.apply(func, args, kwargs)
    if traces_users_code():
        break_graph()  # and call ``func`` for what it is
    if torch.compiler.is_compiling():
        return _of_tensor(func, args, kwargs)
    args, kwargs = by_place(func, args, kwargs)
    if computes_with_part(_weights(args, kwargs)) or runs_compiled_backward():
        return _of_memory(func, types, args, kwargs)
    kind = kind_of(func)
    if kind == "differentiate":
        return _differentiated(func, args, kwargs)
    own = None if kind is None else RULES.get(kind)
    if own is not None and place_of(args[0]) is not None:
        return own(func, args, kwargs)
    if kind in OF_MEMORY or _is_of_tensor(func):
        return _of_tensor(func, args, kwargs)
    given = args, kwargs
    args, kwargs = tree_map(_split_tensor, given)
    parts = [leaf for leaf in tree_flatten((args, kwargs))[0] if place_of(leaf) is not None]
    found = _of_parts(func, args, kwargs, parts) if parts else func(*args, **kwargs)
    found = locked(func, found)
    return given[0][0] if changes(func) and isinstance(found, Tensor) else found


def _stages(args: Args, kwargs: Kwargs) -> Any:
    """The `StageWeights` that a function asks: in hooks, or where it has another stage's weight."""
    for leaf in tree_flatten((args, kwargs))[0]:
        place = place_of(leaf)
        stages = getattr(leaf, "stages", None) if place is None else place.stages
        if stages is not None and (place is None or stages.in_hooks):
            return stages
    return None


def locked(func: Callable[..., Any], found: Any) -> Any:
    """Let an array of NumPy refuse changes, which a weight would not get."""
    if kind_of(func) == "array":
        found.setflags(write=False)
    return found


def _weights(args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    leaves = tree_flatten((args, kwargs))[0]
    return (leaf for leaf in leaves if isinstance(leaf, PartWeight | PartDTensor))


def _is_of_tensor(func: Callable[..., Any]) -> bool:
    """Whether a function is an attribute, or one with a private name, that tells no values."""
    name = str(getattr(func, "__name__", ""))
    private = name.startswith("_") and getattr(Tensor, name, None) is func
    private = private and not name.startswith("__")
    attribute = name in ("__get__", "__set__") and func not in _OF_VALUES
    return (private or attribute) and kind_of(func) not in split_tensor.RULES


def _of_tensor(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``func``, which does not depend on values or shapes, of the tensor as it is."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _of_memory(func: Callable[..., Any], types: Any, args: Args, kwargs: Kwargs) -> Any:
    """``func`` of the parts, and of what else has rules by these."""
    if any(issubclass(kind, Tensor) and not _is_plain(kind) for kind in types):
        args, kwargs = tree_map(_memory, (args, kwargs))
        return func(*args, **kwargs)
    with DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
        if kind_of(func) in ("gradient", "data") and type(found) in (SplitWeight, PartTensor):
            return found.as_subclass(Tensor)  # marked before
        return found


def _is_plain(kind: type) -> bool:
    return kind in (Tensor, nn.Parameter, DTensor) or hasattr(kind, "handles_weights")


def _memory(leaf: Any) -> Any:
    """What this rank has of a weight, as a plain tensor."""
    if place_of(leaf) is None or isinstance(leaf, DTensor):
        return leaf
    with DisableTorchFunctionSubclass():
        return leaf.as_subclass(Tensor)


def _split_tensor(leaf: Any) -> Any:
    """A part that is an interval, as a `SplitTensor`; anything else as it is."""
    place = place_of(leaf)
    if place is None or place.split_dim is None:
        return leaf
    with DisableTorchFunctionSubclass():
        return marked(leaf.as_subclass(Tensor), SplitWeight, place.topology, place.split_dim)


def _mark(found: Any, place: Place) -> Any:
    """Let a tensor that lies like a weight know it."""
    if not isinstance(found, Tensor) or not (place.is_cut or place.copies > 1):
        return found
    if place.split_dim is not None:
        return marked(found, SplitWeight, place.topology, place.split_dim)
    found.__class__ = PartDTensor if isinstance(found, DTensor) else PartTensor
    found._place = place  # type: ignore[attr-defined]
    return found


def _of_parts(func: Callable[..., Any], args: Args, kwargs: Kwargs, parts: list[Tensor]) -> Any:
    """``func`` of parts that are no intervals."""
    first, kind = parts[0], kind_of(func)
    place: Place = first._place  # type: ignore[attr-defined]
    leaves = tree_flatten((args, kwargs))[0]
    learns = torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )
    if kind == "foreach":
        return split_rules.foreach(func, args, kwargs)
    if not place.is_cut:
        return _of_copies(func, args, kwargs, learns=learns)
    alone = len(parts) == 1 and first is args[0]
    total = total_of(func, args, kwargs) if alone else None
    if total is not None and (not learns or total in LEARNING):
        return reduced(total, first, place, args, kwargs)
    if kind in _ELEMENTWISE and "out" not in kwargs:
        fitted = _fitted(func, args, kwargs, place, learns=learns)
        if fitted is not None:
            with DisableTorchFunctionSubclass():
                found = func(*fitted[0], **fitted[1])
            return _mark(found, place)
    if kind == "drawn_like":
        return _drawn(func, args, kwargs, place)
    changes_first = changes(func) or communicates(func)
    changed: Any = args[0] if changes_first else kwargs.get("out")
    if place_of(changed) is not None and not (learns and changed.requires_grad):
        return _written(func, args, kwargs, changed)
    given, (args, kwargs) = (args, kwargs), tree_map(whole_weight, (args, kwargs))
    return as_views(func(*args, **kwargs), copies_in((args, kwargs), given))


def whole_weight(leaf: Any) -> Any:
    """Return a part as the whole, a plain tensor equal on all ranks; anything else as it is.

    All ranks with the other parts must call this. Gradients pass.
    """
    place = place_of(leaf)
    if torch.is_inference_mode_enabled() and isinstance(leaf, DTensor):
        with torch.inference_mode(False), torch.no_grad():  # torch cannot detach a DTensor there
            return whole_weight(leaf)
    if place is None:
        return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    with DisableTorchFunctionSubclass():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf.as_subclass(Tensor)
        if not place.is_cut:
            return one_of(local, place.copies)
        if local.requires_grad and torch.is_grad_enabled():
            found: Tensor = WholeOfParts.apply(local, leaf.detach(), place)  # type: ignore[no-untyped-call]
            return one_of(found, place.copies)
        return place.gather(leaf.detach())


def _of_copies(func: Callable[..., Any], args: Args, kwargs: Kwargs, *, learns: bool) -> Any:
    """``func`` of weights that tp ranks hold whole, and whose gradients they add up."""
    leaves = tree_flatten((args, kwargs))[0]
    copies = [leaf for leaf in leaves if place_of(leaf) is not None]
    others = [x for x in leaves if isinstance(x, Tensor) and place_of(x) is None and x.dim()]
    place: Place = copies[0]._place
    if not learns:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if kind_of(func) in _ELEMENTWISE and all(x.shape == place.shape for x in others):
        with DisableTorchFunctionSubclass():
            return _mark(func(*args, **kwargs), place)
    # Beside an activation it is the weight of a layer, each rank of which sees other positions.
    args, kwargs = tree_map(_memory if others else whole_weight, (args, kwargs))
    return func(*args, **kwargs)


# Elementwise --------------------------------------------------------------------------------------


def _fitted(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, place: Place, *, learns: bool
) -> tuple[Args, Kwargs] | None:
    """Arguments of an elementwise function on the parts; None if it takes the whole.

    A number may differ between ranks that share out a batch, and so may what it makes of a part.
    Of a power it is taken for the same.
    """
    flat = tree_flatten((args, kwargs))[0]
    numbers = not is_power(func) and any(type(x) in (int, float, complex) for x in flat)
    changed = args[0] if changes(func) else None
    leaves = [x for x in flat if isinstance(x, Tensor)]
    plain = [x for x in leaves if place_of(x) is None and not _lies_like(x, place)]
    if any(
        not place.is_like(x._place)  # type: ignore[attr-defined]
        for x in leaves
        if place_of(x) is not None
    ):
        return None
    if any(split_of(x) is not None or isinstance(x, DTensor) for x in plain) or (
        changed is not None and not leaves
    ):
        return None
    if changed is not None and place_of(changed) is None:
        return None
    if learns and place.learners is not None and (plain or numbers):
        return None
    if learns and any(x.requires_grad for x in plain):
        return None
    if any(x.numel() != 1 and (changed is None and x.shape != place.shape) for x in plain):
        return None
    if any(x.dim() > len(place.shape) for x in plain):
        return None

    def fit(leaf: Tensor) -> Tensor:
        if leaf.numel() == 1:
            return _everywhere(leaf.reshape(()), place)
        return place.own_part(leaf.expand(place.shape))

    with torch.no_grad(), DisableTorchFunctionSubclass():
        plain_fitted = {id(x): fit(x) for x in plain}

    def replaced(leaf: Any) -> Any:
        return plain_fitted.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

    args, kwargs = tree_map(replaced, (args, kwargs))
    return tree_map(_memory, (args, kwargs))  # type: ignore[no-any-return]


def is_power(func: Callable[..., Any]) -> bool:
    """Whether a function raises to a power, or is given the format of its result."""
    return name_of(func) in ("pow", "float_power", "to", "type")


def _lies_like(x: Tensor, place: Place) -> bool:
    """Whether a DTensor of somebody's, as FSDP2's gradients, is cut as the part."""
    rows = place.rows
    return (
        isinstance(x, DTensor)
        and rows is not None
        and (x.device_mesh, x.placements, x.shape)
        == (rows.device_mesh, rows.placements, rows.shape)
    )


def _everywhere(number: Tensor, place: Place) -> Tensor:
    """A number beside the part."""
    if place.rows is None:
        return number
    mesh = place.rows.device_mesh
    return DTensor.from_local(number, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _drawn(func: Callable[..., Any], args: Args, kwargs: Kwargs, place: Place) -> Tensor:
    """This rank's part of what one process draws."""
    x = args[0]
    with DisableTorchFunctionSubclass():
        whole = torch.empty(place.shape, dtype=x.dtype, device=x.device)
        drawn: Tensor = _mark(place.own_part(func(whole, *args[1:], **kwargs)), place)
        return drawn


def _written(func: Callable[..., Any], args: Args, kwargs: Kwargs, changed: Tensor) -> Any:
    """``func``, which changes a part, on the whole, of which this rank then keeps its part."""
    place: Place = changed._place  # type: ignore[attr-defined]
    with torch.no_grad():
        whole = whole_weight(changed).clone()
        replaced = tree_map(lambda x: whole if x is changed else whole_weight(x), (args, kwargs))
        func(*replaced[0], **replaced[1])
        with DisableTorchFunctionSubclass():
            changed.copy_(place.own_part(whole))
    return changed


# Attributes and methods of the tensor itself ------------------------------------------------------


def _as_held(place: Place, weight: Tensor, value: Tensor, what: str) -> Tensor:
    """What this rank holds of ``value``: a part like the weight, or a whole."""
    if place_of(value) is not None or split_of(value) is not None:
        return value if isinstance(value, DTensor) else value.as_subclass(Tensor)
    if isinstance(value, DTensor) and place.rows is not None:
        return value
    if value.shape == place.shape:
        return place.own_part(value) if place.is_cut else value
    if isinstance(value, DTensor) or value.shape == weight.shape:
        return value
    raise ConfigError(
        f"{place.name}: {what} was assigned {tuple(value.shape)}, and this parameter has "
        f"{tuple(place.shape)}; nearest valid: values of that shape"
    )


def _get_gradient(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    with DisableTorchFunctionSubclass():
        return _mark_cut(func(*args), args[0]._place)


def _mark_cut(found: Any, place: Place) -> Any:
    """Mark values without a gradient, which those that ranks hold whole need not be."""
    return _mark(found, place) if place.is_cut else found


def _differentiated(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Gradients of weights, which lie as these; those that ranks have in part are summed."""
    places = [place_of(x) for x in args[1]]
    cut = next((p for p in places if p is not None and p.rows is not None), None)
    if cut is not None:
        raise ConfigError(
            f"{cut.name}: torch.autograd.grad of a weight that zero=3 keeps in parts, which layers "
            "gather for themselves; nearest valid: zero=2 or lower, or p.grad after the backward"
        )
    with DisableTorchFunctionSubclass():
        found = gradients(func, args, kwargs)
        return tuple(
            x if x is None or place is None else _mark_cut(_summed(x, place), place)
            for x, place in zip(found, places, strict=True)
        )


def _summed(gradient: Tensor, place: Place) -> Tensor:
    return gradient if place.copies == 1 else reduce_from(gradient, place.topology.tp)


def _set_gradient(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    weight, value = args
    with DisableTorchFunctionSubclass(), torch.no_grad():
        func(weight, None if value is None else _as_held(weight._place, weight, value, ".grad"))


def _set_data(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    weight, value = args
    with DisableTorchFunctionSubclass(), torch.no_grad():
        held = _as_held(weight._place, weight, value, ".data")
        if isinstance(weight, DTensor):
            weight.copy_(held)
        else:
            func(weight, held)


def _shape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> torch.Size | int:
    return told_by_shape(func, args, kwargs, args[0]._place.shape)


def _repr(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> str:
    x = args[0]
    place: Place = x._place
    with DisableTorchFunctionSubclass():
        held = x.to_local() if isinstance(x, DTensor) else x.as_subclass(Tensor)
        return f"{type(x).__name__}({held!r}, part of {place.name} {tuple(place.shape)})"


def _deep_copy(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Copy; that of a weight has no rows, as no unit of ZeRO 3 would gather it."""
    x, memo = args
    place: Place = x._place
    with DisableTorchFunctionSubclass():
        if not isinstance(x, DTensor):
            copied: Any = copy.deepcopy(x.as_subclass(Tensor), memo)
        elif not isinstance(x, nn.Parameter):  # torch copies those of its own class only
            copied = x.detach().clone().requires_grad_(x.requires_grad)
        else:
            rows: Any = x.detach()
            copied = nn.Parameter(rows.full_tensor().clone(), x.requires_grad)
            memo[id(x)] = copied
            place = place.without_rows()
            if place.is_cut or place.copies > 1 or place.stages is not None:
                copied.__class__ = PartWeight
                copied._place = place
            return copied
        memo[id(x)] = made = _mark(copied, place)
        return made


def _reduce(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    raise ConfigError(
        f"{args[0]._place.name}: a weight of which each rank holds a part cannot be pickled, as "
        "another process could not gather it; nearest valid: lightning_megatron.gather(module), on "
        "every rank"
    )


def _address(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if isinstance(x, PartDTensor):
        raise ConfigError(
            f"{x._place.name}: {name_of(func)} of a weight that zero=3 keeps in parts, which "
            "has no address as a whole; nearest valid: id(p) for a key, as a weight that layers "
            "share is one object"
        )
    return _of_tensor(func, args, kwargs)


def _hook(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Gradient hooks get the gradient as the weight is."""
    weight, hook = args
    place: Place = weight._place

    def with_part(gradient: Tensor) -> Any:
        with DisableTorchFunctionSubclass():
            given = _mark_cut(gradient.view_as(gradient), place)
        found = hook(given)
        with DisableTorchFunctionSubclass():
            return None if found is None else _as_held(place, gradient, found, "the gradient")

    with DisableTorchFunctionSubclass():
        return func(weight, with_part)


_PROPERTIES: Any = Tensor
_OF_VALUES = (_PROPERTIES.real.__get__, _PROPERTIES.imag.__get__)
_ELEMENTWISE = frozenset(
    ("elementwise", "by_channel", "like", "moved", "same", "detached", "detach_")
)
RULES: Mapping[Kind, Rule] = {
    **dict.fromkeys(("gradient", "data"), _get_gradient),
    "set_gradient": _set_gradient,
    "set_data": _set_data,
    "shape": _shape,
    "repr": _repr,
    **dict.fromkeys(("requires_grad_", "detach_"), _of_tensor),
    "deep_copy": _deep_copy,
    "pickle": _reduce,
    "hook": _hook,
    "storage": _address,
}
"""Functions of the weight itself: its shape is that of the whole, its gradient is a part."""
