"""Adafactor (Shazeer and Stern, arXiv 1804.04235): second moments by rows and columns.

Instead of a second moment for every element, a matrix has the mean squares of its rows and of its
columns: ``m + n`` numbers instead of ``m * n``. Their product, divided by the mean of all,
estimates the moment. The step is relative to the root mean square (RMS) of the parameter, and an
update whose RMS exceeds ``d`` is scaled down. Options, state and numbers are those of
``torch.optim.Adafactor``, and a run can resume from its checkpoints.

Means run over whole rows and columns, RMS over whole tensors. Under tp and ZeRO each rank adds up
its part, and all-reduces complete the sums (not the matrices): three rounds a step, with
``m + n + 2`` numbers for each matrix. A rank keeps the row means of its rows and the column means
of its columns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import at_least, raise_if_any
from lightning_megatron.optim.shard_spec import PartialSum, ShardSpec, reduce_sums, unsharded


class Adafactor(Optimizer):
    """Optimizer as adaptive as AdamW, with two vectors of state for each matrix.

    Args:
        params: parameters or groups of them.
        lr: largest relative step; the actual one is ``min(lr, 1 / sqrt(step))`` times the RMS of
            the parameter.
        beta2_decay: exponent of the second moments' decay rate ``1 - step ** beta2_decay``.
        eps: least root of a second moment (by default the dtype's epsilon), and least RMS of a
            parameter that steps are relative to.
        d: largest RMS of an update.
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves in a step.

    Attributes:
        reduced_state: dimension (from the end) in which a state tensor has size 1, for checkpoints.

    Raises:
        ConfigError: a number is out of range.
    """

    reduced_state: Mapping[str, int] = {"row_var": -1, "col_var": -2}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        problems = at_least(0.0, lr=lr, weight_decay=weight_decay, **{"eps[1]": eps[1]})
        problems += at_least(1.0, d=d)
        if beta2_decay > 0:
            problems.append(
                f"beta2_decay={beta2_decay}: must not be positive; nearest valid: beta2_decay=-0.8"
            )
        raise_if_any(problems)
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": eps,
                "d": d,
                "weight_decay": weight_decay,
            },
        )
        self._specs: Mapping[Tensor, ShardSpec] = {}

    def set_shard_specs(self, specs: Mapping[Tensor, ShardSpec]) -> None:
        """Store how the parameters are sharded (`optim.shard_spec.ShardAware`)."""
        self._specs = specs

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients; collective over ranks that share them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            updates = [
                _Update(p, self._specs.get(p) or unsharded(p), self.state[p], group)
                for p in group["params"]
                if p.grad is not None
            ]
            reduce_sums([s for update in updates for s in update.first_sums()])
            reduce_sums([s for update in updates for s in update.row_sums()])
            reduce_sums([update.update_sum() for update in updates])
            for update in updates:
                update.apply()
        return loss


class _Update:
    """One parameter's part of a step, between whose parts sums are completed."""

    def __init__(
        self, p: Tensor, spec: ShardSpec, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        assert p.grad is not None
        self._p = p
        self._gradient = p.grad
        self._shard_spec = spec
        self._state = state
        self._group = group
        self._factored = p.ndim > 1
        if not state:
            state["step"] = torch.zeros(())
            if self._factored:
                state["row_var"] = p.new_zeros((*p.shape[:-1], 1))
                state["col_var"] = p.new_zeros((*p.shape[:-2], 1, p.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(p)
        state["step"] += 1
        self._time = float(state["step"])
        eps = group["eps"][0]
        self._eps: float = torch.finfo(p.dtype).eps if eps is None else eps

    def first_sums(self) -> list[PartialSum]:
        """Squares of the parameter; of the gradient by row and column."""
        spec = self._shard_spec
        self._size = PartialSum(value=self._p.square().sum(), spec=spec)
        if not self._factored:
            return [self._size]
        squares, last = self._gradient.square(), self._p.ndim - 1
        self._rows = PartialSum(value=squares.sum(-1, keepdim=True), spec=spec, dims=(last,))
        self._columns = PartialSum(value=squares.sum(-2, keepdim=True), spec=spec, dims=(last - 1,))
        return [self._size, self._rows, self._columns]

    def row_sums(self) -> list[PartialSum]:
        """Sums of the row means, over the rows."""
        weight = self._time ** self._group["beta2_decay"]
        if not self._factored:
            self._state["variance"].lerp_(self._gradient.square(), weight)
            return []
        *_, rows, columns = self._shard_spec.full_shape
        self._state["row_var"].lerp_(self._rows.value / columns, weight)
        self._state["col_var"].lerp_(self._columns.value / rows, weight)
        total = self._state["row_var"].sum(-2, keepdim=True)
        self._total = PartialSum(value=total, spec=self._shard_spec, dims=(self._p.ndim - 2,))
        return [self._total]

    def update_sum(self) -> PartialSum:
        """Squares of the update."""
        if self._factored:
            moment = self._state["row_var"] * self._state["col_var"]
            mean = self._total.value / self._shard_spec.full_shape[-2]
            moment.div_(mean.clamp_(min=self._eps))
        else:
            moment = self._state["variance"].clone()
        self._update = moment.clamp_(min=self._eps**2).rsqrt_().mul_(self._gradient)
        self._change = PartialSum(value=self._update.square().sum(), spec=self._shard_spec)
        return self._change

    def apply(self) -> None:
        """Move the parameter."""
        group, numel = self._group, max(self._shard_spec.numel, 1)
        lr = float(group["lr"])
        if group["weight_decay"]:
            self._p.mul_(1 - lr * group["weight_decay"])
        relative = min(lr, self._time**-0.5)
        step = (self._size.value / numel).sqrt().clamp(min=group["eps"][1]) * relative
        excess = (self._change.value / numel).sqrt().div(group["d"]).clamp(min=1.0)
        self._p.sub_(self._update.mul_((step / excess).to(self._p.dtype)))
