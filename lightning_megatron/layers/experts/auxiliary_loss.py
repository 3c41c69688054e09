"""Auxiliary losses for a ``training_step`` that adds them itself (``RouterConfig(inject=False)``).

Then they are part of what is logged, guarded and differentiated as the loss, and no seed is
needed. As each pipeline stage has the losses of its own layers only, this needs a process that runs
all of them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.router import Router


def auxiliary_loss(module: nn.Module) -> Tensor:
    """Sum of the auxiliary losses of a module's mixtures, of the forwards since the last call.

    Each is a mean over the sequences of its batch, with its weight, and the same on all ranks that
    hold parts of these sequences. Add it to a loss that is a mean over samples. To a sum over
    tokens, add it times their number. Outside of training it is 0.

    Args:
        module: one that holds mixtures with ``RouterConfig(inject=False)``.

    Raises:
        ConfigError: no router leaves its losses to the caller, or none has any, as its forward ran
            without gradients (under a reentrant checkpoint).

    Example:
        The loss that is logged has the auxiliary ones in it::

            loss = F.cross_entropy(self(x), y) + auxiliary_loss(self)
            self.log("train_loss", loss)
    """
    routers = [child for child in module.modules() if isinstance(child, Router)]
    asked = [router for router in routers if not router.config.inject]
    if not asked:
        raise ConfigError(
            f"auxiliary_loss({type(module).__name__}): {len(routers)} routers, none with "
            "inject=False: their losses reach the gradient by themselves; nearest valid: "
            "RouterConfig(inject=False), or no call of auxiliary_loss"
        )
    losses = [loss for router in asked for loss in _taken(router)]
    if losses:
        return torch.stack(losses).sum()
    if torch.is_grad_enabled() and any(router.gives_losses for router in asked):
        raise ConfigError(
            f"auxiliary_loss({type(module).__name__}): no mixture has run with gradients since the "
            "last call; nearest valid: call it once a step, after the forward, and give "
            "torch.utils.checkpoint use_reentrant=False"
        )
    return torch.zeros((), dtype=asked[0].weight.dtype, device=asked[0].weight.device)


def _taken(router: Router) -> Iterator[Tensor]:
    while router.kept_losses:
        yield router.kept_losses.pop(0)
