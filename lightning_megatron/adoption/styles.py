"""Styles: how one module, or parameter, of an adopted model is split.

The names are those of transformers (``transformers.distributed.tensor_parallel``), so that its
plans and those that users know from it mean the same here:

==================================  ==============================================================
``colwise``                         output features are split, in attention by heads
``colwise_gather_output``           the same, and the output behaves like the whole
``rowwise``                         input features are split; takes what a colwise module returns
``rowwise_split_input``             the same; splits a whole input itself
``embedding_rowwise``               rows of an ``nn.Embedding`` are split
``replicated_with_grad_allreduce``  whole parameters that are applied to a part on each rank
``mla_kv_a_proj``                   whole; the positional part of its output goes to heads
``packed_colwise``                  two halves of the output features are split each by itself
``heads_of_alibi``                  ours: an attention module that is given a bias for each head
``fused_qkv``, ``fused_kv``         ours: so are queries, keys and values in one
``moe_tp_experts``                  stacks of experts (`adoption.experts`)
``per_head``                        ours: parameters with one row for each head
``tied_bias``                       ours: a bias that belongs to a colwise module as well
``embedding_colwise``               columns of an ``nn.Embedding`` are split: those of heads
``replicate``, ``local_params``     whole, and the same is computed on every rank
==================================  ==============================================================

An attention module of transformers with a ``colwise`` projection computes with this rank's heads
(`adoption.heads`), so everything in it that has parameters needs a style.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_megatron.adoption.embedding import as_embedding, looks_up_plainly
from lightning_megatron.adoption.experts import as_experts
from lightning_megatron.adoption.heads import (
    AdoptedAttention,
    as_attention,
    as_per_head,
    count_in_config,
    fused_heads,
    fused_parts,
    has_heads,
    heads_of,
)
from lightning_megatron.adoption.linear import (
    LinearSplit,
    TiedBias,
    as_linear,
    is_transposed,
    linear_sizes,
)
from lightning_megatron.adoption.router_losses import balance_over_ranks
from lightning_megatron.adoption.sharding import Part, Sharded, Sharding, as_sharded
from lightning_megatron.adoption.torch_layers import TORCH_STYLES
from lightning_megatron.errors import ConfigError, raise_if_any

Style = Callable[[nn.Module, str], object]
"""Function that makes the module of a name in a model parallel, in place."""

_WRAPPED = ("base_layer", "linear")
"""Names of a linear layer in a wrapper, which has the name that the layer would have."""


def _colwise(model: nn.Module, name: str) -> None:
    if _is_parameter(model, name):
        return  # the attention module splits it (`_adopt_attention`)
    module, attention = model.get_submodule(name), attention_name(model, name)
    heads = model.get_submodule(attention) if attention is not None else None
    parts: tuple[Part, ...] = ()
    if isinstance(heads, AdoptedAttention):
        units = heads.heads.units[_relative(name, attention)]
        parts = (Part(linear_sizes(module)[1], units),)
    as_linear(module, LinearSplit(placement="column", parts=parts))


def _alibi(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    if not isinstance(module, AdoptedAttention):
        raise ConfigError(
            f"tp_plan: {name}: style 'heads_of_alibi' is for an attention of transformers whose "
            "projections are split by heads; nearest valid: 'colwise' or 'fused_qkv' for them"
        )
    module.takes_alibi = True


def _packed(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    half = linear_sizes(module, name)[1] // 2
    as_linear(module, LinearSplit(placement="column", parts=(Part(half, half),) * 2), name)


def _fused(model: nn.Module, name: str, style: str) -> None:
    split = LinearSplit(placement="column", parts=tuple(_parts(model, name, style)))
    as_linear(model.get_submodule(name), split, name)


def _parts(model: nn.Module, name: str, style: str) -> list[Part]:
    """Queries, keys and values in a fused projection.

    Raises:
        ConfigError: it is not made of them.
    """
    attention = attention_name(model, name)
    if attention is None:
        raise ConfigError(
            f"tp_plan: {name}: style {style!r} takes the number of heads from the module that "
            "holds it, which is no attention of transformers; nearest valid: 'packed_colwise' for "
            "two halves, or 'colwise_gather_output'"
        )
    owner = model.get_submodule(attention)
    features = linear_sizes(model.get_submodule(name), name)[1]
    heads = fused_heads(owner, {})
    return fused_parts(owner, heads, features, name, queries=style == "fused_qkv")


def _rowwise(model: nn.Module, name: str) -> None:
    attention = attention_name(model, name)
    of_heads = attention is not None and isinstance(
        model.get_submodule(attention), AdoptedAttention
    )
    as_linear(model.get_submodule(name), LinearSplit(placement="row", of_heads=of_heads))


def _embedding_rowwise(model: nn.Module, name: str) -> None:
    module = _embedding(model, name, "embedding_rowwise")
    if not splits_rows(module):
        raise ConfigError(_wrong_class(name, module, "embedding_rowwise", "plain nn.Embedding"))
    as_embedding(module, by_rows=True)


def _experts(model: nn.Module, name: str) -> None:
    as_experts(model.get_submodule(name), name)
    balance_over_ranks(model)


def _latent(model: nn.Module, name: str) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    features = getattr(text, "qk_rope_head_dim", None)
    if not isinstance(features, int):
        raise ConfigError(
            f"tp_plan: {name}: style 'mla_kv_a_proj' takes the number of positional features from "
            "config.qk_rope_head_dim, which the model does not have; nearest valid: "
            "'colwise_gather_output'"
        )
    as_linear(model.get_submodule(name), LinearSplit(placement="whole", positional=features))


def _per_head(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    rows = {p.shape[0] for p in module.parameters(recurse=False) if p.dim() > 0}
    as_per_head(module, max(rows, default=0))


def _whole(model: nn.Module, name: str) -> None:
    del model, name


def _split(split: LinearSplit) -> Style:
    """Style of linear layers that are split in one way wherever they are."""
    return lambda model, name: as_linear(model.get_submodule(name), split)


def _sharded(sharding: Sharding, front: type[Sharded] = Sharded) -> Style:
    """Style of modules whose own code runs on their parts."""
    return lambda model, name: as_sharded(model.get_submodule(name), sharding, front)


# The output behaves like the whole, and is gathered where somebody reads it.
_GATHERED = _split(LinearSplit(placement="column", may_stay_whole=True))
_WHOLE_INPUT = _split(LinearSplit(placement="row", splits_input=True))

STYLES: dict[str, Style] = {
    "colwise": _colwise,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _rowwise,
    "rowwise_split_input": _WHOLE_INPUT,
    "rowwise_rep": _WHOLE_INPUT,
    "embedding_rowwise": _embedding_rowwise,
    "replicated_with_grad_allreduce": _sharded(Sharding(sums="always")),
    "tied_bias": _sharded(Sharding(dims={"bias": 0}, undivided="whole"), TiedBias),
    "mla_kv_a_proj": _latent,
    "per_head": _per_head,
    "moe_tp_experts": _experts,
    "ep_dispatch_experts": _experts,
    "heads_of_alibi": _alibi,
    "packed_colwise": _packed,
    "fused_qkv": partial(_fused, style="fused_qkv"),
    "fused_kv": partial(_fused, style="fused_kv"),
    "replicate": _whole,
    "local_params": _whole,
    **TORCH_STYLES,
}

_FUSED = {"fused_qkv", "fused_kv"}
"""Styles of projections that are several in one."""
_BY_HEADS = {"colwise", *_FUSED}
"""Styles after which an attention module computes with this rank's heads."""
_EXPERTS = {"moe_tp_experts", "ep_dispatch_experts"}
"""Styles of modules that split their own parameters, whatever styles these have."""
_BY_ROWS = {"colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise", "tied_bias"}
"""Styles that split dim 0 of a weight."""
_LIKE: Mapping[type[nn.Module], tuple[str, ...]] = {nn.Linear: ("FalconLinear.forward",)}
"""Methods of transformers that compute what those of torch's classes do."""
_OF_TRANSPOSED = {"colwise", "rowwise", "packed_colwise", *_FUSED}
"""Styles for a ``Conv1D`` of transformers as well, whose weight is transposed."""
_WHOLE = {"replicate", "local_params", "replicated_with_grad_allreduce", "mla_kv_a_proj"}
"""Styles of whole weights."""


def apply_styles(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Make the modules of a model parallel, in place.

    Args:
        model: the model.
        styles: style by name of a module or parameter.

    Raises:
        ConfigError: a style is not known, or does not fit its module; the model is as before.
    """
    experts = tuple(f"{name}." for name, style in styles.items() if style in _EXPERTS)
    styles = {name: style for name, style in styles.items() if not name.startswith(experts)}
    raise_if_any(list(_unknown(model, styles)))
    attentions = _attentions(model, styles)
    raise_if_any(
        [
            *_wrong_modules(model, styles),
            *(p for name in attentions for p in _without_style(model, name, styles)),
            *_tied_apart(model, styles),
            *_not_fused(model, styles),
        ]
    )
    with _undone_by_errors(model):
        for name in attentions:
            _adopt_attention(model, name, styles)
        for name, style in styles.items():
            STYLES[style](model, name)


@contextmanager
def _undone_by_errors(model: nn.Module) -> Iterator[None]:
    """Context in which an error leaves the modules of a model with their classes of before."""
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    except ConfigError:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        raise


def splits_rows(module: nn.Module) -> bool:
    """Whether an embedding's rows can be split: it looks them up as ``nn.Embedding`` does."""
    if not isinstance(module, nn.Embedding) or not looks_up_plainly(module):
        return False
    return _ends_in(module, nn.Embedding)


def attention_name(model: nn.Module, name: str) -> str | None:
    """Name of the attention module that a projection belongs to; None if it is in none."""
    parent, _, leaf = name.rpartition(".")
    if leaf in _WRAPPED:
        parent = parent.rpartition(".")[0]
    return parent if has_heads(model.get_submodule(parent)) else None


def _attentions(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    """Names of the attention modules that compute with this rank's heads."""
    found = [
        attention_name(model, name)
        for name, style in styles.items()
        if style in _BY_HEADS and not _is_parameter(model, name)
    ]
    return list(dict.fromkeys(name for name in found if name is not None))


def _adopt_attention(model: nn.Module, name: str, styles: Mapping[str, str]) -> None:
    module, inside, prefix = model.get_submodule(name), _inside(name, styles), _prefix(name)
    columns = {
        child: module.get_submodule(child)
        for child, style in inside.items()
        if style == "colwise" and not _is_parameter(module, child)
        if attention_name(model, f"{prefix}{child}") == name
    }
    rows = [module.get_submodule(child) for child, style in inside.items() if style == "rowwise"]
    row = next((m for m in rows if isinstance(m, nn.Linear)), None)
    if _FUSED & set(inside.values()):
        heads = fused_heads(module, columns)
    else:
        heads = heads_of(module, columns, row)  # type: ignore[arg-type]  # checked to be linear
    own = tuple(child for child in inside if _is_parameter(module, child))
    wrong = [
        f"tp_plan: {prefix}{child} has the shape {tuple(getattr(module, child).shape)}, which "
        f"style 'colwise' cannot split by {heads.queries} heads; nearest valid: 'replicate'"
        for child in own
        if getattr(module, child).shape[:1] != (heads.queries,)
    ]
    raise_if_any(wrong)
    as_attention(module, heads, own)
    if _FUSED & set(inside.values()):
        count_in_config(module)  # type: ignore[arg-type]  # it is an attention now


def _inside(name: str, styles: Mapping[str, str]) -> dict[str, str]:
    """Styles of what a module holds, by names in it."""
    prefix = _prefix(name)
    return {k[len(prefix) :]: style for k, style in styles.items() if k.startswith(prefix)}


def _prefix(name: str) -> str:
    """Start of the names in a module; the model's own name is empty."""
    return f"{name}." if name else ""


def _unknown(model: nn.Module, styles: Mapping[str, str]) -> Iterable[str]:
    for name, style in styles.items():
        if style not in STYLES:
            close = difflib.get_close_matches(style, STYLES, n=1, cutoff=0.0)[0]
            yield (
                f"tp_plan: {name} ({_kind(model, name)}): style {style!r} is "
                f"none of {', '.join(STYLES)}; nearest valid: {close!r}"
            )


def _wrong_modules(model: nn.Module, styles: Mapping[str, str]) -> Iterable[str]:
    """Faults of styles for linear layers that their modules do not have the class for."""
    prefixes = ("colwise", "rowwise", "mla", "packed", "fused")
    of_linear = {name for name in STYLES if name.startswith(prefixes)}
    for name, style in styles.items():
        if style not in of_linear:
            continue
        if _is_parameter(model, name):
            parent = name.rpartition(".")[0]
            if style != "colwise" or not has_heads(model.get_submodule(parent)):
                yield (
                    f"tp_plan: {name} is a parameter of {_kind(model, parent)}, which style "
                    f"{style!r} cannot split; nearest valid: 'replicate'"
                )
            continue
        module = model.get_submodule(name)
        if style in _OF_TRANSPOSED and is_transposed(module):
            if not _ends_in_own(module, "Conv1D.forward"):
                yield _wrong_class(name, module, style, "plain Conv1D")
            continue
        if not isinstance(module, nn.Linear):
            yield _wrong_class(name, module, style, "nn.Linear")
        elif not _ends_in(module, nn.Linear, only=True):
            yield _wrong_class(name, module, style, "plain nn.Linear")


def _not_fused(model: nn.Module, styles: Mapping[str, str]) -> Iterable[str]:
    """Faults of projections that are not made of the parts that their style names."""
    for name, style in styles.items():
        try:
            if style in _FUSED:
                _parts(model, name, style)
            elif style == "packed_colwise" and linear_sizes(model.get_submodule(name), name)[1] % 2:
                yield (
                    f"tp_plan: {name} has an odd number of output features, and no two halves; "
                    "nearest valid: 'colwise'"
                )
        except ConfigError as error:
            yield from error.problems


def _without_style(model: nn.Module, name: str, styles: Mapping[str, str]) -> Iterable[str]:
    """Faults of an attention module in which something has parameters and no style."""
    module, inside = model.get_submodule(name), _inside(name, styles)
    if "mla_kv_a_proj" in inside.values():
        return  # the parts before its latent are whole, on purpose
    for child, part in module.named_modules():
        if any(child == known or child.startswith(f"{known}.") for known in inside):
            continue
        for parameter, _ in part.named_parameters(recurse=False):
            path = f"{child}.{parameter}" if child else parameter
            if path not in inside and f"{child}.base_layer" not in inside:
                nearest = child or parameter
                yield (
                    f"tp_plan: {_prefix(name)}{path} has no style, but {type(module).__name__} "
                    "computes with this rank's heads where its projections are 'colwise'; nearest "
                    "valid: "
                    f"a style for {nearest} ('colwise' or 'rowwise' for a projection, "
                    "'replicated_with_grad_allreduce' for what is applied to each head alike, "
                    "'per_head' for one row for each head, 'replicate' for what comes before "
                    "heads)"
                )


def _tied_apart(model: nn.Module, styles: Mapping[str, str]) -> Iterable[str]:
    """Faults of weights that several modules share and split in different ways."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            style = styles.get(f"{name}.{own}" if name else own, styles.get(name, ""))
            way = "rows" if style in _BY_ROWS else "" if style in _WHOLE else style
            holders.setdefault(id(parameter), []).append((name, way))
    for sharers in holders.values():
        if len({way for _, way in sharers}) > 1:
            given = ", ".join(f"{name} {styles.get(name, 'none')!r}" for name, _ in sharers)
            yield (
                f"tp_plan: {given}: these modules share a parameter, which one way of splitting it "
                "must fit; nearest valid: 'embedding_rowwise' and 'colwise_gather_output' for "
                "them, or no style for any"
            )


def _ends_in(module: nn.Module, kind: type[nn.Module], *, only: bool = False) -> bool:
    """Whether the forward of a module is that of ``kind``, or calls it by ``super()``."""
    forward = inspect.unwrap(type(module).forward)
    if forward is kind.forward or _ends_in_own(module, *_LIKE.get(kind, ())):
        return True
    return not only and "super" in forward.__code__.co_names


def _ends_in_own(module: nn.Module, *names: str) -> bool:
    """Whether a module is adopted already, or its forward is one of these of transformers."""
    if getattr(type(module), "adopted_class", None) is not None:
        return True
    forward = inspect.unwrap(type(module).forward)
    return forward.__qualname__ in names and forward.__module__.startswith("transformers.")


def _is_parameter(model: nn.Module, name: str) -> bool:
    """Whether a name is that of a parameter and of no module."""
    parent, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(parent)._parameters


def _relative(name: str, parent: str | None) -> str:
    return name[len(parent) + 1 :] if parent else name


def _kind(model: nn.Module, name: str) -> str:
    return "parameter" if _is_parameter(model, name) else type(model.get_submodule(name)).__name__


def _embedding(model: nn.Module, name: str, style: str) -> nn.Embedding:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Embedding):
        raise ConfigError(_wrong_class(name, module, style, "nn.Embedding"))
    return module


def _wrong_class(name: str, module: nn.Module, style: str, wanted: str) -> str:
    return (
        f"tp_plan: {name} is a {type(module).__name__}, which style {style!r} cannot split; "
        f"nearest valid: a {wanted}, or no style for it"
    )
