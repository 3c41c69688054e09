"""AdamW whose moments are stored in 4, 2 or 1 bytes an element.

The numbers of a step are those of ``torch.optim.AdamW`` (arXiv 1711.05101), computed in float32;
between steps both moments rest in ``state_dtype`` (`optim.narrow`). In int8 what is stored of the
second moment is its root, which halves the range that the table must span.

=============  ============================  ==============================
state_dtype    bytes of state per parameter  against 8 bytes (float32)
=============  ============================  ==============================
``float32``    8                             1
``bfloat16``   4                             0.5
``int8``       2 + 8 / 256 = 2.03            0.25
=============  ============================  ==============================

Element-wise, so that it steps on shards; the blocks of int8 are those of the shard, so in int8 a
run depends on the layout, within the rounding of the format. For float32 alone, torch's own fused
AdamW is faster.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.optim.narrow import Narrow, StateFormat, generator_for, narrow
from lightning_megatron.optim.pieces import Piece
from lightning_megatron.problems import at_least, below_one

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW(Optimizer):
    """AdamW with narrow state.

    Args:
        params: parameters or groups of them, in float32 or narrower.
        lr: learning rate.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: times ``lr``, by how much of themselves weights shrink in a step.
        state_dtype: format of the moments between steps.

    Raises:
        ConfigError: an option is out of range.
    """

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
        if state_dtype not in get_args(StateFormat):
            problems.append(
                f"state_dtype={state_dtype!r}: must be one of {get_args(StateFormat)}; "
                "nearest valid: 'bfloat16'"
            )
        raise_if_any(problems)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._format: StateFormat = state_dtype
        self._names: Mapping[Tensor, str] = {}
        if any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"]):
            raise ConfigError(
                "AdamW(state_dtype=...) computes in float32, but parameters are in float64; "
                "nearest valid: torch.optim.AdamW"
            )

    def use_pieces(self, pieces: Mapping[Tensor, Piece]) -> None:
        """Learn the parameters' names (`optim.pieces.KnowsPieces`)."""
        self._names = {p: piece.name for p, piece in pieces.items()}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        place = 0
        for group in self.param_groups:
            for p in group["params"]:
                place += 1
                if p.grad is not None:
                    self._step(p, p.grad.float(), group, self._names.get(p, str(place)))
        return loss

    def _step(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any], name: str) -> None:
        state, (beta1, beta2), lr = self.state[p], group["betas"], float(group["lr"])
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update({"step": torch.zeros(()), **self._stored(zeros, zeros, None)})
        state["step"] += 1
        time = int(state["step"])
        mean, square = self._moments(state)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**time)).sqrt_().add_(group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.add_((mean / root).to(p.dtype), alpha=-lr / (1 - beta1**time))
        state.update(self._stored(mean, square, generator_for(name, time, p.device)))

    def _moments(self, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        mean, square = (
            Narrow(state[key], state.get(f"{key}_scale"), signed).wide()
            for key, signed in _SIGNED.items()
        )
        return mean, square.square_() if self._format == "int8" else square

    def _stored(
        self, mean: Tensor, square: Tensor, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        if self._format == "float32":
            return {"exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
        root = square.sqrt() if self._format == "int8" else square
        stored = {}
        for (key, signed), values in zip(_SIGNED.items(), (mean, root), strict=True):
            kept = narrow(values, self._format, signed=signed, generator=generator)
            stored[key] = kept.codes
            if kept.scales is not None:
                stored[f"{key}_scale"] = kept.scales
        return stored

    def wide_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter as checkpoints hold it: that of torch's AdamW, in float32."""
        mean, square = self._moments(state)
        return {"step": state["step"], "exp_avg": mean, "exp_avg_sq": square}

    def narrow_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What `wide_state` gave, or torch's AdamW has, in this optimizer's format."""
        mean, square = state["exp_avg"].float(), state["exp_avg_sq"].float()
        return {"step": state["step"], **self._stored(mean, square, None)}
