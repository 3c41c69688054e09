"""What changed in an attribute between two moments, as far as identity, length and version tell.

A `look` at an attribute notes which objects it holds: numbers and strings themselves, of a tensor
its identity and its version, of an array of NumPy up to 1 MiB a checksum, of containers and of
plain objects what is in them. No tensor is read, so no device is waited for, and none is kept
alive. `changes` are the differences of two looks: items that were added to a list, items of a dict
that are new or others, attributes of an object. So a list that grows by one in each step costs one
item a step to send, and what cannot be pickled stays where it is as long as nobody replaces it.

A look does not see what lies out of Python's reach (the inside of an object of an extension), what
``.data`` writes into a tensor, larger arrays, and attributes of more than `LIMIT` parts.
"""

import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import eq, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.strategy.attributes import OF_A_PROCESS, is_open

LIMIT = 10_000
"""Most parts of an attribute that are looked at; a list of numbers or tensors counts as one."""
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_FIXED = (
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, type),
    *(torch.dtype, torch.device, *OF_A_PROCESS),
)
"""Classes of objects of which identity is all there is to tell."""
_LARGE_ARRAY = 1 << 20


class _Tensor(NamedTuple):
    reference: Any
    version: int | tuple[int, ...]


class _Array(NamedTuple):
    checksum: int
    kind: Any


class _Same(NamedTuple):
    """An object that is looked at by identity."""

    content: Any


class _Items(NamedTuple):
    kind: type
    items: Any
    """A list of marks, or a dict of them."""


class _Tensors(NamedTuple):
    """Items of a container that are tensors; a tuple for each of many would keep the GC busy."""

    kind: type
    items: list[Any]
    versions: list[int]


class _Attributes(NamedTuple):
    kind: type
    items: dict[str, Any]


_ITEMS = (_Items, _Tensors)


class Change(NamedTuple):
    """A difference in an attribute."""

    path: tuple[tuple[bool, Any], ...]
    """Way from the attribute: whether a step is an attribute of an object, and its name or key."""
    start: int | None
    """Position from which a list is replaced; None: all that the path leads to is."""
    value: Any

    @property
    def in_object(self) -> bool:
        """Whether it is inside of an object that is no container."""
        return any(is_attribute for is_attribute, _ in self.path)


class _Missing:
    """In the place of a value: there is none any more."""


MISSING = _Missing


@dataclass
class Look:
    """What an attribute held at one moment.

    Attributes:
        mark: what was seen.
        hidden: whether it holds objects that may have more inside than was seen.
    """

    mark: Any = None
    hidden: bool = False
    _count: int = 0

    def __post_init__(self) -> None:
        self._open: set[int] = set()

    def at(self, content: Any) -> "Look":
        """Look at a value, and return itself."""
        try:
            self.mark = self._of(content)
        except _TooManyError:
            self.mark = _Same(content)
        return self

    def counts(self, versions: tuple[int, ...]) -> None:
        """Take these versions for that of the tensor."""
        self.mark = self.mark._replace(version=versions)

    def _of(self, content: Any) -> Any:
        kind = type(content)
        if kind in _PLAIN:
            return content
        if isinstance(content, Tensor):
            return _Tensor(weakref.ref(content), content._version)
        if isinstance(content, np.ndarray):
            return _array(content)
        if isinstance(content, _FIXED):
            return _Same(content)
        if id(content) in self._open:  # it is in itself
            return _Same(kind)
        self._open.add(id(content))
        try:
            return self._inside(content, kind)
        finally:
            self._open.discard(id(content))

    def _inside(self, content: Any, kind: type) -> Any:
        if isinstance(content, dict):
            self._add(len(content))
            return _Items(kind, {key: self._of(value) for key, value in content.items()})
        if isinstance(content, list | tuple | deque | set | frozenset):
            kinds = set(map(type, content))
            if kinds <= _PLAIN:
                return _Items(kind, list(content))
            if kinds == {Tensor}:
                references = list(map(weakref.ref, content))
                return _Tensors(kind, references, [tensor._version for tensor in content])
            self._add(len(content))
            return _Items(kind, [self._of(item) for item in content])
        if not is_open(content) or not hasattr(content, "__dict__"):
            self.hidden = True
            return _Same(content)
        self._add(len(vars(content)))
        return _Attributes(kind, {name: self._of(value) for name, value in vars(content).items()})

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > LIMIT:
            raise _TooManyError


def _array(content: Any) -> _Array | _Same:
    if content.nbytes > _LARGE_ARRAY or content.dtype.hasobject:
        return _Same(content)
    text = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return _Array(zlib.crc32(text.data), (content.shape, content.dtype))


class _TooManyError(Exception):
    pass


def changes(old: Any, new: Any, content: Any) -> list[Change]:
    """Differences of two marks.

    Args:
        old: the earlier one.
        new: of ``content``.
        content: value of the attribute now.
    """
    return list(_changes(old, new, content, ()))


def _changes(old: Any, new: Any, content: Any, path: Any) -> Iterator[Change]:
    if _is_one_value(old, new):
        return
    replaced = Change(path, None, content)
    if not _are_alike(old, new):
        yield replaced
    elif isinstance(new.items, dict):
        if _keeps_order(old.items, new.items):
            yield from _in_dict(old.items, new, content, path)
        else:
            yield replaced
    else:
        start = _equal_items(old, new)
        if start < max(len(old.items), len(new.items)):
            is_list = issubclass(new.kind, list)
            yield Change(path, start, content[start:]) if is_list else replaced


def _in_dict(old: dict[Any, Any], new: Any, content: Any, path: Any) -> Iterator[Change]:
    is_attribute = isinstance(new, _Attributes)
    held = vars(content) if is_attribute else content
    for key in old.keys() - new.items.keys():
        yield Change((*path, (is_attribute, key)), None, MISSING)
    for key, mark in new.items.items():
        yield from _changes(old.get(key, MISSING), mark, held[key], (*path, (is_attribute, key)))


def _keeps_order(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    """Whether removing and adding items turns the keys of one dict into those of the other."""
    kept = [key for key in old if key in new]
    return kept == list(new)[: len(kept)]


def _equal_items(old: Any, new: Any) -> int:
    """Number of equal items at the beginning of two lists."""
    least = min(len(old.items), len(new.items))
    if isinstance(old, _Tensors) and isinstance(new, _Tensors):
        same = map(is_, old.items, new.items)
        pairs = zip(same, map(eq, old.versions, new.versions), strict=False)
        return next((place for place, both in enumerate(pairs) if not all(both)), least)
    if isinstance(old, _Tensors) or isinstance(new, _Tensors):
        return 0
    for place, (one, other) in enumerate(zip(old.items, new.items, strict=False)):
        if one is not other and not _are_equal(one, other):
            return place
    return least


def _are_equal(old: Any, new: Any) -> bool:
    if _is_one_value(old, new):
        return True
    if not _are_alike(old, new) or len(old.items) != len(new.items):
        return False
    if isinstance(new.items, dict):
        pairs = zip(old.items.items(), new.items.items(), strict=True)
        return all(a == b and _are_equal(x, y) for (a, x), (b, y) in pairs)
    return _equal_items(old, new) == len(new.items)


def _are_alike(old: Any, new: Any) -> bool:
    """Whether two marks are of containers or objects of one class."""
    of_items = isinstance(old, _ITEMS) and isinstance(new, _ITEMS)
    of_objects = isinstance(old, _Attributes) and isinstance(new, _Attributes)
    return (of_items or of_objects) and old.kind is new.kind


def _is_one_value(old: Any, new: Any) -> bool:
    """Whether two marks of something that has no parts are equal."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(new, _Tensor):
        return old.reference is new.reference and old.version == new.version
    if isinstance(new, _Array):
        return tuple(old) == tuple(new)
    if isinstance(new, _Same):
        return old.content is new.content
    if isinstance(new, (*_ITEMS, _Attributes)):
        return False
    return bool(old == new or (old != old and new != new))


def apply(change: Change, content: Any) -> None:
    """Make a change in an attribute of another process, below its top.

    Raises:
        LookupError: there is no such place, as the attribute was another one.
    """
    for is_attribute, key in change.path if change.start is not None else change.path[:-1]:
        content = vars(content)[key] if is_attribute else content[key]
    if change.start is not None:
        if len(content) < change.start:
            raise LookupError(f"a list of {len(content)} items has no place {change.start}")
        content[change.start :] = change.value
        return
    is_attribute, key = change.path[-1]
    held = vars(content) if is_attribute else content
    if change.value is MISSING:
        held.pop(key, None)
    else:
        held[key] = change.value
