"""Update of the routers' biases, which keeps experts in balance without a loss.

After an optimizer step the bias of an expert that fewer tokens chose than the mean rises by a fixed
step, and that of one with more falls (Wang et al., arXiv 2408.15664)::

    bias_e += u * sign(mean(count) - count_e)

The counts are those of all tokens since the last step: of all microbatches, accumulated batches and
ranks. They are whole numbers, so their sum is exact, and the biases are the same to the bit under
every layout.

``MegatronStrategy`` does it after the steps of the optimizer that holds the router's weight
(`strategy.router_bias`). Without it, `follow_steps` has the optimizer tell.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_megatron.layers.experts.config import RouterConfig

_FOLLOWS = "_follows_steps"
"""Attribute of a router that holds its identity once it follows; copies of it do not."""


class Biased(Protocol):
    """A router, as far as its bias goes."""

    num_experts: int
    config: RouterConfig
    weight: nn.Parameter
    bias: Tensor | None
    step_counts_e: Tensor | None
    topology: Any


def update_biases(
    routers: Sequence[Biased], total: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Update the biases by the counts since the last update, and begin to count anew.

    Args:
        routers: those with a bias.
        total: sum of counts, ``[n]`` float64, over ranks; None for a process alone.
    """
    if not routers:
        return
    counts = torch.cat([_counts(router) for router in routers])
    if total is not None:
        counts = total(counts)
    parts = torch.split(counts, [router.num_experts for router in routers])
    with torch.no_grad():
        for router, counts_e in zip(routers, parts, strict=True):
            assert router.bias is not None
            # Whole numbers: nothing is rounded.
            side = (counts_e.sum() - counts_e * router.num_experts).sign()
            router.bias.add_((side * router.config.bias_update).to(router.bias.dtype))
    forget_counts(routers)


def forget_counts(routers: Sequence[Biased]) -> None:
    """Forget what was counted since the last update."""
    for router in routers:
        router.step_counts_e = None


def follow_steps(router: Biased) -> None:
    """Update the bias after each step of an optimizer of this process that holds the weight.

    Nothing happens while a strategy of ours runs the router, which does it itself.
    """
    if router.__dict__.get(_FOLLOWS) == id(router):
        return
    router.__dict__[_FOLLOWS] = id(router)
    found = weakref.ref(router)

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        followed = found()
        if followed is None or followed.topology is not None or followed.step_counts_e is None:
            return
        if any(p is followed.weight for group in optimizer.param_groups for p in group["params"]):
            update_biases([followed])

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(router, handle.remove).atexit = False


def _counts(router: Biased) -> Tensor:
    assert router.bias is not None
    if router.step_counts_e is None:
        return torch.zeros(router.num_experts, dtype=torch.float64, device=router.bias.device)
    return router.step_counts_e.to(router.bias.device, torch.float64)
