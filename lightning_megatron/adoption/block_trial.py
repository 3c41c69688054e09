"""Looks, before a block first runs on parts of sequences, whether it acts on positions one by one.

Under context parallelism attention exchanges keys and values, and all else in a block must do the
same to each position wherever it lies. A block may count positions itself (``torch.arange(s)``), or
mix neighbours. Nothing fails then, but other numbers come out than in one process. So a copy of the
block, with random weights and with attention of each position to itself only, is tried on a short
sequence and on some of its positions: on the CPU, or where that cannot run it, on the device of its
activations. No rank communicates, and blocks that are alike are tried once.

A block that cannot be tried is refused, too, as an item of a trunk is (`parallel.context_check`):
what nobody has looked at may train something else. ``exchanges_context = True`` in its class says
that its author has.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import tree_flatten, tree_map

TRIAL = "lightning_megatron_trial"
"""Name of the attention of each position to itself in the registry of transformers."""
_LENGTH = 12
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DIFFERS = (
    "computes something else of some positions than of the whole sequence, besides attention: it "
    "counts positions itself, or mixes them"
)
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}


def attention_to_itself(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Stand-in for attention that acts on each position ``[b, n, s, d]`` by itself."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    return (value + (query * key).sum(-1, keepdim=True)).transpose(1, 2), None


class BlockTrial:
    """Copy of a block that is not spread yet.

    Args:
        block: the block.
    """

    def __init__(self, block: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for p in block.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        with _without_hooks(block):
            self._copy: nn.Module | None = copy.deepcopy(block, memo)
        wide = any(p.dtype == torch.float64 for p in block.parameters())
        self._dtype = torch.float64 if wide else torch.float32
        self._fault: str | None = None

    def fault(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sized: Callable[[Any], int | None]
    ) -> str | None:
        """Find out, once, what speaks against parts of sequences; None where nothing does.

        Args:
            args: arguments of its call, whole; the first activation is the residual stream.
            kwargs: the same, by name.
            sized: function that returns the dim of the positions of an argument; None without.
        """
        if self._copy is not None:
            block, self._copy = self._copy, None
            if not getattr(type(block), "exchanges_context", False):
                self._fault = self._tried(block, args, kwargs, sized)
        return self._fault

    def _tried(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sized: Callable[[Any], int | None],
    ) -> str | None:
        for device in dict.fromkeys([torch.device("cpu"), _device_of(args, kwargs)]):
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(0)
                    filled = _filled(block, device, self._dtype)
                    differs = self._differs(filled, device, args, kwargs, sized)
            except Exception as error:
                failed = error
            else:
                return _DIFFERS if differs else None
        return (
            "could not be tried on some positions of a sequence, to see whether it acts on each by "
            f"itself ({type(failed).__name__}: {failed}); if it does, nearest valid: "
            "exchanges_context = True in its class"
        )

    def _differs(
        self,
        block: nn.Module,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sized: Callable[[Any], int | None],
    ) -> bool:
        """Whether the block does other things to some positions than to all."""
        dims: list[int | None] = []

        def short(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                dims.append(None)
                return leaf
            dim = sized(leaf)
            dims.append(dim)
            x = leaf if dim is None else leaf.narrow(dim, 0, min(_LENGTH, leaf.shape[dim]))
            if x.is_floating_point() and dims.count(None) == len(dims) - 1:  # the stream
                return torch.randn(x.shape, dtype=self._dtype).to(device)
            x = x.detach().to(device, copy=True)
            return x.to(self._dtype) if x.is_floating_point() else x

        whole = tree_map(short, (args, kwargs))
        length = next(
            leaf.shape[dim]
            for leaf, dim in zip(tree_flatten(whole)[0], dims, strict=True)
            if dim is not None
        )
        rows = torch.tensor(sorted({1 % length, length // 2, length - 1}), device=device)
        places = iter(dims)

        def some(leaf: Any) -> Any:
            dim = next(places)
            return leaf if dim is None else leaf.index_select(dim, rows)

        few = tree_map(some, whole)
        of_all, of_some = (
            next(x for x in tree_flatten(block(*given[0], **given[1]))[0] if isinstance(x, Tensor))
            for given in (whole, few)
        )
        expected = of_all.index_select(1, rows)
        tolerance = _TOLERANCES[self._dtype]
        return not torch.allclose(
            of_some, expected, rtol=tolerance, atol=tolerance * float(of_all.abs().max())
        )


def _filled(block: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Give a copy random weights, and attention of each position to itself."""
    for module in block.modules():
        for name, p in module._parameters.items():
            if p is not None:
                scale = 0.5 / max(p.shape[-1], 1) ** 0.5 + 0.02
                values = (torch.randn(p.shape, dtype=dtype) * scale).to(device)
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                real = torch.ones(buffer.shape) if buffer.is_meta else buffer
                module._buffers[name] = real.to(device, dtype if real.is_floating_point() else None)
        config: Any = getattr(module, "config", None)
        if isinstance(getattr(config, "_attn_implementation", None), str):
            config._attn_implementation = TRIAL
    return block.eval()


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return next(x.device for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor))


def signature(block: nn.Module) -> Any:
    """Hashable description of a block; equal for blocks that do the same with other weights."""
    return tuple(
        (
            name,
            type(module),
            id(vars(module).get("forward")),
            tuple(sorted((k, repr(v)) for k, v in vars(module).items() if _is_plain(k, v))),
        )
        for name, module in block.named_modules()
    )


def _is_plain(name: str, value: Any) -> bool:
    return name not in ("layer_idx", "item_index") and isinstance(value, bool | int | float | str)


@contextmanager
def _without_hooks(block: nn.Module) -> Iterator[None]:
    kept = [(m, name, getattr(m, name)) for m in block.modules() for name in _HOOKS]
    for module, name, _ in kept:
        module.__dict__[name] = OrderedDict()
    try:
        yield
    finally:
        for module, name, hooks in kept:
            module.__dict__[name] = hooks
