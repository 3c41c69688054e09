"""Runs one item twice: on a whole short sequence, and on some of its positions.

Both runs are of copies (`stand_ins`) on tiny inputs. In them the layers that know cp are opaque,
and do what they do in a run, as seen from around them:

* a *splitter* returns all positions in the first run, the chosen ones in the second;
* a *joiner* returns in the second run what it has returned in the first;
* any other layer returns noise of the right shape in the first run, and the chosen positions of
  the same noise in the second. Its shape is that of a run on the meta device.

What goes into an opaque layer, what comes out of the item, and tensors with a graph that it leaves
in attributes must in the second run be the chosen positions of what they were in the first.
"""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import tree_flatten, tree_map, tree_unflatten
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.sequential import StageItems, accepted_keywords
from lightning_megatron.parallel.context_check.parts import Parts, Place
from lightning_megatron.parallel.context_check.stand_ins import StandIns, on_meta, with_values
from lightning_megatron.parallel.context_check.trace import Quiet, Trace, culprit, place_of
from lightning_megatron.parallel.context_problems import joins, knows_context, splits

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
"""Values beside tensors that items may return."""


@dataclass(frozen=True)
class Fault:
    """Why an item cannot work on parts of sequences."""

    kind: str
    """``mixes``, ``left`` (in an attribute), ``whole`` (a whole tensor meets a part) or
    ``unknown``."""
    what: str
    """Call, attribute or error."""
    place: str
    """File and line; may be empty."""


@dataclass
class Leaf:
    """Tensor between two items, in both runs."""

    whole: Tensor
    place: Place | None
    """Where it has the sequence; None where it is whole in both runs."""


class _Differs(Exception):
    """The second run differs from the first."""

    def __init__(self, tensor: Any, kind: str = "mixes", what: str = "") -> None:
        super().__init__("two runs of an item differ; this is not an error")
        self.tensor = tensor
        self.kind = kind
        self.what = what


@dataclass
class _Passage:
    """A call of an opaque layer in the first run."""

    inputs: list[Any]
    output: Any


@dataclass
class Trial:
    """Both runs of one item.

    Attributes:
        bare: skeleton of the item.
        parts: sizes and chosen positions.
        values: stand-ins for the item's values.
        lengths: lengths of the sequences that splitters got, added to.
    """

    bare: nn.Module
    parts: Parts
    values: StandIns
    lengths: set[int] = field(default_factory=set)

    def run(
        self, leaves: list[Any], spec: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Any], Any] | Fault:
        """Leaves and structure of the output, or what is wrong.

        Args:
            leaves: leaves of the positional arguments: `Leaf`, or any other value.
            spec: their structure.
            kwargs: keyword arguments of the trunk, whole.

        Raises:
            Exception: the item does not run on the whole short sequence.
        """
        found = self._both(leaves, spec, kwargs, Trace(), Trace(), noted=False)
        if not isinstance(found, Fault) or found.kind != "mixes":
            return found
        return self._both(leaves, spec, kwargs, Trace(), Trace(), noted=True)

    def _both(
        self,
        leaves: list[Any],
        spec: Any,
        kwargs: dict[str, Any],
        whole: Trace,
        part: Trace,
        *,
        noted: bool,
    ) -> tuple[list[Any], Any] | Fault:
        tape: dict[str, list[_Passage]] = {}
        parts = self.parts
        args = tree_unflatten(
            [_entered(x.whole) if isinstance(x, Leaf) else x for x in leaves], spec
        )
        first, quiet = with_values(self.bare, self.values), Quiet(whole if noted else None)
        _make_opaque(first, lambda p, m: _First(self, p, m, tape.setdefault(p, []), quiet))
        with quiet:
            output = self._call(first, args, kwargs)
        chosen = [
            _entered(parts.select(x.whole, x.place)) if isinstance(x, Leaf) else x for x in leaves
        ]
        second, quiet = with_values(self.bare, self.values), Quiet(part if noted else None)
        _make_opaque(second, lambda p, m: _Second(self, m, iter(tape.get(p, [])), quiet))
        try:
            with quiet:
                other = self._call(second, tree_unflatten(chosen, spec), kwargs)
            return self._compared(output, other, first, second)
        except _Differs as differs:
            call = culprit(parts, whole, part, differs.tensor) if noted else None
            if differs.what or call is None:
                return Fault(differs.kind, differs.what, "")
            return Fault(differs.kind, call.name, call.place)
        except Exception as error:  # whatever a user's module raises
            return Fault("whole", f"{type(error).__name__}: {error}", place_of(error))

    def _call(self, item: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.values.dtype is not None:
            torch.set_default_dtype(self.values.dtype)  # of what the item makes, as its weights
        torch.manual_seed(1)
        random.seed(1)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(1)
        own = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, kwargs)
        return StageItems([item], [accepted_keywords(self.bare)])(*args, **own)

    def _compared(
        self, output: Any, other: Any, first: nn.Module, second: nn.Module
    ) -> tuple[list[Any], Any] | Fault:
        (wholes, spec), (parts, _) = tree_flatten((output,)), tree_flatten((other,))
        if len(wholes) != len(parts):
            raise _Differs(None)
        found: list[Any] = []
        for a, b in zip(wholes, parts, strict=True):
            good, place = self.parts.relation(a, b)
            if not good or (place is not None and place.dim > 0 and place.before > 1):
                raise _Differs(a)  # also positions that follow each other twice
            if not isinstance(a, (Tensor, *_PLAIN)):
                return Fault("unknown", f"it returns a {type(a).__name__}", "")
            found.append(Leaf(a.detach(), place) if isinstance(a, Tensor) else a)
        left = dict(_left(second))
        for name, tensor in _left(first):
            if name in left and not self.parts.relation(tensor, left[name])[0]:
                raise _Differs(tensor, "left", name)
        return found, spec


@dataclass
class _First:
    """Forward of an opaque layer in the first run."""

    trial: Trial
    path: str
    layer: nn.Module
    tape: list[_Passage]
    quiet: Quiet

    def __post_init__(self) -> None:
        self.real: Callable[..., Any] = self.layer.forward
        bare = self.trial.bare
        self.bare = bare.get_submodule(self.path) if self.path else bare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.quiet.paused():
            if _cuts(self.layer):
                dim = _dim(self.layer)
                self.trial.lengths.add(args[0].shape[dim])
                args = (self.trial.parts.resized(args[0], dim), *args[1:])
            output = self._output(args, kwargs)
            self.tape.append(_Passage(tree_flatten((args, kwargs))[0], output))
            return output

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if joins(self.layer):
            return args[0]
        try:
            made = self._made(args, kwargs)
        except Exception:  # it looks at values
            return self.real(*args, **kwargs)
        if _cuts(self.layer) and _same_kind(made, args[0]):
            return args[0]
        return tree_map(_noise(args), made)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output on the meta device."""
        without = on_meta(self.bare, self.trial.values.dtype)
        moved = tree_map(_to_meta, (args, kwargs))
        try:
            return without(*moved[0], **moved[1])
        except Exception:  # a layer that takes no documents; without keywords it is raised
            if not kwargs:
                raise
            return without(*moved[0])  # documents and masks do not change shapes


@dataclass
class _Second:
    """Forward of an opaque layer in the second run."""

    trial: Trial
    layer: nn.Module
    tape: Iterator[_Passage]
    quiet: Quiet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.quiet.paused():
            return self._output(args, kwargs)

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passage = next(self.tape, None)
        if passage is None:
            raise _Differs(None)
        parts, cuts = self.trial.parts, _cuts(self.layer)
        if cuts and args[0].shape[_dim(self.layer)] != parts.part:
            args = (parts.resized(args[0], _dim(self.layer)), *args[1:])
        inputs = tree_flatten((args, kwargs))[0]
        source: tuple[Place, Tensor] | None = None
        for a, b in zip(passage.inputs, inputs, strict=False):
            good, place = parts.relation(a, b)
            if not good:
                raise _Differs(a)
            if place is not None and source is None:
                source = place, a
        if _ends(self.layer):
            return passage.output

        def chosen(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if cuts:
                dim = _dim(self.layer)
                at = dim if x.dim() > dim and x.shape[dim] == parts.whole else 0
                return parts.select(x, Place(at)) if x.shape[at] == parts.whole else x
            return x if source is None else parts.select(x, parts.like(*source, x))

        return tree_map(chosen, passage.output)


def _make_opaque(
    module: nn.Module, forward: Callable[[str, nn.Module], Callable[..., Any]], path: str = ""
) -> None:
    """Replace the forward of the outermost modules that know cp."""
    if knows_context(module) and not _is_made_of_ends(module):
        replacement: Any = forward(path, module)
        module.forward = replacement
        return
    for name, child in module.named_children():
        _make_opaque(child, forward, f"{path}.{name}" if path else name)


def _is_made_of_ends(module: nn.Module) -> bool:
    """Whether a module of this library holds splitters or joiners, which act each for itself."""
    if isinstance(module, ParallelLayer) or getattr(type(module), "exchanges_context", False):
        return False
    return any(splits(child) or joins(child) for child in module.modules())


def _cuts(layer: nn.Module) -> bool:
    """Whether an opaque layer takes whole sequences and returns a part."""
    inside = list(layer.modules())
    return splits(layer) or (any(map(splits, inside)) and not any(map(joins, inside)))


def _ends(layer: nn.Module) -> bool:
    """Whether an opaque layer takes a part of a sequence and returns the whole."""
    inside = list(layer.modules())
    return joins(layer) or (any(map(joins, inside)) and not any(map(splits, inside)))


def _dim(layer: nn.Module) -> int:
    return int(getattr(layer, "dim", 1))


def _entered(x: Tensor) -> Tensor:
    """Input as a block sees it: part of a graph, and no leaf of it."""
    return x.detach().clone().requires_grad_().clone() if x.is_floating_point() else x.clone()


def _to_meta(x: Any) -> Any:
    return x.detach().to("meta") if isinstance(x, Tensor) else x


def _same_kind(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _noise(args: Any) -> Callable[[Any], Any]:
    """Function that fills tensors on meta, on the device of the arguments."""
    given = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
    device = given[0].device if given else torch.device("cpu")

    def fill(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.is_floating_point():
            return torch.zeros(x.shape, dtype=x.dtype, device=device)
        noise = torch.randn(x.shape, device=device).to(x.dtype)
        return noise.requires_grad_().clone()

    return fill


def _left(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors with a graph in attributes of modules that are not opaque, by name."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            held = value if isinstance(value, list | tuple) else [value]
            for tensor in held:
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    yield f"{path}.{name}" if path else name, tensor
