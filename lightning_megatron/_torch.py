"""Names of torch that are private, or differ between the versions that we support.

Every use of such a name stands here, with the versions it concerns and the reason, so that a new
torch release is met in one file.
"""

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Who dies with which of a DataLoader's workers is not to be changed in public (2.11-2.13).
from torch._C import _remove_worker_pids

# Public as names of torch.distributed, where type checkers do not see them (2.11-2.13).
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

# The FSDP2-based replicate (ZeRO 0) has no public home in 2.11-2.13; the older
# torch.distributed._composable.replicate is built on DDP and mixes with no DTensor.
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.distributed.tensor import debug as dtensor_debug

# The way to see every operator of a block of code is documented, but lives in a private module.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Undocumented in 2.11-2.13, though every distributed module of torch leans on it.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor and warns on every call of the
# old names; 2.11 has only those. Remove the fallback when 2.13 is the oldest version supported.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LoaderIterator = _MultiProcessingDataLoaderIter
"""How a DataLoader talks to its workers; nobody else's business until one of them dies."""


def watch_no_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Take a loader's workers from torch's handler of SIGCHLD.

    It raises in the main thread, wherever that is, when one of them dies.
    """
    _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


def start_all_gather(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill ``output`` with the ``local`` of every rank, one after another.

    Args:
        output: contiguous, ``group.size()`` times as many elements as ``local``.
        local: contiguous; must stay untouched until the work is waited for.
        group: the ranks that take part.
    """
    work: dist.Work = _all_gather(output, local, group=group, async_op=True)
    return work


def start_reduce_scatter(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum ``local`` over the ranks, leaving the rank-th equal part in ``output``.

    Args:
        output: contiguous, ``1 / group.size()`` as many elements as ``local``.
        local: contiguous; must stay untouched until the work is waited for.
        group: the ranks that take part.
    """
    work: dist.Work = _reduce_scatter(output, local, group=group, async_op=True)
    return work


def gather_now(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output`` with the ``local`` of every rank; on a GPU, on the current stream."""
    _all_gather(output, local, group=group)


def reduce_scatter_now(output: Tensor, local: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce ``local`` over the ranks, leaving the rank-th equal part in ``output``."""
    _reduce_scatter(output, local, op=op, group=group)


def shard_of(tensor: DTensor) -> Tensor:
    """The local tensor of ``tensor`` itself (2.11-2.13).

    The public ``to_local`` makes a new view, through autograd, at 7 us each.
    """
    return tensor._local_tensor


def shards_of(tensors: Sequence[DTensor]) -> list[Tensor]:
    """`shard_of` many, without a call for each (2.11-2.13)."""
    return [tensor._local_tensor for tensor in tensors]


def stamps(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Something that differs when one of ``tensors`` is another or has changed (2.11-2.13)."""
    return [
        (id(tensor), (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version)
        for tensor in tensors
    ]


def lend_gradients(parameters: Sequence[DTensor], shards: Sequence[Tensor]) -> None:
    """Give every shard the local part of its parameter's gradient (2.11-2.13)."""
    for parameter, shard in zip(parameters, shards, strict=True):
        gradient = parameter.grad
        try:  # a look at its type first would cost a quarter more
            shard.grad = gradient._local_tensor  # type: ignore[union-attr]
        except AttributeError:
            shard.grad = gradient


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


def abandon_process_groups() -> list[Any]:
    """Forget the process groups that a forked process has from its parent (2.11-2.13).

    Their threads have stayed with the parent: a collective would wait for ever, and so would
    destroying them, for threads to end. Yet torch takes them for its own, and connects to nobody.

    Returns:
        What must be kept until the process ends, by ``os._exit``: destructors join threads, too.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    kept: list[Any] = [world.default_pg, *world.pg_map.items()]
    c10d._update_default_pg(None)
    for name in (
        *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
        "pg_coalesce_state",
    ):
        getattr(world, name).clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    return kept


def default_store() -> Any:
    """Return the store by which the ranks of the default group found each other (2.11-2.13)."""
    return dist.distributed_c10d._get_default_store()


def flight_recorder(*, entries: bool) -> dict[str, Any]:
    """What the flight recorder of this process knows about its collectives (2.11-2.13).

    Args:
        entries: list the latest collectives (the recorder's 2000 take a tenth of a second), or tell
            no more than how many each group has begun and completed (a tenth of a millisecond).

    Returns:
        The recorder's own format, empty where it is not there.
    """
    c10d: Any = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return {}
    try:
        found = json.loads(dump(includeCollectives=entries, onlyActive=False))
    except (RuntimeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def group_ranks() -> dict[str, list[int]]:
    """The process groups this rank is in, by the name that the flight recorder uses (2.11-2.13)."""
    if not dist.is_initialized():
        return {}
    groups = list(dist.distributed_c10d._world.pg_group_ranks.items())
    # Groups that this rank is not in stand there as a number.
    own = [(g, ranks) for g, ranks in groups if isinstance(g, dist.ProcessGroup)]
    return {group.group_name: sorted(ranks) for group, ranks in own}


def watch_waits(began: Callable[[], float], ended: Callable[[float], None]) -> Callable[[], None]:
    """Call ``began`` and ``ended`` around every wait for a collective or message (2.11-2.13).

    All of ``torch.distributed``, FSDP2 and our own communication wait by ``Work.wait``, a method of
    a class written in C++ which no hook surrounds; functional collectives wait elsewhere, unseen.
    On GPUs it returns at once and the device waits.

    Returns:
        A function that undoes it.
    """
    work: Any = dist.Work
    observers: list[Any] | None = getattr(work.wait, "observers", None)
    if observers is None:
        work.wait = _observed(work.wait)
        observers = work.wait.observers
    own = (began, ended)
    observers.append(own)

    def undo() -> None:
        if own in observers:
            observers.remove(own)
        if not observers and getattr(work.wait, "observers", None) is observers:
            work.wait = work.wait.__wrapped__

    return undo


def _observed(original: Any) -> Any:
    observers: list[Any] = []

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = [(ended, began()) for began, ended in observers]
        try:
            return original(self, *args, **kwargs)
        finally:
            for ended, token in tokens:
                ended(token)

    wait.observers = observers  # type: ignore[attr-defined]
    return wait


def compile_with_callers_only(function: Any) -> None:
    """Trace a function as a part of who calls it, and never by itself (2.11-2.13).

    A function that ends a graph is met again when it is called in earnest, and would be compiled
    for every shape of its arguments.
    """
    types = importlib.import_module("torch._dynamo.types")
    found = importlib.import_module("torch._C._dynamo.eval_frame")
    skip = types.FrameAction.SKIP
    found.set_code_exec_strategy(function.__code__, types.FrameExecStrategy(skip, skip))


def own_connection(store: Any) -> Any:
    """The same store, by a connection that does not wait for what others ask it (2.11-2.13)."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Euclidean norm of each tensor, in one kernel where the device has one (2.11-2.13)."""
    norms: Any = torch._foreach_norm(list(tensors), 2, dtype=dtype) if tensors else []
    return list(norms)


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors in place by a scalar (2.11-2.13)."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def foreach_lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """What lies between tensors and ``ends``, a part ``weight`` of the way (2.11-2.13)."""
    return list(torch._foreach_lerp(list(tensors), list(ends), weight))


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move all tensors towards ``ends`` by a part ``weight`` of the way (2.11-2.13)."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


def foreach_sub_signs_(tensors: Sequence[Tensor], others: Sequence[Tensor], by: float) -> None:
    """Move all tensors by ``by`` against the signs of ``others`` (2.11-2.13)."""
    torch._foreach_add_(list(tensors), list(torch._foreach_sign(list(others))), alpha=-by)


def foreach_clamp_(tensors: Sequence[Tensor], low: float, high: float) -> None:
    """Clamp all tensors in place (2.11-2.13)."""
    if tensors:
        torch._foreach_clamp_min_(list(tensors), low)
        torch._foreach_clamp_max_(list(tensors), high)


def unscale_(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply all in place by ``inverse``; 1 in ``found`` if any is not finite (2.11-2.13).

    Args:
        gradients: of any formats.
        found: a float32 scalar, left alone when all are finite; gradients may lie elsewhere.
        inverse: a float32 scalar.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), same in alike.items():
        here = found if device == found.device else torch.zeros_like(found, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(same, here, inverse.to(device))
        if here is not found:
            found.copy_(torch.maximum(found, here.to(found.device)))


def scaled_mm(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, dtype: torch.dtype
) -> Tensor:
    """Product of two FP8 matrices times their scales (2.11-2.13).

    Args:
        left: ``[m, k]``, stored by rows.
        right: ``[k, n]``, stored by columns.
        scale_left: float32, a scalar or ``[m, 1]``.
        scale_right: float32, a scalar or ``[1, n]``.
        dtype: of the result.
    """
    # On CPUs autocast reaches inside and rounds to bfloat16 what is not scaled yet, but not below a
    # dispatch mode: what selective recomputation repeats would differ from what it repeats.
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cpu and max(scale_left.numel(), scale_right.numel()) > 1:
            # Kernels of CPUs take one scale for all: in 2.11, and in oneDNN later (pytorch 179118).
            one = scale_left.new_ones(())
            plain: Tensor = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32)
            return (plain * scale_left * scale_right).to(dtype)
        product: Tensor = torch._scaled_mm(left, right, scale_left, scale_right, out_dtype=dtype)
    return product


def reduce_gradients(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward, for ``root`` and the units in it (2.11-2.13).

    Its hooks run when the gradients of a unit's inputs are there; weight gradients that come later
    would never be reduced.
    """
    accumulate_gradients(root)
    state = root._get_fsdp_state()
    for inner in state._state_ctx.all_states:
        for group in reversed(_parameter_groups(inner)):
            group.post_backward()
    state._root_post_backward_final_callback()


def accumulate_gradients(root: FSDPModule) -> None:
    """Add the latest gradients to those that wait to be reduced, in their format (2.11-2.13).

    FSDP2 does so at the end of a backward. Weight gradients that come later would be added up in
    the format of the parameters until the next one.
    """
    for inner in root._get_fsdp_state()._state_ctx.all_states:
        for group in _parameter_groups(inner):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def gather_through(units: Sequence[FSDPModule], weight: DTensor, extension: Any) -> None:
    """Have FSDP2 gather a weight through ``extension``, or with None as it is (2.11-2.13).

    It looks for two functions on the shard; a subclass of Tensor, where they are meant to be, would
    meet every optimizer and checkpoint. What it prepared for another way of gathering is dropped.

    Args:
        units: one of which manages the weight.
        weight: sharded.
        extension: with ``before`` and ``after``.
    """
    for unit in units:
        for group in _parameter_groups(unit._get_fsdp_state()):
            for parameter in group.fsdp_params:
                info = parameter._module_info
                if getattr(info.module, info.param_name) is weight:
                    # Materialised weights are taken over at the first forward, else, and shards
                    # that need padding replaced.
                    parameter.reset_sharded_param()
                    parameter.all_gather_outputs = []
                    parameter.__dict__.pop("_unsharded_param", None)
    shard: Any = weight._local_tensor
    if extension is not None:
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = extension.before, extension.after
    elif hasattr(shard, "fsdp_pre_all_gather"):
        del shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather


def gathers_through(weight: Tensor) -> bool:
    """Whether `gather_through` gave the weight an extension (2.11-2.13)."""
    return isinstance(weight, DTensor) and hasattr(weight._local_tensor, "fsdp_pre_all_gather")


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Within the block autograd does not see that ``tensor`` is written (2.11-2.13).

    What is gathered again in the backward has the values that the forward saved.
    """
    autograd: Any = torch.autograd
    kept: AbstractContextManager[None] = autograd._unsafe_preserve_version_counter(tensor)
    return kept


def keep_reduced_gradients_in(module: FSDPModule, dtype: torch.dtype) -> None:
    """Have FSDP2 leave the gradients of narrower parameters in ``dtype`` (2.11-2.13).

    It casts what it has reduced to the format of the parameters and adds the microbatches up in
    that. The parameters' ``grad_dtype`` must be the same.
    """
    for group in _parameter_groups(module._get_fsdp_state()):
        _keep_group_in(group, dtype)


def _keep_group_in(group: Any, dtype: torch.dtype) -> None:
    read_formats = group._init_mp_dtypes

    def read_formats_and_adjust() -> None:
        read_formats()
        group._orig_dtype = dtype

    # FSDP2 reads the formats when a module runs first, and when its parameters have changed.
    group._init_mp_dtypes = read_formats_and_adjust


def _parameter_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.11 has one group per module
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


StorageInfo = _StorageInfo
"""Where the bytes of a chunk are, in the index of a distributed checkpoint (2.11-2.13)."""

DCP_METADATA_GLOBALS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
                *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        # Where the writer of torch wrote; `pathlib._local` since Python 3.13.
        *((home, "PosixPath") for home in ("pathlib", "pathlib._local")),
    }
)
"""All that the pickled index of a distributed checkpoint refers to, beside dtypes (2.11-2.13).

Its reader unpickles it without restriction; ours allows these names only."""

WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and the checkpoint wrapper insert into parameter names (2.11-2.13)."""


def record_allocations(on: bool) -> None:
    """Keep, or no longer keep, the history of allocations on GPUs (documented, 2.11-2.13)."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_allocations(path: str) -> None:
    """Write the kept history to a file, for torch's memory viewer (documented, 2.11-2.13)."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
