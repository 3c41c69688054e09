"""AdamW whose moments are stored in 4, 2 or 1 bytes an element.

The numbers of a step are those of ``torch.optim.AdamW`` (arXiv 1711.05101), computed in float32;
between steps both moments are kept in ``state_dtype`` (`optim.quantized_state`).

=============  ============================  ==============================
state_dtype    bytes of state per parameter  against 8 bytes (float32)
=============  ============================  ==============================
``float32``    8                             1
``bfloat16``   4                             0.5
``int8``       2 + 8 / 256 = 2.03            0.25
=============  ============================  ==============================

The optimizer is element-wise, so it steps on shards. The blocks of int8 are those of the shard, so
an int8 run depends on the layout, within the rounding of the format. With float32 state, torch's
own fused AdamW is faster.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import at_least, below_one, raise_if_any
from lightning_megatron.optim.quantized_state import (
    QuantizedStateOptimizer,
    StateFormat,
    state_dtype_problems,
)

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of both moments, and whether they have a sign."""


def adamw_step(
    p: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], time: int, group: Mapping[str, Any]
) -> None:
    """Update one parameter.

    Args:
        p: parameter, in any format.
        gradient: its gradient, in float32.
        moments: `MOMENTS` in float32; changed in place.
        time: number of the step, from 1.
        group: parameter group with ``lr``, ``betas``, ``eps``, ``weight_decay``.
    """
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    mean, square = (moments[key] for key in MOMENTS)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**time)).sqrt_().add_(group["eps"])
    p.mul_(1 - lr * group["weight_decay"])
    p.add_((mean / root).to(p.dtype), alpha=-lr / (1 - beta1**time))


class AdamW(QuantizedStateOptimizer):
    """AdamW with quantized state.

    Args:
        params: parameters or groups of them, in float32 or narrower.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: number added to the root of the second moment.
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves in a step.
        state_dtype: number format of the moments between steps.

    Raises:
        ConfigError: an option is out of range.
    """

    averages = MOMENTS

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: StateFormat = "int8",
    ) -> None:
        problems = at_least(0.0, lr=lr, eps=eps, weight_decay=weight_decay)
        problems += below_one(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        problems += state_dtype_problems(str(state_dtype))
        raise_if_any(problems)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.set_state_dtype(state_dtype, "torch.optim.AdamW")

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    time, moments = self.begin_update(p, MOMENTS)
                    adamw_step(p, p.grad.float(), moments, time, group)
                    self.end_update(p, moments)
        return loss
