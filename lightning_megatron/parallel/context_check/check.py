"""Looks, at the first call of a trunk, whether its items act rightly on parts of sequences.

Under context parallelism an item of a `PipelineSequential` gets the positions of this cp rank. One
of the user's own may do as if they were all: ``x.mean(1)``, ``x[:, 0]``, ``torch.arange(len)``.
Nothing fails then, but other weights are trained than in one process. So before the trunk runs for
the first time, copies of its items are tried on a short sequence and on some of its positions
(`parallel.context_check.trial`), and one that tells the difference ends the run with its name, the
call, and the line.

All ranks try all items of the trunk, those of other pipeline stages as well, with the same result,
and without communication. It takes some milliseconds an item; items that are alike are tried once.
It is done for training and for evaluation, and anew where the trunk is called with other arguments.
An item that cannot be tried is refused, too: what nobody has looked at may train something else.
``exchanges_context = True`` in its class says that its author has.
"""

import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.devices import in_host_memory, random_numbers_kept
from lightning_megatron._torch.graphs import tree_flatten, tree_unflatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.decisions import uncounted
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.context_check.parts import Parts, Place
from lightning_megatron.parallel.context_check.stand_ins import StandIns, skeleton
from lightning_megatron.parallel.context_check.trial import Fault, Leaf, Trial
from lightning_megatron.parallel.context_problems import knows_context, splits
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import part_of

_SAMPLES = 2
"""Samples on which items are tried."""
_JOINING = "GatherContext() before it and SplitContext() after it"
_LATER = "the same outside of the PipelineSequential"
_WORD = (
    "exchanges_context = True in the class if it acts on each position by itself or exchanges what "
    "it needs"
)


@dataclass(frozen=True)
class _Reading:
    """What sizes of arguments mean; items refuse what does not fit."""

    guesses: bool
    """Whether dim 1 of the first argument is the sequence; items may make it of other dims."""
    cuts_flat: bool
    """Whether dim 1 of ``[b, n]`` with numbers is one, if it has its size; or it is features."""


_READINGS = tuple(_Reading(guesses, cuts) for guesses in (True, False) for cuts in (True, False))


@dataclass(frozen=True)
class _Item:
    """Item of a trunk before it was spread."""

    name: str
    kind: str
    bare: nn.Module | None
    """Skeleton; None if it could not be copied."""
    because: str
    """Why it could not."""


class ContextCheck:
    """Check of one trunk, which its `PipelineSequential` calls before each forward.

    Args:
        trunk: whole, not spread over ranks yet.
        name: of the trunk in the module.
        outside: modules that items may refer to.
        context: split of the sequences.
        device: where the items compute.
    """

    def __init__(
        self,
        trunk: PipelineSequential,
        name: str,
        outside: Sequence[nn.Module],
        context: Context,
        device: torch.device,
    ) -> None:
        self._trunk = trunk
        self._context = context
        self._device = device
        self._items = [
            _prepared(f"{name}.{item_name}" if name else item_name, item, outside)
            for item_name, item in zip(trunk.item_names, trunk.items(), strict=True)
        ]
        self._known: set[Any] = set()
        self._tried = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextCheck":
        """It belongs to the run."""
        return self

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Try the items, if they have not been tried on arguments of this kind.

        Raises:
            ConfigError: an item does not act rightly on parts of sequences.
        """
        if not self._context.is_active:
            return
        key = (self._trunk.training, *kwargs, *(_kind(x) for x in tree_flatten((args, kwargs))[0]))
        if key in self._known:
            return
        if not all(item.bare is not None and knows_context(item.bare) for item in self._items):
            with _undisturbed(self._device):
                self._try(args, dict(kwargs))
        self._known.add(key)

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for item, real in zip(self._items, self._trunk.items(), strict=True):
            if item.bare is not None:
                _set_modes(item.bare, real, training=self._trunk.training)
        short = _Short(self._items, args, kwargs)
        self._tried = f"{short.parts.part} of {short.parts.whole} positions"
        done: dict[Any, tuple[list[Any], Any]] = {}
        leaves, spec = short.entrance(_READINGS[0])
        for number, item in enumerate(self._items):
            if item.bare is None:
                raise self._error(item, Fault("unknown", item.because, ""))
            key = (_signature(item.bare), str(spec), *map(_kind_of_leaf, leaves))
            if key not in done:
                found = self._outcome(short, item, leaves, spec, first=number == 0)
                if isinstance(found, Fault):
                    raise self._error(item, found)
                done[key] = found
            leaves, spec = _renewed(done[key][0]), done[key][1]
        self._look_at_exit(self._items[-1], leaves)

    def _look_at_exit(self, item: _Item, leaves: list[Any]) -> None:
        """Refuse parts that nobody behind the trunk would know for parts."""
        for leaf in leaves:
            if isinstance(leaf, Leaf) and leaf.place not in (None, Place(1)):
                raise self._error(item, Fault("exit", str(leaf.place.dim), ""))

    def _outcome(
        self, short: "_Short", item: _Item, leaves: list[Any], spec: Any, *, first: bool
    ) -> tuple[list[Any], Any] | Fault:
        """Output of an item, or what is wrong with it."""
        assert item.bare is not None
        ways: list[tuple[torch.dtype | None, torch.device]] = [(short.dtype, torch.device("cpu"))]
        if not in_host_memory(self._device):
            ways.append((None, self._device))
        error: Exception | None = None
        for dtype, device in ways:
            values = StandIns(dtype, device)
            for reading in _READINGS if first else _READINGS[:2]:
                given = short.entrance(reading) if first else (leaves, spec)
                kwargs = short.keywords(reading, device)
                trial = Trial(item.bare, short.parts, values, short.lengths)
                try:
                    found = trial.run(_moved(given[0], device), given[1], kwargs)
                except Exception as caught:  # whatever a user's module raises
                    error = error or caught
                    continue
                if not reading.guesses:
                    short.guess = -1
                return found
        return Fault("unknown", f"{type(error).__name__}: {error}", "")

    def _error(self, item: _Item, fault: Fault) -> ConfigError:
        at = f" ({fault.place})" if fault.place else ""
        subject = f"cp={self._context.cp.size}: {item.name} ({item.kind})"
        if fault.kind == "left":
            text = (
                f"leaves a tensor in {fault.what} that depends on which positions a rank has; "
                f"nearest valid: {_JOINING}, {_LATER}, or cp=1"
            )
        elif fault.kind == "whole":
            text = (
                f"does not run on a part of the sequence: {fault.what}{at} "
                f"(tried with {self._tried}); nearest valid: "
                "SplitContext() on a tensor of the whole sequence that meets a part (a keyword "
                f"argument of the trunk, for one), {_JOINING}, {_LATER}, or cp=1"
            )
        elif fault.kind == "exit":
            text = (
                f"returns the sequence in dim {fault.what}, or joined with another dim, and what "
                "follows the trunk takes dim 1 of its output for the sequence; nearest valid: "
                "an output [b, s, ...], GatherContext() at the end of the trunk, or cp=1"
            )
        elif fault.kind == "unknown":
            text = (
                "could not be tried on a short sequence to see whether it mixes positions, of "
                f"which each cp rank has a part: {fault.what}; nearest valid: {_WORD}, "
                f"{_JOINING}, {_LATER}, or cp=1"
            )
        else:
            what = f"{fault.what}{at}" if fault.what else "it"
            text = (
                f"does not act on each position by itself: {what} mixes positions, or depends on "
                "their number or order, and each cp rank has a part of them; nearest valid: "
                f"{_JOINING}, ContextAttention for attention of your own, positions as a keyword "
                f"argument of the trunk and SplitContext() on them, {_LATER}, or cp=1"
            )
        return ConfigError(f"{subject} {text}")


def check_parts_of_sequences(
    module: nn.Module, trunks: Mapping[str, PipelineSequential], topology: Topology
) -> None:
    """Have the trunks of a module, which is not spread yet, check their items when called."""
    outside = list(module.modules())
    for name, trunk in trunks.items():
        trunk.check = ContextCheck(trunk, name, outside, topology.context, topology.device)


class _Short:
    """Short sequences in place of those that a trunk was called with.

    Args:
        items: of the trunk.
        args: of its call, whole.
        kwargs: of its call, whole.

    Attributes:
        guess: length of the sequence, as far as it shows before the first split; else -1.
    """

    def __init__(
        self, items: Sequence[_Item], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._args = args
        self._kwargs = kwargs
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        weights = [p for item in items if item.bare is not None for p in item.bare.parameters()]
        sizes = [size for tensor in (*given, *weights) for size in tensor.shape]
        wide = any(tensor.dtype == torch.float64 for tensor in weights)
        self.dtype = torch.float64 if wide else torch.float32
        self.parts = Parts(sizes)
        bare = (item.bare for item in items if item.bare is not None)
        self.cuts_nothing = not any(map(splits, (m for b in bare for m in b.modules())))
        self.lengths: set[int] = set()
        first = next((x for x in given if x.dim() > 1), None)
        self._batch = None if first is None else first.shape[0]
        self.guess = first.shape[1] if first is not None and first.dim() <= 3 else -1

    def entrance(self, reading: "_Reading") -> tuple[list[Any], Any]:
        """Leaves and structure of the positional arguments, which are whole in both runs."""
        leaves, spec = tree_flatten(self._args)
        found: list[Any] = []
        for given in leaves:
            x = self._made(given, reading, torch.device("cpu"))
            if self.cuts_nothing and part_of(given) is not None:  # another trunk's output
                found.append(Leaf(self.parts.resized(x, 1), Place(1)))
            else:
                found.append(Leaf(x, None) if isinstance(x, Tensor) else x)
        return found, spec

    def keywords(self, reading: "_Reading", device: torch.device) -> dict[str, Any]:
        """Keyword arguments."""
        leaves, spec = tree_flatten(self._kwargs)
        made = [self._made(x, reading, device) for x in leaves]
        found: dict[str, Any] = tree_unflatten(made, spec)
        return found

    def _made(self, x: Any, reading: "_Reading", device: torch.device) -> Any:
        if not isinstance(x, Tensor):
            return x
        # What is in parts would be gathered; its values do not matter.
        x = x.detach() if type(x) in (Tensor, nn.Parameter) else _unknown(x)
        lengths = self.lengths | {self.guess} if reading.guesses else self.lengths
        dims = list(range(x.dim()))
        if x.dim() and x.shape[0] == self._batch and (x.dim() > 1 or x.shape[0] not in lengths):
            x = x[:_SAMPLES]
            dims = dims[1:]
        cut = [d for d in dims if x.shape[d] in lengths]
        if x.is_floating_point() and x.dim() < 4:
            cut = cut[: 1 if x.dim() != 2 or reading.cuts_flat else 0]
        for dim in cut:
            x = self.parts.resized(x, dim)
        if not x.is_floating_point():
            return x.to(device)
        if not bool(x.isfinite().all()) or float(x.std()) == 0.0:
            x = torch.randn(x.shape)
        return x.to(device, self.dtype)


def _unknown(x: Tensor) -> Tensor:
    """Tensor without values, of the shape of the whole."""
    return torch.zeros((), dtype=x.dtype).expand(tuple(x.shape))


def _prepared(name: str, item: nn.Module, outside: Sequence[nn.Module]) -> _Item:
    item = getattr(item, "_orig_mod", item)  # of torch.compile
    kind = type(item).__name__
    if isinstance(item, RemoteItem):
        return _Item(name, kind, None, "another pipeline stage holds it")
    try:
        return _Item(name, kind, skeleton(item, outside), "")
    except Exception as error:  # whatever a user's module raises
        return _Item(name, kind, None, f"it cannot be copied: {error}")


def _set_modes(bare: nn.Module, real: nn.Module, *, training: bool) -> None:
    """Give a skeleton the modes of the item that it stands for, if this rank has it."""
    real = getattr(real, "_orig_mod", real)
    modes = {name: module.training for name, module in real.named_modules()}
    for path, module in bare.named_modules():
        module.training = modes.get(path, training)


def _renewed(leaves: list[Any]) -> list[Any]:
    """Tensors between items with new values, so that none is what a weight has made equal."""
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Leaf) and leaf.whole.is_floating_point():
            noise = torch.randn(leaf.whole.shape, dtype=torch.float32).to(leaf.whole)
            leaf = Leaf(noise, leaf.place)
        found.append(leaf)
    return found


def _moved(leaves: list[Any], device: torch.device) -> list[Any]:
    return [Leaf(x.whole.to(device), x.place) if isinstance(x, Leaf) else x for x in leaves]


def _kind(x: Any) -> Any:
    return (x.dtype, x.dim()) if isinstance(x, Tensor) else type(x)


def _kind_of_leaf(x: Any) -> Any:
    return (x.whole.dtype, x.whole.shape, x.place) if isinstance(x, Leaf) else repr(x)


def _signature(bare: nn.Module) -> Any:
    """What two items have in common if one need not be tried after the other."""
    return tuple(
        (
            path,
            type(module),
            module.training,
            tuple((n, p.shape, p.dtype) for n, p in module.named_parameters(recurse=False)),
            tuple((n, b.shape, b.dtype) for n, b in module.named_buffers(recurse=False)),
            tuple(
                (name, repr(value))
                for name, value in vars(module).items()
                if not name.startswith("_") or not isinstance(value, dict)
            ),
        )
        for path, module in bare.named_modules()
    )


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Context that leaves random numbers and modes of torch as they are."""
    numpy = sys.modules.get("numpy")
    state, kind = random.getstate(), torch.get_default_dtype()
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        with (
            random_numbers_kept(device),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            uncounted(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpys)
        torch.set_default_dtype(kind)
