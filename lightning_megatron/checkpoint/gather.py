"""The whole weights of a module that is spread over processes."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.checkpoint.state import Chunk, model_chunks
from lightning_megatron.parallel.apply import ParallelModule, layout_of

_Rectangle = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape of the whole tensor, offsets, sizes, number format."""


def gather(
    module: nn.Module, rank: int | None = None, device: torch.device | None = None
) -> dict[str, Any]:
    """The state of a module with whole, plain tensors, whatever layout it is on; collective.

    Every process of the run calls it, in a hook or after ``fit``. What it returns fits
    ``load_state_dict`` of a new module of the same kind, in any process::

        plain = MyModule()
        plain.load_state_dict(lightning_megatron.gather(module))

    Args:
        module: the LightningModule.
        rank: the one process that is to have the result; all of them if None.
        device: where the result goes, one tensor after the other; None for the module's own.

    Returns:
        What ``state_dict`` of the module would be in one process, with copies of the tensors; an
        empty dictionary on processes that are not to have it.
    """
    parallel = layout_of(module)
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = rank is None or not dist.is_initialized() or dist.get_rank() == rank
    if parallel is None or world == 1:
        rows = None if parallel is None else parallel.data.rows
        state = model_chunks(module, rows=rows)
        found = {name: _copy(value, device) for name, value in state.items()} if mine else {}
        return _named(found, state) if mine else {}
    parallel.data.come_to_rest()
    state = model_chunks(module, parallel.canonical, parallel.data.rows)
    everyone: list[dict[str, tuple[_Rectangle, tuple[str, ...]]]] = [{}] * world
    dist.all_gather_object(everyone, {n: _describe(c) for n, c in _chunks(state)})
    found = {n: v for n, v in state.items() if not isinstance(v, Chunk)}
    for name in sorted(set().union(*everyone)):
        whole = _assemble(name, state.get(name), everyone, parallel, keep=mine)
        whole = whole if whole is None or device is None else whole.to(device)
        aliases = {alias for known in everyone if name in known for alias in known[name][1]}
        found |= dict.fromkeys((name, *sorted(aliases)), whole)
    return found if mine else {}


def _chunks(state: dict[str, Any]) -> Iterator[tuple[str, Chunk]]:
    return ((name, value) for name, value in state.items() if isinstance(value, Chunk))


def _describe(chunk: Chunk) -> tuple[_Rectangle, tuple[str, ...]]:
    return (chunk.full_shape, chunk.offsets, chunk.sizes, chunk.tensor.dtype), chunk.aliases


def _assemble(
    name: str,
    chunk: Chunk | None,
    everyone: list[dict[str, tuple[_Rectangle, tuple[str, ...]]]],
    parallel: ParallelModule,
    *,
    keep: bool,
) -> Tensor | None:
    """Bring the rectangles of one tensor together, each from the first rank that has it."""
    sources: dict[_Rectangle, int] = {}
    for source, known in enumerate(everyone):
        if name in known:
            sources.setdefault(known[name][0], source)
    device, here = parallel.topology.device, dist.get_rank()
    whole: Tensor | None = None
    for (shape, offsets, sizes, dtype), source in sources.items():
        if keep and whole is None:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if not torch.Size(sizes).numel():
            continue
        part = torch.empty(sizes, dtype=dtype, device=device)
        if here == source:
            assert chunk is not None
            part.copy_(chunk.tensor)
        dist.broadcast(part, src=source)
        if whole is not None:
            target = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(part)
    return whole


def _copy(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Chunk):
        return value
    return value.tensor.clone() if device is None else value.tensor.to(device, copy=True)


def _named(found: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """``found`` with further names of shared tensors."""
    aliases = {alias: found[name] for name, chunk in _chunks(state) for alias in chunk.aliases}
    return found | aliases
