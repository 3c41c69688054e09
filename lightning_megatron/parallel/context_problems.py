"""What context parallelism forbids of a module, as far as its structure tells.

Inside of a `PipelineSequential` each cp rank has a part of every sequence (`topology.context`). A
module there acts on each position by itself, or exchanges what it needs between the ranks, as the
attention of this library does. Modules of torch that mix positions (attention, recurrent networks,
convolutions along the sequence) do neither: each rank would mix the positions of its part, and
train other weights than one process. They are refused by name before any process connects.

What cannot be told from a class is looked at when the trunk is called first
(`parallel.context_check`): forwards of the user's own, and modules such as ``nn.GroupNorm`` that
mix positions or not, as their input lies.

Who may stand behind a split:

* layers of this library, whose forward knows cp;
* modules with ``exchanges_context = True`` in their class: their author has seen to it;
* everything that acts on each position by itself.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.layers.base import ParallelLayer, has_hooks_of_user
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem

_ATTENTION = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
_POOLING_1D = (
    nn.AvgPool1d,
    nn.MaxPool1d,
    nn.LPPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_JOINING = (
    "nearest valid: GatherContext() before it and SplitContext() after it, the same outside of the "
    "PipelineSequential, or cp=1"
)
_OURS, _COPIED = "lightning_megatron.", "lightning_megatron.recipes."
"""Where forwards know cp; recipes are for users to copy and change."""


def context_problems(trunks: Mapping[str, PipelineSequential], cp: int) -> list[str]:
    """Reasons why sequences of a module cannot be split over ``cp`` ranks.

    Args:
        trunks: trunks of the module by name, whole.
        cp: degree of context parallelism.
    """
    if not trunks:
        return [
            f"cp={cp}: the module has no PipelineSequential, inside of which sequences are split; "
            "nearest valid: wrap the network in "
            "lightning_megatron.PipelineSequential(embedding=..., layers=[...], head=...) and call "
            "it in every step, or cp=1"
        ]
    told = [problem for trunk in trunks.values() for problem in trunk.context_problems(cp)]
    told += [
        f"cp={cp}: {name} ({type(module).__name__}) {fault}"
        for trunk_name, trunk in trunks.items()
        if isinstance(trunk, AdoptedTrunk)
        for block in trunk.block_names
        for name, module, fault in _faults(
            f"{trunk_name}.{block}" if trunk_name else block,
            trunk.get_submodule(block),
            by_registry=True,
        )
    ]
    trunks = {name: trunk for name, trunk in trunks.items() if not trunk.splits_sequences}
    if told or not trunks:
        return told
    inside = [module for trunk in trunks.values() for module in trunk.modules()]
    if any(isinstance(m, RemoteItem) for m in inside):
        return []  # an earlier run, whose problems were told, has left some stages here
    if not any(splits(m) or getattr(type(m), "exchanges_context", False) for m in inside):
        return [
            f"cp={cp}: nothing in the module splits the sequence; nearest valid: "
            "VocabParallelEmbedding or SplitContext"
        ]
    items = [pair for name, trunk in trunks.items() for pair in items_on_parts(name, trunk)]
    hooked = [
        f"cp={cp}: {name}.{path}".rstrip(".") + f" ({type(module).__name__}) has a forward hook, "
        "which gets this rank's positions only; nearest valid: the same on what the "
        "PipelineSequential returns, a hook on a GatherContext() in it, or cp=1"
        for name, item in items
        for path, module in item.named_modules()
        if has_hooks_of_user(module)
    ]
    return hooked + [
        f"cp={cp}: {name} ({type(module).__name__}) {fault}"
        for name, item in items
        for name, module, fault in _faults(name, item)
    ]


def splits(module: nn.Module) -> bool:
    """Whether a module returns a rank's part of a whole sequence."""
    return isinstance(module, ParallelLayer) and module.splits_context


def joins(module: nn.Module) -> bool:
    """Whether a module returns the whole of sequences that it gets parts of."""
    return isinstance(module, ParallelLayer) and module.joins_context


def knows_context(module: nn.Module) -> bool:
    """Whether a module is known to act rightly on a part of a sequence, with all that it holds.

    A layer of this library whose parts somebody has exchanged is not, unless it is one that
    computes with its parts as it likes (`ParallelLayer`).
    """
    if getattr(type(module), "exchanges_context", False):
        return True
    if not _is_ours(module):
        return False
    return isinstance(module, ParallelLayer) or all(map(_is_known, module.children()))


def _is_known(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Dropout | nn.Identity | nn.ModuleList | nn.ModuleDict)
    return all(map(_is_known, module.children())) if plain else knows_context(module)


def _is_ours(module: nn.Module) -> bool:
    wrote = f"{getattr(type(module).forward, '__module__', '')}."
    return wrote.startswith(_OURS) and not wrote.startswith(_COPIED)


def items_on_parts(prefix: str, trunk: PipelineSequential) -> Iterator[tuple[str, nn.Module]]:
    """Items all of whose forward works on parts of sequences, by their names in the module."""
    on_parts = False
    for name, item in zip(trunk.item_names, trunk.items(), strict=True):
        cuts = any(map(splits, item.modules()))
        ends = any(map(joins, item.modules()))
        if on_parts and not cuts and not ends:
            yield f"{prefix}.{name}" if prefix else name, item
        on_parts = cuts or (on_parts and not ends)


def _faults(
    name: str, module: nn.Module, *, by_registry: bool = False
) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules that mix positions, each with what is wrong with it; outermost only.

    Args:
        name: name of ``module``.
        module: what may hold some.
        by_registry: whether attention of transformers takes its function from the registry.
    """
    if knows_context(module):
        return
    asks = by_registry and _is_attention_of_transformers(module)
    fault = None if asks else _fault(module)
    if fault is not None:
        yield name, module, fault
        return
    for child_name, child in module.named_children():
        yield from _faults(f"{name}.{child_name}", child, by_registry=by_registry)


def _fault(module: nn.Module) -> str | None:
    if isinstance(module, _ATTENTION) or _is_attention_of_transformers(module):
        return (
            "does not exchange keys and values between cp ranks; nearest valid: "
            "lightning_megatron.layers.attention, or cp=1"
        )
    if isinstance(module, nn.RNNBase):
        return (
            "runs along the sequence, of which each cp rank has chunks that are no neighbours; "
            f"{_JOINING}"
        )
    if _convolves(module) or isinstance(module, _POOLING_1D):
        return f"mixes neighbouring positions, which other cp ranks may have; {_JOINING}"
    if isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats):
        return (
            "takes statistics over positions, of which each cp rank has a part; nearest valid: "
            "nn.LayerNorm, the same outside of the PipelineSequential, or cp=1"
        )
    return None


def _convolves(module: nn.Module) -> bool:
    """Whether a module convolves along a line; planes may be those of each position."""
    if not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return False
    return module.kernel_size[0] > 1 or module.stride[0] > 1


def _is_attention_of_transformers(module: nn.Module) -> bool:
    """Whether it is attention of Hugging Face, none of whose parts somebody has exchanged."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or "Attention" not in kind.__name__:
        return False
    return not any(map(knows_context, module.modules()))
