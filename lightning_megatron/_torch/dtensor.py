"""Shards of DTensors, and torch's memory of the operations on them."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.distributed.tensor import debug as dtensor_debug
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

T = TypeVar("T", bound=Tensor)
_shard, _gradient = attrgetter("_local_tensor"), attrgetter("grad")
_hooks_of_sums = attrgetter("_post_accumulate_grad_hooks")


def shard_of(tensor: DTensor) -> Tensor:
    """The local tensor of ``tensor`` itself (2.11-2.13).

    The public ``to_local`` makes a new view, through autograd, at 7 us each.
    """
    return tensor._local_tensor


def shards_of(tensors: Sequence[DTensor]) -> list[Tensor]:
    """`shard_of` many, without a call for each (2.11-2.13)."""
    return list(map(_shard, tensors))


def stamps(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Something that differs when one of ``tensors`` is another or has changed (2.11-2.13)."""
    return [
        (id(tensor), (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version)
        for tensor in tensors
    ]


def has_storage(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether ``storage`` is that of ``tensor``, which an assignment to .data changes (2.11-2.13).

    Of a DTensor neither holds the values.
    """
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Register with ``target`` what is called with gradients of ``source`` (2.11-2.13)."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in hooks_of_sums(source).values():
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def hooks_of_sums(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks of ``register_post_accumulate_grad_hook``, by handle (2.11-2.13)."""
    found: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return found


def with_hooks_of_sums(tensors: Sequence[T]) -> list[T]:
    """Return the tensors that have `hooks_of_sums`; asked in every batch (2.11-2.13)."""
    return [t for t, hooks in zip(tensors, map(_hooks_of_sums, tensors), strict=True) if hooks]


def has_hooks(tensor: Tensor) -> bool:
    """Whether ``tensor.register_hook`` was called and its handle not removed (2.11-2.13)."""
    return bool(tensor._backward_hooks)


def lend_gradients(parameters: Sequence[DTensor], shards: Sequence[Tensor]) -> None:
    """Give every shard the local part of its parameter's gradient (2.11-2.13)."""
    try:  # list by list, and no look at types: it counts beside a fused step
        lent = list(map(_shard, list(map(_gradient, parameters))))
        for shard, gradient in zip(shards, lent, strict=True):
            shard.grad = gradient
    except AttributeError:  # of some there is no gradient, or none that is a DTensor
        for parameter, shard in zip(parameters, shards, strict=True):
            shard.grad = getattr(parameter.grad, "_local_tensor", parameter.grad)


def forget_meshes() -> None:
    """Drop the results of DTensor operations that torch remembers (2.11-2.13).

    They hold the mesh with which they were first computed. Meshes of the same shape count as equal,
    so that after a second Trainer in the same process an operation would return a tensor of the
    first one's mesh, whose process groups are gone. And what a cache holds lives on: with gloo, two
    threads a group that wake a hundred times a second.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    for clear in (
        getattr(dtensor_debug, "_clear_sharding_prop_cache", None),
        getattr(dtensor_debug, "_clear_python_sharding_prop_cache", None),
        getattr(dtensor_debug, "_clear_fast_path_sharding_prop_cache", None),
        getattr(getattr(propagator, "_propagate_tensor_meta_cached", None), "cache_clear", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear,
    ):
        if clear is not None:
            clear()


@cache
def mend_operation_keys() -> None:
    """See to it that what DTensor operations were called with is freed some day (2.11).

    The key under which torch remembers an operation, if no keyword arguments of it matter, is made
    in C++ with a reference too many to the arguments, and through them to their mesh and its
    process groups, which then live until the process ends. An empty list of such keyword arguments
    makes a key that is as good, and correct. Nothing is changed where a key holds what it should.
    """
    if not _keys_are_kept():
        return
    schema: Any = OpSchema
    for name in ("__post_init__", "_recompute_comparison_key"):
        setattr(schema, name, _with_keywords(getattr(schema, name)))


def _keys_are_kept() -> bool:
    probe: Any = object()
    before = sys.getrefcount(probe)
    OpSchema(torch.ops.aten.detach.default, (probe,), {}, RuntimeSchemaInfo(static_argnum=0))
    return sys.getrefcount(probe) > before


def _with_keywords(make_key: Any) -> Any:
    def make(schema: Any) -> None:
        given = schema.schema_info
        if given is None or given.static_kwargkey is None:
            schema.schema_info = replace(given or RuntimeSchemaInfo(), static_kwargkey=[])
        try:
            make_key(schema)
        finally:
            schema.schema_info = given

    return make
