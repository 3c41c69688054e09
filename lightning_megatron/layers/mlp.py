"""Feed-forward half of a transformer block.

A column-parallel layer, an elementwise activation, a row-parallel layer: one sum in forward and one
in backward for the whole MLP. The gated forms (Shazeer, arXiv 2002.05202) have two projections of
the same input, whose collectives are shared.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parts,
)
from lightning_megatron.layers.size_checks import GATED, Activation
from lightning_megatron.topology.degrees import Degrees, divisibility_problem

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation_function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function of an activation.

    Raises:
        ConfigError: the activation is unknown.
    """
    if activation not in _FUNCTIONS:
        valid = ", ".join(_FUNCTIONS)
        raise ConfigError(f"activation={activation}: no such activation; valid: {valid}")
    return _FUNCTIONS[activation]


class MLP(nn.Module):
    """``down(f(up(x)))``, or with a gate ``down(f(gate(x)) * up(x))``.

    Input and output ``[b, s, hidden_size]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, hidden_size]``.

    Args:
        hidden_size: size of the residual stream.
        mlp_size: size of the hidden layer over all ranks.
        activation: ``swiglu`` (gated, with SiLU), ``geglu`` (gated, with GELU), ``gelu``,
            ``gelu_tanh`` (GPT-2's approximation) or ``relu``.
        bias: whether the projections have a bias.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: standard deviation of the initial ``down``; ``init_std`` when None.

    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_size: int,
        activation: Activation = "swiglu",
        *,
        bias: bool = False,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self._function = activation_function(activation)
        self.gate: ColumnParallelLinear | None = None
        if activation in GATED:
            self.gate = ColumnParallelLinear(hidden_size, mlp_size, bias, init_std=init_std)
        self.up = ColumnParallelLinear(hidden_size, mlp_size, bias, init_std=init_std)
        out_std = init_std if out_init_std is None else out_init_std
        self.down = RowParallelLinear(mlp_size, hidden_size, bias, init_std=out_std)

    def problems(self, degrees: Degrees) -> list[str]:
        """Reasons why the MLP cannot be split over ``degrees``."""
        problem = divisibility_problem("mlp_size", self.down.in_features, "tp", degrees.tp)
        return [problem] if problem else []

    def _into(self) -> Sequence[nn.Module]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Apply to every position."""
        first, *rest = column_parts(x, self._into())
        y = self._function(first)
        for factor in rest:
            y = y * factor
        out: Tensor = self.down(y)
        return out
