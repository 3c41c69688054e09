"""Proposal of a plan for a model that carries none.

A pair of linear layers can be split where every block of the second one's input features depends on
the same block of the first one's output features: with an activation between them, or with
attention, whose heads are such blocks. Names do not tell that, and the shapes of q, k and v and of
what follows them are the same. So it is measured on a small input (`traced`): the gradient of one
block of an input with respect to the outputs before it must be zero in all other blocks
(`adoption.dependencies`). The number of blocks for which that holds is the largest tp. Items of a
pipeline are tried out, too: every cut between two items is made, the first stage runs to the cut,
the second one from what it sent to the end.

Without an input, pairs are taken from the structure (`by_structure`): layers of torch, neighbours
in an ``nn.Sequential``, and linears whose shapes fit only one way. What is in doubt stays whole.

A wrong pair would cost time and change no number: a column-parallel layer's output behaves like the
whole (`whole.split_tensor`), and is gathered where it is read across features.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.adoption.classes import become
from lightning_megatron.adoption.dependencies import Calls, run_watched
from lightning_megatron.adoption.huggingface import is_huggingface
from lightning_megatron.adoption.plan import AdoptionPlan
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.errors import ConfigError

COLUMN, ROW = "colwise_gather_output", "rowwise"
"""Styles of a pair. The output of a column layer behaves like the whole, whoever reads it."""

_TORCH_LAYERS: Mapping[type[nn.Module], Mapping[str, str]] = {
    nn.MultiheadAttention: {"": "multihead_attention"},
    nn.TransformerEncoderLayer: {"linear1": COLUMN, "linear2": ROW},
    nn.TransformerDecoderLayer: {"linear1": COLUMN, "linear2": ROW},
}
_LARGE = 0.02
"""Part of a model's parameters from which on a layer alone is split, or an item of its own."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Plan, and what was found out about each module that it names or leaves out."""

    plan: AdoptionPlan
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a module has its style, or none, by its name."""
    basis: str
    """Sign by which it was found."""


def propose(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Proposal:
    """Propose a plan for any module.

    Args:
        model: the module; runs once in evaluation, and is as before.
        args: arguments of a small call. Without these and ``kwargs``, those of the module's
            ``example_input_array``, or the ``dummy_inputs`` of a model of transformers; without
            these, and on the meta device, the structure decides.
        kwargs: keyword arguments of the call.
    """
    example = getattr(model, "example_input_array", None)
    if not args and not kwargs and example is not None:
        if isinstance(example, Mapping):
            kwargs = example
        else:
            args = example if isinstance(example, tuple) else (example,)
    if any(p.is_meta for p in model.parameters()):
        return by_structure(model)
    if args or kwargs:
        return traced(model, args, kwargs or {})
    if is_huggingface(model):
        # What transformers calls it with itself. Not every model takes it: one of images does not.
        example = getattr(model, "dummy_inputs", None)
        with suppress(Exception):
            return traced(model, (), dict(example or {}))
    return by_structure(model)


def by_structure(model: nn.Module) -> Proposal:
    """Propose a plan from classes and shapes of modules."""
    styles = _torch_layers(model)
    reasons = dict.fromkeys(styles, "layer of torch")
    for name, module in model.named_modules():
        for columns, row in _pairs_of(module):
            pair = [_join(name, child) for child in (*columns, row)]
            if any(child in styles or _is_inside(child, styles) for child in pair):
                continue
            for child in pair[:-1]:
                styles[child], reasons[child] = COLUMN, f"by shape, pairs with {pair[-1]}"
            styles[pair[-1]] = ROW
            reasons[pair[-1]] = f"by shape, pairs with {', '.join(pair[:-1])}"
    blocks = max(_chains(model), key=lambda names: _size(model, names), default=[])
    plan = AdoptionPlan(styles=styles, items=blocks, blocks=blocks)
    return Proposal(plan=plan, reasons=reasons, basis="by structure")


def traced(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Proposal:
    """Propose a plan from what a model does with one input."""
    styles = _torch_layers(model)
    reasons = dict.fromkeys(styles, "layer of torch")
    linears = [
        name
        for name, m in model.named_modules()
        if is_linear(m) and name not in styles and not _is_inside(name, styles)
    ]
    opaque = [n for n, m in model.named_modules() if type(m) in _TORCH_LAYERS and n not in linears]
    embeddings = [n for n, m in model.named_modules() if type(m) is nn.Embedding]
    chains = [names for names in _chains(model) if _size(model, names) > _LARGE * _size(model)]
    members = [name for names in chains for name in names]
    watched = (*embeddings, *members)
    calls = run_watched(
        model, args, kwargs, linears=linears, opaque=opaque, watched=watched, read=embeddings
    )
    holders = _holders(model)
    shared = {module for others in holders.values() if len(others) > 1 for module, _ in others}
    pairs = _Pairs(calls, linears, shared)
    for name in linears:
        style, reasons[name] = pairs.style_of(name)
        if style is not None:
            styles[name] = style
    for name, reason in _alone(model, calls, pairs, embeddings, holders).items():
        style, reasons[name] = reason
        if style is not None:
            styles[name] = style
    items = _items(model, calls, chains, styles, holders, args, kwargs)
    blocks = [name for name in items if name in members]
    plan = AdoptionPlan(styles=styles, items=items, blocks=blocks)
    return Proposal(plan=plan, reasons=reasons, basis="by a run on an example")


class _Pairs:
    """Which linears of a model are columns, and which are rows that take what these return.

    Args:
        calls: what a run has shown.
        linears: names of the linears.
        shared: names of modules with parameters that others have, too; they are in no pair.
    """

    def __init__(self, calls: Calls, linears: Sequence[str], shared: Collection[str]) -> None:
        self._calls = calls
        self._apart = calls.read | set(shared)
        called = calls.linears()
        self._uncalled = set(linears) - set(called)
        self.sources = {name: calls.sources(name) for name in called}
        self.of_output = calls.sources(None)
        self.blocks = {name: calls.blocks(name) for name in called if self.sources[name]}
        barred = set(self._apart)
        while True:
            self.columns, self.rows = self._assigned(called, barred)
            wrong = {name for name in self.columns if not self._feeds_rows(name)}
            if not wrong:
                break
            barred |= wrong

    def _assigned(self, called: Sequence[str], barred: set[str]) -> tuple[set[str], set[str]]:
        """Columns and rows, in the order of the calls; what is barred is no column."""
        columns: set[str] = set()
        rows: set[str] = set()
        for name in called:
            sources = self.sources[name]
            takes_columns = bool(sources) and sources <= columns
            if takes_columns and self.blocks[name] > 1 and name not in self._apart:
                rows.add(name)
            elif name not in barred:
                columns.add(name)
        return columns, rows

    def _feeds_rows(self, name: str) -> bool:
        takers = {taker for taker, sources in self.sources.items() if name in sources}
        return bool(takers) and takers <= self.rows and name not in self.of_output

    def is_head(self, name: str) -> bool:
        """Whether a linear's output is the model's, and nothing else depends on it directly."""
        taken = any(name in sources for sources in self.sources.values())
        if name not in self.of_output or taken or name in self._calls.read:
            return False
        return self._calls.is_returned_by_features(name)

    def style_of(self, name: str) -> tuple[str | None, str]:
        """Style of a linear, None for whole, and the reason."""
        if name in self.columns:
            takers = [taker for taker in self.rows if name in self.sources[taker]]
            return COLUMN, f"pairs with {', '.join(takers)}"
        if name in self.rows:
            made = ", ".join(sorted(self.sources[name]))
            return ROW, f"pairs with {made}, up to tp={self.blocks[name]}"
        if name in self._uncalled:
            return None, "not called"
        if name in self._calls.read:
            return None, "its weight is read past its call"
        if name in self._apart:
            return None, "its weight is another module's, too"
        return None, "its output is read across features"


def _holders(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """Modules that have a parameter, and its names in them, by its identity."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((name, own))
    return holders


def _alone(
    model: nn.Module,
    calls: Calls,
    pairs: _Pairs,
    embeddings: Sequence[str],
    holders: Mapping[int, Sequence[tuple[str, str]]],
) -> dict[str, tuple[str | None, str]]:
    """Styles and reasons of large embeddings and heads, whose parameters may be shared."""
    heads = [name for name in pairs.sources if pairs.is_head(name)]
    large = _LARGE * _size(model)
    found: dict[str, tuple[str | None, str]] = {}
    for name in (*embeddings, *heads):
        module: Any = model.get_submodule(name)
        sharing = [n for n, _ in holders[id(module.weight)]]
        bias = getattr(module, "bias", None)
        biases = [] if bias is None else [h for h in holders[id(bias)] if h[0] != name]
        plain = all(own == "bias" and n not in pairs.sources for n, own in biases)
        if module.weight.numel() < large:
            found[name] = None, "small"
        elif any(n in calls.read or n not in (*embeddings, *heads) for n in sharing) or not plain:
            found[name] = None, "its weight is read elsewhere, too"
        elif len(module.weight) % 2 or not all(
            splits_rows(model, n) for n in sharing if n in embeddings
        ):
            found[name] = None, "its rows cannot be split"
        elif name in heads:
            found[name] = COLUMN, "its output is the model's"
            found |= {n: ("tied_bias", f"has the bias of {name}") for n, _ in biases}
        else:
            found[name] = "embedding_rowwise", "large"
    return found


def splits_rows(model: nn.Module, name: str) -> bool:
    """Whether the rows of an embedding can be split."""
    module: Any = model.get_submodule(name)
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _items(
    model: nn.Module,
    calls: Calls,
    chains: Sequence[Sequence[str]],
    styles: Mapping[str, str],
    holders: Mapping[int, Sequence[tuple[str, str]]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[str]:
    """Items of a pipeline that runs as the model does, wherever it is cut; none if none are."""
    once = [name for name in calls.order if calls.order.count(name) == 1]
    chained = {n for names in chains if all(name in once for name in names) for n in names}
    outer = {n for n in chained if not _is_inside(n, chained)}
    ends = {n: s for n, s in styles.items() if n in once and not _is_inside(n, outer)}
    embeddings = {n for n, s in ends.items() if s == "embedding_rowwise"}
    heads = {n for n, s in ends.items() if s == COLUMN}
    for wanted in (outer | embeddings | heads, outer | heads, outer):
        items = [name for name in once if name in wanted]
        apart = any(
            len({name in items or _is_inside(name, items) for name, _ in sharing}) > 1
            for sharing in holders.values()
        )
        if len(items) > 1 and not apart and pipeline_fault(model, items, args, kwargs) is None:
            return items
    return []


def _torch_layers(model: nn.Module) -> dict[str, str]:
    """Styles of what belongs to layers of torch."""
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        for kind, children in _TORCH_LAYERS.items():
            if isinstance(module, kind) and type(module).forward is kind.forward:
                styles |= {_join(name, child): style for child, style in children.items()}
    return styles


def _pairs_of(module: nn.Module) -> Iterator[tuple[list[str], str]]:
    """Yield names of column layers and the row layer of each pair in a module, by shape."""
    linears = {name: m for name, m in module.named_children() if is_linear(m)}
    if isinstance(module, nn.Sequential):
        before: str | None = None
        for name, child in module.named_children():
            if is_linear(child):
                if before is not None and linears[before].out_features == child.in_features:
                    yield [before], name
                    before = None
                else:
                    before = name
            elif any(True for _ in child.parameters()) or not _is_elementwise(child):
                before = None
        return
    by_shape: dict[tuple[int, int], list[str]] = {}
    linear: Any
    for name, linear in linears.items():
        by_shape.setdefault((linear.in_features, linear.out_features), []).append(name)
    for (outside, inside), columns in by_shape.items():
        rows = by_shape.get((inside, outside), [])
        # One row layer takes what up to two column layers (up and gate) return. Where both have
        # the same shape, or either number could be the inner one, nothing tells which is which.
        if inside > outside and len(rows) == 1 and len(columns) <= 2:
            yield columns, rows[0]


def _is_elementwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout | nn.Identity) or (
        type(module).__module__ == "torch.nn.modules.activation"
        and not isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.GLU)
    )


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that computes as ``nn.Linear`` does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _chains(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the members of every list of modules of one class, which are called."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            members = list(module.children())
            called = all(type(m).forward is not nn.Module.forward for m in members)
            alike = len({type(m) for m in members}) == 1
            if called and alike and any(True for _ in members[0].parameters()):
                yield [_join(name, child) for child, _ in module.named_children()]


def _size(model: nn.Module, names: Sequence[str] = ("",)) -> int:
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())


def _is_inside(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others if other)


def _join(prefix: str, name: str) -> str:
    return ".".join(filter(None, (prefix, name)))


def pipeline_fault(
    model: nn.Module, items: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Say what is wrong with a model as a pipeline of these items; None: nothing.

    Args:
        model: the model; a copy of it with the same weights runs, in evaluation.
        items: names of the items, in order.
        args: arguments of a call.
        kwargs: keyword arguments of the call.
    """
    weights: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    whole = copy.deepcopy(model, weights).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        expected = _tensors(whole(*args, **kwargs))
    trunk = become(whole, AdoptedTrunk)
    trunk.name_items(items)
    for cut in range(1, len(items)):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                found = _tensors(trunk.run_in_two(cut, tuple(args), dict(kwargs)))
        except ConfigError as error:
            return str(error)
        except Exception as error:
            return f"cut before {items[cut]}: {type(error).__name__}: {error}"
        if not all(map(torch.equal, found, expected)) or len(found) != len(expected):
            return f"cut before {items[cut]}: another output than that of the whole"
    return None


def _tensors(output: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
