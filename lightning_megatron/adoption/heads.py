"""Heads of adopted attention modules: which blocks of features they are, and how many a rank has.

The projections of an attention module are split by heads, so that the module's own forward sees
plain tensors with this rank's heads. It shapes them with ``-1`` for the number of heads, or with
counts that it has as attributes: those become this rank's when the module is distributed. Where it
reads them from the configuration of the model, it gets a view of that with this rank's.

======================  ====================================  ================================
what                    over all ranks                        on one rank
======================  ====================================  ================================
query heads             ``num_heads``                         ``num_heads / tp``
key-value heads         ``num_kv_heads``                      ``max(num_kv_heads / tp, 1)``
queries of a key        ``num_heads / num_kv_heads``          their quotient
======================  ====================================  ================================

With fewer key-value heads than ranks, neighbours compute the same one (`layers.linear`).

A projection whose features are several times the heads (GPT-NeoX's ``query_key_value``, the gated
queries of Qwen3-Next) holds the blocks of one head next to each other, and is split between heads.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_megatron.adoption.classes import become, own_class
from lightning_megatron.adoption.linear import linear_sizes
from lightning_megatron.adoption.sharding import Part, Sharded, Sharding, as_sharded
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import random_stream
from lightning_megatron.layers.size_checks import tp_head_problems
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.split_tensor import SplitTensor
from lightning_megatron.whole.splits import marked, split_of

HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "qk_head_dim")
"""Attributes that name the features of one head; a module with one of them is an attention."""
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
"""Attributes that count query heads."""
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
"""Attributes that count key-value heads."""
GROUPS = ("num_key_value_groups", "n_rep")
"""Attributes that count the query heads of one key-value head."""
WIDTHS = ("all_head_size", "inner_dim", "split_size", "embed_dim")
"""Attributes that count the features of all query heads."""


def head_size(module: nn.Module) -> int | None:
    """Features of one head of an attention module; None for any other module."""
    found = (getattr(module, name, None) for name in HEAD_SIZES)
    return next((size for size in found if isinstance(size, int)), None)


def has_heads(module: nn.Module) -> bool:
    """Whether a module is an attention whose code works on the heads of a rank.

    Code of transformers does. Other code may couple heads without parameters, as a norm over all
    features of the queries does, whatever its attributes are called: its projections return split
    tensors instead, which behave like the whole.
    """
    kinds = own_class(module).__mro__
    of_library = any(kind.__module__.startswith("transformers.") for kind in kinds)
    return of_library and head_size(module) is not None


@dataclass(frozen=True)
class Heads:
    """Heads of one attention module over all ranks."""

    queries: int
    """Number of query heads."""
    keys: int
    """Number of key-value heads."""
    units: Mapping[str, int]
    """Number of blocks in which the features of each projection are split, by its name."""


def heads_of(
    module: nn.Module,
    columns: Mapping[str, nn.Linear],
    row: nn.Linear | None = None,
) -> Heads:
    """Find the heads of an attention module.

    Args:
        module: the attention module.
        columns: its column-parallel projections, by their names in it.
        row: its output projection.

    Raises:
        ConfigError: the features of a projection are no whole number of heads.
    """
    size, queries = head_size(module), query_heads(module, row)
    assert size is not None
    if queries is None:
        queries = max((c.out_features // size for c in columns.values()), default=1)
    units = {n: _units(n, c.out_features, module, size, queries) for n, c in columns.items()}
    wrong = [
        f"{type(module).__name__}.{name} has {columns[name].out_features} features, which "
        f"{queries} heads of {size} features cannot share; nearest valid: "
        "'colwise_gather_output' for it and 'rowwise_split_input' for what takes its output"
        for name, found in units.items()
        if found is None
    ]
    if wrong:
        raise ConfigError(wrong)
    blocks = {name: found for name, found in units.items() if found is not None}
    return Heads(queries, min([queries, *blocks.values()]), blocks)


def query_heads(module: nn.Module, row: nn.Linear | None = None) -> int | None:
    """Number of query heads of an attention module; None if nothing tells it."""
    own = next(_counts(module, QUERY_COUNTS, of_config=False), None)
    size = getattr(module, "v_head_dim", None) or head_size(module)
    if own is None and row is not None and isinstance(size, int):
        own = row.in_features // size
    return own or next(_counts(module, QUERY_COUNTS), None)


def fused_heads(module: nn.Module, columns: Mapping[str, nn.Module]) -> Heads:
    """Find the heads of an attention module with a fused projection.

    Args:
        module: the attention module.
        columns: its other column-parallel projections, by name.

    Raises:
        ConfigError: nothing tells the number of its heads.
    """
    queries, size = query_heads(module), head_size(module)
    if queries is None or size is None:
        raise ConfigError(
            f"{type(module).__name__} says nowhere how many heads its fused projection has; "
            f"nearest valid: an attribute {QUERY_COUNTS[0]}, or 'colwise_gather_output' for it"
        )
    keys = next(_counts(module, KV_COUNTS), None)
    units = {name: linear_sizes(column)[1] // size for name, column in columns.items()}
    return Heads(queries, keys or queries, units)


def fused_parts(
    owner: nn.Module, heads: Heads, features: int, name: str, *, queries: bool = True
) -> list[Part]:
    """Return the parts of a fused projection: queries, keys, values, or the last two.

    Args:
        owner: the attention module.
        heads: its heads.
        features: output features of the projection.
        name: name of the projection.
        queries: whether queries are in it.

    Raises:
        ConfigError: the features are no such parts.
    """
    size = head_size(owner)
    assert size is not None
    query, key = Part(heads.queries * size, heads.queries), Part(heads.keys * size, heads.keys)
    parts = [query, key, key] if queries else [key, key]
    if sum(part.features for part in parts) == features:
        return parts
    of_queries = f"queries of {heads.queries} heads, " if queries else ""
    raise ConfigError(
        f"tp_plan: {name} has {features} output features, which are not {of_queries}keys and "
        f"values of {heads.keys} heads, with {size} features each; nearest valid: "
        "'colwise_gather_output'"
    )


def _counts(module: nn.Module, names: Sequence[str], *, of_config: bool = True) -> Iterator[int]:
    """Counts that a module, then its configuration, has under these names."""
    for holder in (module, getattr(module, "config", None)) if of_config else (module,):
        for name in names:
            count = getattr(holder, name, None)
            if isinstance(count, int) and count > 0:
                yield count


def _units(name: str, features: int, module: nn.Module, size: int, queries: int) -> int | None:
    """Blocks of a projection; None if its features are no whole number of them."""
    of_values = getattr(module, "v_head_dim", None)
    if isinstance(of_values, int) and name.startswith("v"):
        size = of_values
    count, rest = divmod(features, size)
    if rest == 0 and count > 0 and queries % count == 0:
        return count
    return queries if features % queries == 0 else None


class AdoptedAttention(ParallelLayer):
    """Class in front of an attention module whose projections are split by heads.

    Attributes:
        heads: heads over all ranks.
        by_head: names of its own parameters that have one entry for each query head.
        takes_alibi: whether it is given the ALiBi biases of all heads, as ``alibi`` of shape
            ``[b * heads, ...]``, in whose place it gets those of this rank's heads.
        config_counts: numbers of heads over all ranks that it reads from its ``config`` alone.
        whole_values: values of attributes over all ranks, which a rank has changed.

    Attention weights that somebody asks for, ``[b, n, s, s]``, are the last of what the module
    returns. They are split over tp by heads, and behave like those of all heads
    (`whole.split_tensor`).
    """

    surrounds = ("forward",)
    heads: Heads
    by_head: tuple[str, ...]
    takes_alibi: bool = False
    config_counts: Mapping[str, int]
    whole_values: dict[str, Any]

    @override
    def shard_dims(self) -> dict[str, int]:
        return dict.fromkeys(self.by_head, 0)

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        return tp_head_problems(self.heads.queries, self.heads.keys, degrees.tp)

    @override
    def distribute(self, topology: Topology) -> None:
        super().distribute(topology)
        self._restore()
        for name, value in self._local_values(topology.tp.size):
            self.whole_values[name] = self.__dict__[name]
            self.__dict__[name] = value

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self._restore()

    def _restore(self) -> None:
        self.__dict__.update(self.whole_values)
        self.whole_values = {}

    def _local_values(self, tp: int) -> Iterator[tuple[str, Any]]:
        """Attributes and their values on a rank, as far as they differ from those of the whole."""
        queries, keys = self.heads.queries, self.heads.keys
        own_queries, own_keys = queries // tp, max(keys // tp, 1)
        size = head_size(self) or 1
        kinds = (
            (QUERY_COUNTS, queries, own_queries),
            (KV_COUNTS, keys, own_keys),
            (GROUPS, queries // keys, own_queries // own_keys),
            (WIDTHS, queries * size, own_queries * size),
        )
        for names, whole, own in kinds:
            for name in names:
                if self.__dict__.get(name) == whole and own != whole:
                    yield name, own
        if self.config_counts and tp > 1:
            numbers = {name: max(count // tp, 1) for name, count in self.config_counts.items()}
            yield "config", LocalConfig(self.__dict__["config"], numbers)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alibi, tp = kwargs.get("alibi"), self.tp_size
        if self.takes_alibi and self.topology is not None and isinstance(alibi, Tensor) and tp > 1:
            by_batch = alibi.view(args[0].shape[0], tp, -1, *alibi.shape[1:])
            kwargs["alibi"] = by_batch[:, self.topology.tp.rank].flatten(0, 1)
        if not self.by_head and not self._drops_heads():
            # A compiler (torch 2.13) fails where a graph breaks inside of any context.
            return super().__call__(*args, **kwargs)
        with self._draws(), _seen_as(self, {n: self._parameters[n] for n in self.by_head}):
            return super().__call__(*args, **kwargs)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, topology = super().forward(*args, **kwargs), self.topology
        if topology is None or topology.tp.size == 1 or not isinstance(out, tuple):
            return out
        if not (kwargs.get("output_attentions") or _collects_weights()):
            return out
        own = self.heads.queries // topology.tp.size
        return (*out[:-1], _of_all_heads(out[-1], own, topology))

    def _draws(self) -> AbstractContextManager[Any]:
        """Context of the draws of dropout: of each rank's own on its heads."""
        return _DropoutOfHeads(self.topology) if self._drops_heads() else nullcontext()

    def _drops_heads(self) -> bool:
        return self.training and self.tp_size > 1 and _drops(self)


def _collects_weights() -> bool:
    """Whether transformers collects attention weights (``output_attentions=True``)."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collected = capturing._active_collector.get() if capturing is not None else None
    return any("attentions" in name for name in collected or ())


def _of_all_heads(x: Any, own: int, topology: Topology) -> Any:
    """Return attention weights of a rank's ``own`` heads as a split tensor; all else unchanged."""
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != own or split_of(x) is not None:
        return x
    return x if torch.compiler.is_compiling() else marked(x, SplitTensor, topology, 1)


def _drops(module: nn.Module) -> bool:
    """Whether a module draws masks of dropout somewhere."""
    rates = (v for k, v in vars(module).items() if "drop" in k and isinstance(v, float))
    return any(rates) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.children())


class _DropoutOfHeads(TorchFunctionMode):
    """Has dropout on the heads of a rank draw other numbers than on the heads of another.

    Attention weights have four dims, ``[b, n, s, s]``. What has fewer is the same on all ranks.
    """

    def __init__(self, topology: Topology | None) -> None:
        super().__init__()
        self._topology = topology

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        of_heads = func is F.scaled_dot_product_attention or (
            func in (F.dropout, torch.dropout) and args and args[0].dim() == 4
        )
        with random_stream(self._topology, sharded=True) if of_heads else nullcontext():
            return func(*args, **(kwargs or {}))


def as_attention(module: nn.Module, heads: Heads, by_head: tuple[str, ...] = ()) -> None:
    """Give an attention module its heads' counts on each rank, in place.

    Args:
        module: module whose projections are split by heads.
        heads: heads over all ranks.
        by_head: names of its own parameters with one entry for each query head.
    """
    attention = become(module, AdoptedAttention)
    attention.heads = heads
    attention.by_head = by_head
    attention.config_counts = {}
    attention.whole_values = {}


def count_in_config(module: AdoptedAttention) -> None:
    """Have a module that counts its heads in ``config`` alone find this rank's there."""
    config = vars(module).get("config")
    if config is None or next(_counts(module, QUERY_COUNTS, of_config=False), None) is not None:
        return
    counts = {name: module.heads.queries for name in QUERY_COUNTS if hasattr(config, name)}
    counts |= {name: module.heads.keys for name in KV_COUNTS if hasattr(config, name)}
    module.config_counts = counts


class LocalConfig:
    """View of the configuration of a model, with some numbers of its own.

    Args:
        config: configuration that all other attributes are read from and written to.
        numbers: attributes with other values.
    """

    def __init__(self, config: Any, numbers: Mapping[str, int]) -> None:
        self.__dict__["_config"] = config
        self.__dict__["_numbers"] = dict(numbers)

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__["_numbers"]
        return numbers[name] if name in numbers else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


class PerHead(Sharded):
    """Class in front of a module whose parameters have one row for each head, ``[heads, ...]``.

    It gets this rank's heads, and applies this rank's rows to them (Cohere's norms of queries and
    keys). With fewer heads than ranks every rank holds all rows, and uses one.
    """

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = dict(self.named_parameters(recurse=False))
        with _seen_as(self, {name: self.computed(p) for name, p in own.items()}):
            return super().__call__(*args, **kwargs)


@contextmanager
def _seen_as(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Context in which a module's code sees tensors in the place of its parameters.

    They are no parameters: what watches user's code for numbers of weights that a rank has in part
    (`whole.weights`) leaves them alone.
    """
    seen = {name: x.view_as(x) for name, x in tensors.items() if x is not None}
    try:
        module.__dict__.update(seen)
        yield
    finally:
        for name in seen:
            module.__dict__.pop(name, None)


def as_per_head(module: nn.Module, units: int) -> None:
    """Split the parameters of a module by heads, in place.

    Raises:
        ConfigError: a parameter does not have one row for each head.
    """
    wrong = [
        f"{type(module).__name__}.{name} has the shape {tuple(p.shape)}, which style 'per_head' "
        f"cannot split by {units} heads; nearest valid: 'replicated_with_grad_allreduce', if it is "
        "applied to each head alike"
        for name, p in module.named_parameters(recurse=False)
        if p.shape[:1] != (units,)
    ]
    if wrong:
        raise ConfigError(wrong)
    names = (name for name, _ in module.named_parameters(recurse=False))
    rows = Sharding(dims=dict.fromkeys(names, 0), parts=(Part(units, units),), undivided="shared")
    as_sharded(module, rows, PerHead)
