"""The experts of a layer as stacked weights, spread over ep."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.experts.expert_mlp import expert_mlp
from lightning_megatron.layers.gemm import GroupedGemm
from lightning_megatron.layers.linear import init_matrix
from lightning_megatron.layers.mlp import activation_function
from lightning_megatron.layers.size_checks import GATED, Activation
from lightning_megatron.topology.degrees import Degrees, nearest_divisors


class Experts(ParallelLayer):
    """MLPs of the same sizes, each of which computes its own rows.

    Each rank of ep holds ``num_experts / ep`` of them, whole: tp does not cut experts.

    Args:
        num_experts: over all ranks.
        hidden_size: size of the residual stream.
        mlp_size: size of the hidden layer of one expert.
        activation: see `MLP`.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: that of ``down``; ``init_std`` when None.

    Attributes:
        gate, up: ``[E, mlp_size, hidden_size]``; no ``gate`` where the activation has none.
        down: ``[E, hidden_size, mlp_size]``.
    """

    shard_axis = "ep"
    stacked = frozenset({"gate", "up", "down"})
    gate: nn.Parameter | None
    number: int = 0
    """Number among the layers of the module, by which ranks of ep know that they are in the same
    one."""
    gemm: Mapping[str, GroupedGemm] | None = None
    """Backends of the products by parameter; None: torch."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        mlp_size: int,
        activation: Activation = "swiglu",
        *,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.mlp_size = mlp_size
        self.activation = activation
        activation_function(activation)  # one that is unknown is refused here
        self.init_std = init_std
        self.out_init_std = init_std if out_init_std is None else out_init_std
        shape = (num_experts, mlp_size, hidden_size)
        self.register_parameter(
            "gate", nn.Parameter(torch.empty(shape)) if activation in GATED else None
        )
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, mlp_size))
        self.reset_parameters()

    @override
    def shard_dims(self) -> dict[str, int]:
        return dict.fromkeys(sorted(self.stacked), 0)

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        if self.num_experts % degrees.ep == 0:
            return []
        fitting = math.gcd(self.num_experts, degrees.pool)
        valid = " or ".join(str(d) for d in nearest_divisors(fitting, degrees.ep))
        return [
            f"num_experts={self.num_experts}, ep={degrees.ep}: every rank of ep holds as many "
            f"experts as the others; nearest valid: ep={valid}"
        ]

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill the matrix of one expert."""
        init_matrix(full, self.out_init_std if name == "down" else self.init_std, generator)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices of one expert, by parameter."""
        wide, narrow = self.mlp_size, self.hidden_size
        names = ("up",) if self.gate is None else ("gate", "up")
        return {**dict.fromkeys(names, (wide, narrow)), "down": (narrow, wide)}

    @property
    def held(self) -> int:
        """Experts of this rank."""
        return self.num_experts // (1 if self.topology is None else self.topology.ep.size)

    @property
    def gradient_factor(self) -> float:
        """Factor that makes a mean over `expert_loss` ranks the one over `loss` ranks."""
        topology = self.topology
        return 1.0 if topology is None else topology.tp.size / topology.ep.size

    @override
    def forward(self, x_nh: Tensor, counts: Sequence[int], scale_n: Tensor | None = None) -> Tensor:
        """Apply each expert that this rank holds to its rows.

        Args:
            x_nh: rows ``[n, h]``, sorted by expert; there may be none.
            counts: rows of each expert of this rank.
            scale_n: factor of each row's output, ``[n]``; 1 when None.

        Returns:
            ``[n, h]``.
        """
        names = ("up", "down") if self.gate is None else ("gate", "up", "down")
        return expert_mlp(
            x_nh,
            [getattr(self, name) for name in names],
            counts,
            self.activation,
            scale_n=scale_n,
            gradient_factor=self.gradient_factor,
            wgrad_queue=self.wgrad_queue,
            gemm=None if self.gemm is None else [self.gemm[name] for name in names],
        )
