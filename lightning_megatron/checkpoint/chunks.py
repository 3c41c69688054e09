"""Chunks: the place of this rank's tensors in the tensors of the whole model.

A parameter is sharded twice. Tensor parallelism keeps a slice along one dimension, which the
layer's `TensorShard` describes. ZeRO then splits that slice along dimension 0 over the
data-parallel ranks: below stage 3 into the rows of a plain tensor that each owns
(`zero.owned_rows`), in stage 3 as a DTensor whose "global" shape is the slice. Both shards are
rectangles, and so is their product: with tp offset ``a`` along dimension ``k`` and FSDP offset
``b`` along dimension 0, this rank holds the `Chunk` at offset ``a * e_k + b * e_0`` of the full
parameter. Checkpoints are written and read in chunks, so they do not depend on the layout.

Of a fused projection tp divides every segment by itself (`topology.segments`), so a rank holds
several rectangles of the full parameter. Its `Chunk` is one tensor all the same: its `rectangles`
are what is written, read and sent.

Names are those of the unpartitioned module. Pipeline items keep their names on every rank, the
prefixes of ``torch.compile`` and activation checkpointing are removed, and a shared parameter has
one canonical name (the first) with the others as aliases.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.graphs import WRAPPER_NAMES
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.segments import Piece, common_pieces, joined
from lightning_megatron.topology.tensor_shard import TensorShard
from lightning_megatron.zero.owned_rows import OwnedRows


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A rectangle of a tensor of the whole model, held by this process.

    Of a tensor whose segments tp divides each by itself it is one of the tensor in rank order
    (`topology.segments`), and several `rectangles` of the tensor itself.
    """

    tensor: Tensor
    """Values of the rectangle: a plain local tensor, which shares the memory of the original."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Index of the first element in the whole tensor, per dimension."""
    pieces: tuple[Piece, ...] = ()
    """First index and length of the runs of a divided dimension, if it is divided by segments."""
    piece_dim: int = 0
    """Dimension of the pieces."""
    identical: bool = True
    """Whether all ranks with this rectangle have the same bits, so that any of them may write it.
    Where they may differ (batch norm statistics), the lowest rank writes."""
    aliases: tuple[str, ...] = ()
    """Further names of the tensor."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the rectangle."""
        return tuple(self.tensor.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the rectangle is the whole tensor."""
        return self.sizes == self.full_shape

    def rectangles(self) -> "tuple[Chunk, ...]":
        """Return the rectangles of the tensor, whose values are views."""
        if not self.pieces:
            return (self,)
        found, begin, dim = [], 0, self.piece_dim
        for first, length in self.pieces:
            part = self.tensor.narrow(dim, begin, length)
            offsets = (*self.offsets[:dim], first, *self.offsets[dim + 1 :])
            found.append(replace(self, tensor=part, offsets=offsets, pieces=()))
            begin += length
        return tuple(found)

    def rectangle(self, offsets: Sequence[int]) -> "Chunk":
        """Return the rectangle that begins at ``offsets``."""
        return next(r for r in self.rectangles() if r.offsets == tuple(offsets))

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor that the chunk describes."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if self.pieces and dim == self.piece_dim:
                whole = joined(whole, dim, self.pieces)
            else:
                whole = whole.narrow(dim, offset, size)
        return whole


def whole(tensor: Tensor, *, identical: bool = True) -> Chunk:
    """Return the chunk of a tensor that this process holds in full."""
    shape = tuple(tensor.shape)
    return Chunk(
        tensor=tensor.detach(), full_shape=shape, offsets=(0,) * len(shape), identical=identical
    )


def whole_chunks(names: Mapping[Tensor, str]) -> dict[str, Chunk]:
    """Return by name the chunks of tensors that this process holds in full."""
    return {name: whole(tensor) for tensor, name in names.items()}


def clean_name(name: str) -> str:
    """Remove what wrappers insert into a parameter name.

    >>> clean_name("trunk.layers.0._orig_mod.weight")
    'trunk.layers.0.weight'
    """
    for part in WRAPPER_NAMES:
        name = name.replace(part, "")
    return name


def parameter_names(
    module: nn.Module, canonical: Mapping[str, str] | None = None
) -> dict[Tensor, str]:
    """Return the canonical name of every parameter of ``module``.

    Args:
        module: the module; parameters that FSDP2 shards must be in their shards.
        canonical: for aliases of a parameter of another stage, its name.
    """
    given = canonical or {}
    names = ((p, clean_name(name)) for name, p in module.named_parameters())
    return {parameter: given.get(name, name) for parameter, name in names}


def model_chunks(
    module: nn.Module,
    canonical: Mapping[str, str] | None = None,
    rows: Mapping[nn.Parameter, OwnedRows] | None = None,
) -> dict[str, Any]:
    """Return the state of a module, with chunks in place of tensors.

    Parameters that FSDP2 has gathered are returned to their shards first.

    Args:
        module: the module as this rank holds it.
        canonical: for aliases of a parameter of another stage, its name.
        rows: the rows of whole parameters that this rank owns.

    Returns:
        By canonical name, a `Chunk` for every parameter and persistent buffer; all other entries
        of ``state_dict`` (``get_extra_state``, persistent metric states) unchanged.

    Raises:
        ConfigError: ZeRO's shard of a parameter is not one rectangle.
    """
    state = {clean_name(name): value for name, value in module.state_dict().items()}
    described = own_chunks(module, canonical, rows)
    known = {name: {name, *chunk.aliases} for name, chunk in described.items()}
    kept = {name: chunk for name, chunk in described.items() if known[name] & state.keys()}
    all_known = {name for names in known.values() for name in names}
    further = {name: value for name, value in state.items() if name not in all_known}
    return StateMapping({**kept, **further}, versions_of(module))


def own_chunks(
    module: nn.Module,
    canonical: Mapping[str, str] | None = None,
    rows: Mapping[nn.Parameter, OwnedRows] | None = None,
) -> dict[str, Chunk]:
    """Return the chunks of a module without a call of ``state_dict`` or of its hooks."""
    first_names = parameter_names(module, canonical)
    shards = _tensor_shards(module)
    result: dict[str, Chunk] = {}
    for name, value in own_tensors(module):
        if not isinstance(value, nn.Parameter):
            result[name] = whole(value, identical=False)
        elif (owner := first_names[value]) in result:
            result[owner] = _with_alias(result[owner], name, owner)
        else:
            chunk = _parameter_chunk(name, value, shards, None if rows is None else rows.get(value))
            result[owner] = _with_alias(chunk, name, owner)
    return result


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under all names, in the order of state_dict."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in tensors_of(child).items():
            yield clean_name(f"{prefix}.{name}" if prefix else name), value


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module without its children, by name."""
    buffers = {
        name: value
        for name, value in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    found = {**module._parameters, **buffers}
    return {name: value for name, value in found.items() if value is not None}


class StateMapping(dict[str, Any]):
    """State of a module by name, with the versions of its modules.

    Args:
        state: the values.
        versions: the ``_version`` of the modules by name, where it is not 1, torch's default; it
            is passed to ``_load_from_state_dict`` on loading.
    """

    def __init__(self, state: Mapping[str, Any], versions: Mapping[str, int | str]) -> None:
        super().__init__(state)
        self.versions = dict(versions)


def versions_of(module: nn.Module) -> dict[str, int | str]:
    """Return the versions of a module and its children, by name, where they are not 1."""
    return {
        clean_name(f"{name}.").removesuffix("."): child._version
        for name, child in module.named_modules(remove_duplicate=False)
        if child._version != 1
    }


def chunks_of(state: Mapping[str, Any]) -> dict[str, Chunk]:
    """Return the entries of a state that are chunks."""
    return {name: value for name, value in state.items() if isinstance(value, Chunk)}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, detached, which shares its memory."""
    with torch.no_grad():  # then it is the tensor itself, and not a DTensor that is detached
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, Tensor)
    return local.detach()


Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle."""


class ChunkForm(NamedTuple):
    """Form of a chunk, for other ranks."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    rectangles: tuple[Form, ...]
    """Rectangles of the tensor."""
    dtype: torch.dtype


def describe(chunk: Chunk) -> tuple[ChunkForm, tuple[str, ...]]:
    """Return the form of a chunk and its aliases, for other ranks."""
    forms = tuple((part.offsets, part.sizes) for part in chunk.rectangles())
    return ChunkForm(chunk.full_shape, forms, chunk.tensor.dtype), chunk.aliases


def assemble(
    name: str,
    chunk: Chunk | None,
    everyone: list[dict[str, tuple[ChunkForm, tuple[str, ...]]]],
    device: torch.device,
    *,
    keep: bool,
) -> Tensor | None:
    """Broadcast the chunks of one tensor, each from the first rank that holds it; collective.

    Args:
        name: name of the tensor.
        chunk: the chunk of this rank; None if it has none.
        everyone: for each rank, its chunks by name (`describe`).
        device: device of the result, and of the messages.
        keep: whether this rank returns the whole tensor; otherwise None.
    """
    sources: dict[tuple[tuple[int, ...], Form, torch.dtype], int] = {}
    for source, known in enumerate(everyone):
        if name in known:
            form = known[name][0]
            for rectangle in form.rectangles:
                sources.setdefault((form.shape, rectangle, form.dtype), source)
    here = dist.get_rank()
    full: Tensor | None = None
    for (shape, (offsets, sizes), dtype), source in sources.items():
        if keep and full is None:
            full = torch.empty(shape, dtype=dtype, device=device)
        if not torch.Size(sizes).numel():
            continue
        part = torch.empty(sizes, dtype=dtype, device=device)
        if here == source:
            assert chunk is not None
            part.copy_(chunk.rectangle(offsets).tensor)
        dist.broadcast(part, src=source)
        if full is not None:
            target = full
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(part)
    return full


def _with_alias(chunk: Chunk, name: str, owner: str) -> Chunk:
    return chunk if name == owner else replace(chunk, aliases=(*chunk.aliases, name))


def _tensor_shards(module: nn.Module) -> dict[str, TensorShard]:
    found = {}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            for name, shard in layer.tensor_shards.items():
                found[clean_name(f"{prefix}.{name}" if prefix else name)] = shard
    return found


def _parameter_chunk(
    name: str, value: Tensor, shards: Mapping[str, TensorShard], rows: OwnedRows | None
) -> Chunk:
    """Return the chunk of a parameter, with the offsets of tensor parallelism and of ZeRO."""
    slice_shape = tuple(value.shape)
    shard = shards.get(name, TensorShard(full_shape=slice_shape))
    offsets = list(_fsdp_offsets(name, value))
    if rows is not None:
        offsets = list(rows.offsets)
        value = rows.refresh()
    held, pieces = local_tensor(value), shard.pieces
    if shard.dim is not None:
        if pieces:
            pieces = common_pieces(pieces, offsets[shard.dim], held.shape[shard.dim])
        offsets[shard.dim] += shard.offset
    return Chunk(
        tensor=held,
        full_shape=shard.full_shape,
        offsets=tuple(offsets),
        pieces=pieces,
        piece_dim=shard.dim or 0,
    )


def _fsdp_offsets(name: str, value: Tensor) -> tuple[int, ...]:
    """Return the offsets of the local shard of a DTensor; zeros for a plain tensor."""
    if not isinstance(value, DTensor):
        return (0,) * value.dim()
    pieces: list[ChunkStorageMetadata] = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(pieces) != 1:
        raise ConfigError(
            f"parameter {name!r}, placements {value.placements}: a checkpoint needs one rectangle "
            "per rank; nearest valid: fully_shard without shard_placement_fn"
        )
    return tuple(pieces[0].offsets)
