"""Caches of keys and values of transformers, of which each pipeline stage has its own layers'.

The forward of a model asks its cache for lengths, often the cache of its first layer, and makes
positions and masks of them. So what an item puts into a cache on its own rank is repeated on the
others, with tensors on the meta device, which have sizes and no memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_megatron._torch.graphs import tree_flatten, tree_map

Update: TypeAlias = tuple[int, str, Any, Any]
"""Number of a cache, name of a method of it, and its arguments without tensors."""

_NAMES = ("cache", "past_key_values")
"""Names that a forward has for a cache it is given: since transformers 5.24, and before."""


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Cache among the keyword arguments of a forward or of ``generate``; None if there is none."""
    given = (arguments.get(name) for name in _NAMES)
    return next((cache for cache in given if cache is not None), None)


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with None in the place of a cache."""
    return {name: None if name in _NAMES else x for name, x in arguments.items()}


@dataclass(frozen=True)
class _Size:
    """Facts about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def caches_in(*arguments: Any) -> list[Any]:
    """Caches among the arguments of an item; both of one for an encoder and a decoder."""
    found: list[Any] = []
    for leaf in tree_flatten(arguments)[0]:
        if hasattr(leaf, "self_attention_cache"):
            found += [leaf.self_attention_cache, leaf.cross_attention_cache]
        if hasattr(leaf, "get_seq_length"):
            found.append(leaf)
    return found


@contextmanager
def recorded(caches: list[Any]) -> Iterator[list[Update]]:
    """Context of a call that fills caches, with a list of what it does to them.

    The list is complete when the context has ended.
    """
    updates: list[Update] = []
    flags = [dict(getattr(cache, "is_updated", {})) for cache in caches]

    def record(number: int, name: str, *args: Any, **kwargs: Any) -> Any:
        updates.append((number, name, *tree_map(_size, (args, kwargs))))
        return getattr(type(caches[number]), name)(caches[number], *args, **kwargs)

    names = [[name for name in dir(cache) if name.startswith("update")] for cache in caches]
    for number, cache in enumerate(caches):
        if not hasattr(cache, "self_attention_cache"):  # which passes on to its two
            for name in names[number]:
                cache.__dict__[name] = partial(record, number, name)
    try:
        yield updates
    finally:
        for cache, own in zip(caches, names, strict=True):
            for name in own:
                cache.__dict__.pop(name, None)
    for number, (cache, before) in enumerate(zip(caches, flags, strict=True)):
        changed = {k: v for k, v in getattr(cache, "is_updated", {}).items() if before.get(k) != v}
        if changed:
            updates.append((number, "is_updated", tuple(changed.items()), {}))


def repeat(updates: list[Update], caches: list[Any]) -> None:
    """Do to caches what another rank has done, with tensors on meta."""
    for number, name, args, kwargs in updates:
        if name == "is_updated":
            caches[number].is_updated.update(args)
        else:
            args, kwargs = tree_map(_empty, (args, kwargs))
            getattr(caches[number], name)(*args, **kwargs)


def _size(leaf: Any) -> Any:
    return _Size(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _empty(leaf: Any) -> Any:
    if not isinstance(leaf, _Size):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
