"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675).

The update is the *sign* of an average of gradient and momentum, so every element moves by the
learning rate, and there is one state tensor where AdamW has two::

    update   = sign(beta1 * m + (1 - beta1) * g)
    p       -= lr * (update + weight_decay * p)
    m        = beta2 * m + (1 - beta2) * g

Learning rates are 3 to 10 times smaller than AdamW's, and weight decay as much larger. The
optimizer is element-wise, so it steps on shards of any kind. The momentum takes 4 bytes an element,
with ``state_dtype`` 2 or about 1 (`optim.quantized_state`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.kernels import (
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sub_signs_,
)
from lightning_megatron.errors import at_least, below_one, raise_if_any
from lightning_megatron.optim.quantized_state import (
    QuantizedStateOptimizer,
    StateFormat,
    state_dtype_problems,
)


class Lion(QuantizedStateOptimizer):
    """Optimizer whose update is the sign of the momentum, with decoupled weight decay.

    Args:
        params: parameters or groups of them.
        lr: distance that every element moves in a step.
        betas: weight of the momentum in the update, and of the old momentum in the new.
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves in a step.
        state_dtype: number format of the momentum between steps; None: that of the parameters.

    Raises:
        ConfigError: an option is out of range.
    """

    averages = {"exp_avg": True}
    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state_dtype: StateFormat | None = None,
    ) -> None:
        raise_if_any(
            at_least(0.0, lr=lr, weight_decay=weight_decay)
            + below_one(**{"betas[0]": betas[0], "betas[1]": betas[1]})
            + state_dtype_problems(state_dtype)
        )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.set_state_dtype(state_dtype, "state_dtype=None")

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            members: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    members.setdefault((p.device, p.dtype), []).append(p)
            for params in members.values():
                if self._format is None:
                    self._step(params, group)
                else:
                    self._step_quantized(params, group)
        return loss

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        gradients = [p.grad for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
        momenta = [self.state[p]["exp_avg"] for p in params]
        if group["weight_decay"]:
            foreach_mul_(params, 1 - lr * group["weight_decay"])
        foreach_sub_signs_(params, foreach_lerp(momenta, gradients, 1 - beta1), lr)
        foreach_lerp_(momenta, gradients, 1 - beta2)

    def _step_quantized(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for p in params:
            assert p.grad is not None
            gradient, (_, averages) = p.grad.float(), self.begin_update(p, self.averages)
            momentum = averages["exp_avg"]
            p.mul_(1 - lr * group["weight_decay"])
            p.sub_(momentum.lerp(gradient, 1 - beta1).sign_().to(p.dtype), alpha=lr)
            momentum.lerp_(gradient, 1 - beta2)
            self.end_update(p, averages)
