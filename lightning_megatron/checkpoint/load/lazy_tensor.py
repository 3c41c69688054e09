"""Lazy tensors: entries of a state_dict whose values are fetched when they are used.

``on_save_checkpoint`` and ``on_load_checkpoint`` see ``checkpoint["state_dict"]``, and under most
layouts no process holds the whole tensors: the values are in files, or in parts on other ranks. A
`LazyTensor` stands for one of them. It has the right shape, dtype and device, and can be renamed,
dropped or passed on at no cost. An operation that needs its values (a method, a function of torch,
``float()``, ``copy_`` into another tensor, pickling) runs on the whole tensor, which is fetched
for it and released afterwards. So a hook that visits all tensors needs the memory of one.

torch calls ``__torch_function__`` for every use of a subclass of Tensor, and ``__torch_dispatch__``
for the uses in its C++ code:
https://docs.pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron._torch.state_dicts import call_as_tensor, tensor_without_memory
from lightning_megatron.whole.torch_functions import kind_of

ITSELF = frozenset(
    ("format", "strides", "shape", "learning", "gradient", "requires_grad_", "retain_grad")
)
"""Kinds of functions that need no values; a lazy tensor answers them itself."""
_LENDS = frozenset(("array", "storage", "foreign", "data"))
"""Kinds that expose the memory; later writes are not counted by ``_version``."""


class LazyCache:
    """The value that was fetched last for the lazy tensors of one mapping.

    Attributes:
        closed: reason why no value can be fetched any more; None while values can be fetched.
    """

    def __init__(self) -> None:
        self.closed: str | None = None
        self._last: LazyTensor | None = None

    def take(self, lazy: "LazyTensor") -> Tensor:
        """Return the whole tensor."""
        held = lazy.held()
        if held is None:
            if self.closed is not None:
                raise RuntimeError(f"{lazy.source}: {self.closed}")
            held = lazy.fetch()
            lazy.hold(held)
        if self._last is not lazy:
            if self._last is not None:
                self._last.release()
            self._last = lazy
        return held


class LazyTensor(Tensor):
    """A tensor whose values are fetched when they are needed.

    Args:
        name: its name in the checkpoint, or in the module.
        shape: shape of the whole tensor.
        dtype: dtype of its values.
        device: device of its values.
        fetch: function that returns the values.
        cache: cache that all tensors of a mapping share.
    """

    source: str
    cache: LazyCache
    fetch: Callable[[], Tensor]
    _held: Tensor | None
    _known: "weakref.ref[Tensor] | None"
    _version_read: int
    _lent: bool

    @staticmethod
    @override
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        fetch: Callable[[], Tensor],
        cache: LazyCache,
    ) -> "LazyTensor":
        lazy: LazyTensor = tensor_without_memory(cls, shape, dtype, device)
        lazy.source = name
        lazy.fetch = fetch
        lazy.cache = cache
        lazy._held = None
        lazy._known = None
        lazy._version_read = 0
        lazy._lent = False
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def value(self) -> Tensor:
        """Return the whole tensor."""
        return self.cache.take(self)

    def changed(self) -> Tensor | None:
        """Return the whole tensor if it may have been written to, else None."""
        held = self.held()
        return held if held is not None and self._differs(held) else None

    @property
    def is_written(self) -> bool:
        """Whether torch has counted a write to the values."""
        held = self.held()
        return held is not None and held._version != self._version_read

    def held(self) -> Tensor | None:
        """Return the values if they are still in memory, else None."""
        return self._held if self._held is not None or self._known is None else self._known()

    def hold(self, value: Tensor) -> None:
        """Keep fetched values."""
        self._held = value
        self._known = weakref.ref(value)
        self._version_read = value._version

    def become(self, value: Tensor) -> None:
        """Replace the values."""
        self.hold(value)
        self._lent = True

    def release(self) -> None:
        """Drop the reference to the values, unless they were written to."""
        if self._held is not None and not self._differs(self._held):
            self._held = None

    def _differs(self, value: Tensor) -> bool:
        return self._lent or value._version != self._version_read

    @override
    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({self.source!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = kind_of(func)
        if kind in ITSELF:
            return call_as_tensor(func, args, kwargs or {})
        if kind in _LENDS and isinstance(args[0], LazyTensor):
            args[0].value()
            args[0]._lent = True
        return func(*tree_map(_resolved, args), **tree_map(_resolved, dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*tree_map(_resolved, args), **tree_map(_resolved, dict(kwargs or {})))


def _resolved(value: Any) -> Any:
    return value.value() if isinstance(value, LazyTensor) else value
