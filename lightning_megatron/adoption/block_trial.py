"""Looks, before a block first runs on parts of sequences, whether it acts on positions one by one.

Under context parallelism attention exchanges keys and values, and all else in a block must do the
same to each position wherever it lies. A block may count positions itself (``torch.arange(s)``), or
mix neighbours. Nothing fails then, but other numbers come out than in one process. So a copy of the
block, with random weights and with attention of each position to itself only, is tried on a short
sequence and on some of its positions. No rank communicates, and blocks that are alike are tried
once.
"""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch import tree_flatten, tree_map

logger = logging.getLogger(__name__)

TRIAL = "lightning_megatron_trial"
"""Name of the attention of each position to itself in the registry of transformers."""
_LENGTH = 12
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
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

    def differs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sized: Callable[[Any], int | None]
    ) -> bool:
        """Whether the block does other things to some positions than to all; False when known.

        Args:
            args: arguments of its call, whole; the first activation is the residual stream.
            kwargs: the same, by name.
            sized: function that returns the dim of the positions of an argument; None without.
        """
        block, self._copy = self._copy, None
        if block is None:
            return False
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return self._try(self._filled(block), args, kwargs, sized)
        except Exception as error:
            logger.warning(
                "cp > 1: a copy of %s could not be tried on some positions of a sequence (%s: %s); "
                "whether it acts on each position by itself is not known",
                type(block).__name__,
                type(error).__name__,
                error,
            )
            return False

    def _try(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sized: Callable[[Any], int | None],
    ) -> bool:
        dims: list[int | None] = []

        def short(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                dims.append(None)
                return leaf
            dim = sized(leaf)
            dims.append(dim)
            x = leaf if dim is None else leaf.narrow(dim, 0, min(_LENGTH, leaf.shape[dim]))
            if x.is_floating_point() and dims.count(None) == len(dims) - 1:  # the stream
                return torch.randn(x.shape, dtype=self._dtype)
            x = x.detach().to("cpu", copy=True)
            return x.to(self._dtype) if x.is_floating_point() else x

        whole = tree_map(short, (args, kwargs))
        length = next(
            leaf.shape[dim]
            for leaf, dim in zip(tree_flatten(whole)[0], dims, strict=True)
            if dim is not None
        )
        rows = torch.tensor(sorted({1 % length, length // 2, length - 1}))
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

    def _filled(self, block: nn.Module) -> nn.Module:
        """Give the copy random weights on the CPU, and attention of each position to itself."""
        for module in block.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    scale = 0.5 / max(p.shape[-1], 1) ** 0.5 + 0.02
                    values = torch.randn(p.shape, dtype=self._dtype) * scale
                    module._parameters[name] = nn.Parameter(values, requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    real = torch.ones(buffer.shape) if buffer.is_meta else buffer.cpu()
                    floats = real.is_floating_point()
                    module._buffers[name] = real.to(self._dtype) if floats else real
            config: Any = getattr(module, "config", None)
            if isinstance(getattr(config, "_attn_implementation", None), str):
                config._attn_implementation = TRIAL
        return block.eval()


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
