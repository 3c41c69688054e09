"""Auxiliary losses that reach the gradient without a line in ``training_step``.

`inject` is the identity in forward. In backward it passes the gradient on and starts the gradient
of the auxiliary losses with seeds that the run knows (`topology.auxiliary_seeds`).
"""

import weakref
from typing import Any

from torch import Tensor
from torch.autograd import Function

from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.auxiliary_seeds import AuxiliarySeeds


def inject(
    y: Tensor, loss_b: Tensor, tokens_b: Tensor, parts: int, seeds: AuxiliarySeeds | None
) -> Tensor:
    """Return ``y``, with the gradient of auxiliary losses behind it.

    Args:
        y: tensor on which the main loss depends.
        loss_b: auxiliary loss of each sequence, ``[b]``.
        tokens_b: number of tokens of each whole sequence that count, ``[b]``.
        parts: number of cp parts of the sequences.
        seeds: those of the run; None in a process alone: their mean over sequences then counts.
    """
    seeds = AuxiliarySeeds() if seeds is None else seeds
    result: Tensor = _Inject.apply(y, loss_b, tokens_b, parts, seeds)  # type: ignore[no-untyped-call]
    return result


def keep(y: Tensor, loss_b: Tensor, parts: int, kept: list[Tensor]) -> Tensor:
    """Return ``y``, and keep the mean of auxiliary losses for a step that adds them itself.

    Args:
        y: tensor on which the main loss depends; its backward raises an error if the mean is still
            there, as nobody has added it.
        loss_b: auxiliary loss of each sequence, ``[b]``.
        parts: number of cp parts of the sequences, each of which has a part of the gradient.
        kept: where the mean is kept.
    """
    mean = loss_b.mean()
    mean = mean * parts - mean.detach() * (parts - 1)
    kept.append(mean)
    result: Tensor = _Guard.apply(y, kept, weakref.ref(mean))  # type: ignore[no-untyped-call]
    return result


class _Guard(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, kept: list[Tensor], mean: weakref.ref[Tensor]) -> Tensor:
        ctx.kept, ctx.mean = kept, mean
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if any(one is ctx.mean() for one in ctx.kept):
            ctx.kept.clear()
            raise ConfigError(
                "router.inject=False: backward has begun, and nobody has asked for the auxiliary "
                "losses; nearest valid: loss + auxiliary_loss(self) in training_step, or "
                "inject=True, or balance='none' without z_loss"
            )
        return grad, None, None


class _Inject(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, loss_b: Tensor, tokens_b: Tensor, parts: int, seeds: AuxiliarySeeds
    ) -> Tensor:
        ctx.save_for_backward(tokens_b)
        ctx.parts, ctx.seeds, ctx.dtype = parts, seeds, loss_b.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (tokens_b,) = ctx.saved_tensors
        return grad, ctx.seeds.factors(tokens_b, ctx.parts).to(ctx.dtype), None, None, None
