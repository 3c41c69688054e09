"""Which blocks of a transformer are mixtures of experts, and of what sizes; arithmetic only."""

from dataclasses import dataclass, field

from lightning_megatron.errors import instances, switches, whole_numbers
from lightning_megatron.layers.experts.config import RouterConfig


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Mixtures of experts in place of the MLPs of a transformer; the defaults are Mixtral's."""

    num_experts: int = 8
    """Number of experts of every mixture, over all ranks."""
    top_k: int = 2
    """Number of experts that each token uses."""
    mlp_size: int | None = None
    """Hidden size of each expert; that of the MLPs when None."""
    shared_size: int = 0
    """Hidden size of an MLP that all tokens use beside their experts; 0: none."""
    shared_gate: bool = False
    """Whether a learned sigmoid of the token weighs that MLP (Qwen2-MoE)."""
    first_dense: int = 0
    """Number of blocks at the start that keep their MLP."""
    every: int = 1
    """Distance from one mixture to the next; the blocks between them keep their MLP."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How experts are chosen and kept in balance."""

    def is_at(self, block: int) -> bool:
        """Whether the block with this index is a mixture.

        >>> [i for i in range(8) if MixtureConfig(num_experts=4, first_dense=1, every=2).is_at(i)]
        [1, 3, 5, 7]
        """
        after = block - self.first_dense
        return after >= 0 and after % self.every == 0

    def problems(self, num_layers: int) -> list[str]:
        """Faults of the options, in a network of so many blocks."""
        prefix = "experts."
        sizes = {"num_experts": self.num_experts, "top_k": self.top_k, "every": self.every}
        if self.mlp_size is not None:
            sizes["mlp_size"] = self.mlp_size
        counts = {"shared_size": self.shared_size, "first_dense": self.first_dense}
        found = [
            *whole_numbers(1, **{f"{prefix}{name}": value for name, value in sizes.items()}),
            *whole_numbers(0, **{f"{prefix}{name}": value for name, value in counts.items()}),
            *instances(**{f"{prefix}router": (self.router, RouterConfig)}),
            *switches(**{f"{prefix}shared_gate": self.shared_gate}),
        ]
        if found:
            return found
        found += self.router.problems(self.num_experts, self.top_k)
        if self.shared_gate and not self.shared_size:
            found.append(
                f"{prefix}shared_gate=True, {prefix}shared_size=0: there is no MLP to weigh; "
                f"nearest valid: {prefix}shared_gate=False"
            )
        if self.first_dense >= num_layers:
            found.append(
                f"{prefix}first_dense={self.first_dense}, num_layers={num_layers}: no block would "
                f"be a mixture; nearest valid: {prefix}first_dense={num_layers - 1}"
            )
        return found
