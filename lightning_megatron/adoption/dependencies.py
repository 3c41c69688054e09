"""Which features of a linear layer's input depend on which features of other layers' outputs.

A model runs once on a small input, and the output of every linear layer is replaced by a tensor
that nothing has made. So the gradient of a later layer's input with respect to such a tensor
follows direct ways only, whatever functions of torch lie between, and is zero where an input
feature does not depend on an output feature. Sums are weighted by random numbers: those of a
softmax would else have no gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron._torch.graphs import tree_flatten, tree_map

_MOST_BLOCKS = 64
_VALUES = ("T", "mT", "H", "mH", "data", "real", "imag")
"""Attributes of a tensor that hold its values; reading others, as its shape, is no use of it."""


class Calls:
    """Facts that one run of a model has shown.

    Attributes:
        order: names of the watched modules in the order of their calls, one for each call.
        read: names of linears and embeddings whose weights are read past their calls.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.read: set[str] = set()
        self._inputs: list[tuple[str, Tensor]] = []
        self._made: list[tuple[str, Tensor]] = []
        self._outputs: list[Tensor] = []
        self._random = torch.Generator().manual_seed(0)

    def linears(self) -> list[str]:
        """Names of the linear layers, in the order of their first calls."""
        return list(dict.fromkeys(name for name, _ in self._inputs))

    def sources(self, name: str | None) -> set[str]:
        """Names of the layers on whose outputs a linear's input, or the model's output, depends.

        Args:
            name: the linear; None: the output of the model.
        """
        found: set[str] = set()
        tensors = self._outputs if name is None else [x for n, x in self._inputs if n == name]
        for x in tensors:
            gradients = self._gradients(x, 0, x.shape[-1])
            found |= {made for made, gradient in gradients if gradient.any()}
        return found

    def is_returned_by_features(self, name: str) -> bool:
        """Whether the model returns what a linear returns, each feature in its place, or a loss."""
        return all(
            self._is_of_block(x, block, 2, of=name)
            for x in self._outputs
            if x.numel() > 1
            and name in {made for made, g in self._gradients(x, 0, x.shape[-1]) if g.any()}
            for block in (0, 1)
        )

    def blocks(self, name: str) -> int:
        """Largest power of 2 of blocks of features that a linear's input is made of.

        Every block of the input depends on the same block of every output that it depends on, and
        on no other; 1 if that holds for no number of blocks.
        """
        count = 1
        while count < _MOST_BLOCKS and self._splits(name, 2 * count):
            count *= 2
        return count

    def _splits(self, name: str, count: int) -> bool:
        return all(
            self._is_of_block(x, block, count)
            for n, x in self._inputs
            if n == name
            for block in (0, count - 1)
        )

    def _is_of_block(self, x: Tensor, block: int, count: int, of: str | None = None) -> bool:
        """Whether a block of ``x`` depends on the same block only of what made it, or of ``of``."""
        size, rest = divmod(x.shape[-1], count)
        if rest:
            return False
        for made, gradient in self._gradients(x, block * size, size):
            if of not in (None, made) or not gradient.any():
                continue
            length, rest = divmod(gradient.shape[-1], count)
            others = gradient.clone()
            others[..., block * length : (block + 1) * length] = 0
            if rest or others.any():
                return False
        return True

    def _gradients(self, x: Tensor, first: int, length: int) -> Iterator[tuple[str, Tensor]]:
        """Gradients of some features of a tensor with respect to the outputs before it."""
        if not x.requires_grad:
            return
        part = x.narrow(-1, first, length)
        weights = torch.rand(part.shape, generator=self._random).add_(0.5).to(part)
        made = [tensor for _, tensor in self._made]
        total = (part * weights).sum()
        found = torch.autograd.grad(total, made, retain_graph=True, allow_unused=True)
        for (name, _), gradient in zip(self._made, found, strict=True):
            if gradient is not None:
                yield name, gradient

    def linear_called(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Note a call of a linear; returns what stands for its output."""
        self._inputs.append((name, x))
        return self.made(name, y)

    def made(self, name: str, y: Tensor) -> Tensor:
        """Return a tensor with the values of ``y`` that nothing has made."""
        fresh = y.detach().requires_grad_()
        self._made.append((name, fresh))
        return fresh.view_as(fresh)  # code may change it in place

    def returned(self, output: Any) -> None:
        """Note the output of the model."""
        self._outputs = [
            leaf if leaf.dim() else leaf.view(1)
            for leaf in tree_flatten(output)[0]
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]


def run_watched(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    linears: Iterable[str],
    opaque: Iterable[str],
    watched: Iterable[str],
    read: Iterable[str] = (),
) -> Calls:
    """Run a model once, in evaluation, and note what its layers do.

    Args:
        model: the model; its mode and its hooks are as before afterwards.
        args: its arguments.
        kwargs: its keyword arguments.
        linears: names of its linear layers.
        opaque: names of modules whose inside is not looked at.
        watched: names of modules whose calls are noted.
        read: names of modules, beside linears, of which it is noted that weights are read past
            their calls.
    """
    calls = Calls()
    names = {m: name for name, m in model.named_modules()}
    reads = _Reads(calls, {n: model.get_submodule(n) for n in (*linears, *read)})

    def called(module: nn.Module, given: Any, kwgiven: Any, output: Any) -> Any:
        name = names[module]
        calls.order.append(name)
        if name in of_linears:
            x = given[0] if given else kwgiven["input"]
            return calls.linear_called(name, x, output)
        if name in of_opaque:
            return tree_map(
                lambda y: (
                    calls.made(name, y) if isinstance(y, Tensor) and y.is_floating_point() else y
                ),
                output,
            )
        return None

    of_linears, of_opaque = set(linears), set(opaque)
    with ExitStack() as stack:
        for name in dict.fromkeys((*linears, *opaque, *watched)):
            module = model.get_submodule(name)
            handle = module.register_forward_hook(called, with_kwargs=True)
            stack.callback(handle.remove)
        for module in reads.inside:
            stack.callback(module.register_forward_pre_hook(reads.enter).remove)
            stack.callback(module.register_forward_hook(reads.leave).remove)
        stack.enter_context(_evaluating(model))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(reads)
        calls.returned(model(*args, **kwargs))
    return calls


class _Reads(TorchFunctionMode):
    """Notes functions that take a weight while its module is not called."""

    def __init__(self, calls: Calls, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._calls = calls
        self.inside = dict.fromkeys(modules.values(), 0)
        self._owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in modules.items():
            for parameter in module.parameters():
                self._owners.setdefault(id(parameter), []).append((name, module))

    def enter(self, module: nn.Module, args: Any) -> None:
        self.inside[module] += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inside[module] -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if getattr(func, "__name__", "") != "__get__" or attribute in _VALUES:
            for leaf in tree_flatten((args, kwargs or {}))[0]:
                owners = self._owners.get(id(leaf), ())
                if owners and not any(self.inside[module] for _, module in owners):
                    self._calls.read |= {name for name, _ in owners}
        return func(*args, **(kwargs or {}))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
