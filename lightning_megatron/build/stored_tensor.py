"""Tensors whose values are in files until the rank that keeps them is known.

A `StoredTensor` has shape, dtype and device, and remembers how its values are computed: read from a
file, cast, cut, concatenated, transposed. Modules take it as a parameter. What is done to it before
the strategy has divided the model (a tp slice of it, a fused projection split per head) makes
another stored tensor. `StoredTensor.read` then reads what the last one needs, and no more: a slice
of a tensor is a slice of the file (`_Window`), so that a rank never holds a whole parameter of
which it keeps a part.

Any other operation (a product, ``torch.equal``, a copy into a real tensor) reads the file there and
then. One that would change a stored tensor is refused: what it wrote would be lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron._torch.state_dicts import call_as_tensor, tree_any
from lightning_megatron._torch.wrappers import stand_in
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole.torch_functions import kind_of, kind_of_operator

_Window = tuple[tuple[int, int], ...]
"""First index and length along each dimension."""
_SAME = frozenset({"alias", "detach", "clone", "contiguous", "lift_fresh", "positive"})
_BY_ROW = _SAME | {"_to_copy", "slice", "split", "split_with_sizes"}
_BLOCK = 1 << 22
"""Bytes that are read at once."""
_MOVES = frozenset({"expand", "flip", "index", "index_select", "repeat", "roll", "squeeze"})
"""Operators that move values about, of which a part cannot be read alone."""
_NEW = frozenset(("like", "drawn_like", "new"))
"""Kinds of operators that take the form of a tensor and not its values."""


class Source(Protocol):
    """Tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, window: _Window) -> Tensor:
        """Return the values inside of a window."""
        ...


class _Step:
    """Operator that makes a stored tensor, with its arguments."""

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place: int | None
    ) -> None:
        self.func = func
        self.args = tree_map(_values_of, tuple(args))
        self.kwargs = tree_map(_values_of, dict(kwargs))
        self.place = place
        self.name: str = func.overloadpacket.__name__


class _Held:
    """Where the values of a stored tensor come from, which does not change."""

    def __init__(self, twin: Tensor, origin: Source | _Step) -> None:
        self.shape = tuple(twin.shape)
        self.dtype = twin.dtype
        self.origin = origin

    def dim(self) -> int:
        return len(self.shape)


class StoredTensor(Tensor):
    """Tensor without values that knows where they are."""

    _twin: Tensor
    _held: _Held

    @classmethod
    def of(cls, source: Source) -> "StoredTensor":
        """Return the tensor that is in a file."""
        twin = torch.empty(source.shape, dtype=source.dtype, device="meta")
        return cls._made(twin, source, torch.device("cpu"))

    @classmethod
    def _made(cls, twin: Tensor, origin: "Source | _Step", device: torch.device) -> "StoredTensor":
        made: StoredTensor = stand_in(cls, twin, twin.shape, device)
        made._twin, made._held = twin, _Held(twin, origin)
        return made

    def read(self, device: torch.device | None = None) -> Tensor:
        """Return the values, in memory of their own."""
        with torch.no_grad():
            values = torch.empty(self.shape, dtype=self.dtype, device=device or self.device)
            _fill(values, self._held)
            return values

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self._made(self._twin, self._held.origin, self.device)
            made: Any = copied.requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                made = nn.Parameter(copied, requires_grad=self.requires_grad)
            memo[id(self)] = made
        return memo[id(self)]

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy in a file has the values."""
        read: Tensor = self.read()
        if isinstance(self, nn.Parameter):
            read = nn.Parameter(read, requires_grad=self.requires_grad)
        return read.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kind_of(func) == "set_data":  # how nn.Module.to() changes a dtype
            self, new = args
            if not (isinstance(self, StoredTensor) and isinstance(new, StoredTensor)):
                raise _refusal("data")
            self._twin, self._held = new._twin, new._held
        return call_as_tensor(func, args, dict(kwargs or {}))

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        if func._schema.is_mutable:
            if tree_any(lambda leaf: isinstance(leaf, StoredTensor), _written(func, args, options)):
                raise _refusal(name)
            if name == "copy_" and args[0].shape == args[1].shape:
                _fill(args[0], args[1]._held)
                return args[0]
            return func(*tree_map(_with_values, tuple(args)), **tree_map(_with_values, options))
        is_new = kind_of_operator(func) in _NEW
        if name not in _INWARD and name not in _MOVES and not is_new:
            return func(*tree_map(_with_values, tuple(args)), **tree_map(_with_values, options))
        first = next(a for a in _leaves((args, options)) if isinstance(a, StoredTensor))
        device = torch.device(options.get("device") or first.device)
        twins = tree_map(_twin, tuple(args))
        if is_new or device.type == "meta":
            return func(*twins, **{**tree_map(_twin, options), "device": device})
        on_meta = {**tree_map(_twin, options)}
        if "device" in on_meta:
            on_meta["device"] = torch.device("meta")
        out = func(*twins, **on_meta)
        if isinstance(out, Tensor):
            return cls._made(out, _Step(func, args, options, None), device)
        return type(out)(
            cls._made(each, _Step(func, args, options, place), device)
            for place, each in enumerate(out)
        )


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"adopt(directory): {name} would change weights that are still in their files, and are "
        "read when a strategy has divided the model; nearest valid: "
        "adopt(Model.from_pretrained(directory)), whose weights are in memory"
    )


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _twin(leaf: Any) -> Any:
    if isinstance(leaf, StoredTensor):
        return leaf._twin
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _with_values(leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, StoredTensor) else leaf


def _values_of(leaf: Any) -> Any:
    return leaf._held if isinstance(leaf, StoredTensor) else leaf


def _whole(leaf: Any) -> Any:
    return _read(leaf, tuple((0, n) for n in leaf.shape)) if isinstance(leaf, _Held) else leaf


def _fill(out: Tensor, held: _Held) -> None:
    """Copy the values of a stored tensor into ``out``, some rows at a time where that is cheap."""
    whole = tuple((0, size) for size in held.shape)
    rows = held.shape[0] if held.shape else 0
    size = out.numel() * out.element_size()
    if size <= _BLOCK or rows < 2 or not _is_by_row(held):
        out.copy_(_read(held, whole))
        return
    step = max(1, rows * _BLOCK // size)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        out[first : first + count].copy_(_read(held, ((first, count), *whole[1:])))


def _is_by_row(held: Any) -> bool:
    """Whether reading a tensor row by row reads each byte of the files once."""
    step = held.origin if isinstance(held, _Held) else None
    if not isinstance(step, _Step):
        return True
    if step.name == "cat":
        return all(map(_is_by_row, step.args[0]))
    return step.name in _BY_ROW and _is_by_row(step.args[0])


def _read(tensor: Any, window: _Window) -> Tensor:
    """Return the values of a stored or real tensor inside of a window."""
    if not isinstance(tensor, _Held):
        return _cut(tensor, window)
    step = tensor.origin
    if not isinstance(step, _Step):
        return step.read(window)
    inward = _INWARD.get(step.name)
    found = None if inward is None else inward(step, tensor, window)
    if found is not None:
        return found
    args, kwargs = tree_map(_whole, (step.args, step.kwargs))
    out = step.func(*args, **kwargs)
    return _cut(out if step.place is None else out[step.place], window)


def _cut(tensor: Tensor, window: _Window) -> Tensor:
    for dim, (start, length) in enumerate(window):
        tensor = tensor.narrow(dim, start, length)
    return tensor


# How a window of the result of an operator is read from windows of its arguments.
# Each returns None where it cannot be.


def _same(step: _Step, out: _Held, window: _Window) -> Tensor:
    return _read(step.args[0], window)


def _cast(step: _Step, out: _Held, window: _Window) -> Tensor:
    return _read(step.args[0], window).to(out.dtype)


def _permuted(step: _Step, out: _Held, window: _Window) -> Tensor:
    dims = list(range(out.dim()))
    if step.name == "permute":
        dims = [dim % out.dim() for dim in step.args[1]]
    elif out.dim() > 1:
        given = (0, 1) if step.name == "t" else step.args[1:3]
        one, two = (dim % out.dim() for dim in given)
        dims[one], dims[two] = dims[two], dims[one]
    inner = tuple(window[dims.index(dim)] for dim in range(out.dim()))
    return _read(step.args[0], inner).permute(dims)


def _sliced(step: _Step, out: _Held, window: _Window) -> Tensor | None:
    source: Any = step.args[0]
    given: list[Any] = [0, None, None, 1]
    given[: len(step.args) - 1] = step.args[1:]
    dim, start, _, by = given
    if by != 1:
        return None
    size, start = source.shape[dim], start or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    return _read(source, _moved(window, dim % source.dim(), start))


def _split(step: _Step, out: _Held, window: _Window) -> Tensor:
    source, sizes = step.args[:2]
    dim = (step.args[2] if len(step.args) > 2 else step.kwargs.get("dim", 0)) % source.dim()
    place = step.place or 0
    start = sizes * place if isinstance(sizes, int) else sum(sizes[:place])
    return _read(source, _moved(window, dim, start))


def _unbound(step: _Step, out: _Held, window: _Window) -> Tensor:
    source = step.args[0]
    if step.name == "select":
        dim, index = step.args[1:3]
    else:
        dim, index = step.args[1] if len(step.args) > 1 else 0, step.place or 0
    dim, index = dim % source.dim(), index % source.shape[dim]
    return _read(source, (*window[:dim], (index, 1), *window[dim:])).squeeze(dim)


def _unsqueezed(step: _Step, out: _Held, window: _Window) -> Tensor:
    dim = step.args[1] % out.dim()
    return _read(step.args[0], (*window[:dim], *window[dim + 1 :])).unsqueeze(dim)


def _joined(step: _Step, out: _Held, window: _Window) -> Tensor:
    dim = (step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0)) % out.dim()
    stacks = step.name == "stack"
    first, length = window[dim]
    parts, at = [], 0
    for part in step.args[0]:
        size = 1 if stacks else part.shape[dim]
        begin, end = max(first, at), min(first + length, at + size)
        if begin < end:
            own = (begin - at, end - begin)
            inner = window[dim + 1 :]
            parts.append(_read(part, (*window[:dim], *(() if stacks else (own,)), *inner)))
        at += size
    return torch.stack(parts, dim) if stacks else torch.cat(parts, dim)


def _viewed(step: _Step, out: _Held, window: _Window) -> Tensor | None:
    """A first dimension of n * k as (n, k), or the other way round."""
    source = step.args[0]
    old, new = source.shape, out.shape
    if old == new:
        return _read(source, window)
    lengths = tuple(length for _, length in window)
    if len(new) == len(old) + 1 and new[2:] == old[1:] and window[1] == (0, new[1]):
        rows = (window[0][0] * new[1], lengths[0] * new[1])
        return _read(source, (rows, *window[2:])).reshape(lengths)
    if len(old) == len(new) + 1 and old[2:] == new[1:]:
        (start, length), inner = window[0], old[1]
        if start % inner == 0 and length % inner == 0:
            rows = (start // inner, length // inner)
            return _read(source, (rows, (0, inner), *window[1:])).reshape(lengths)
    return None


_INWARD: dict[str, Callable[[_Step, _Held, _Window], Tensor | None]] = {
    **dict.fromkeys(_SAME, _same),
    "_to_copy": _cast,
    **dict.fromkeys(("t", "transpose", "permute"), _permuted),
    "slice": _sliced,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("select", "unbind"), _unbound),
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _viewed),
}


def _moved(window: _Window, dim: int, start: int) -> _Window:
    first, length = window[dim]
    return (*window[:dim], (first + start, length), *window[dim + 1 :])
