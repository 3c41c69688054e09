"""Options of YaRN beside those that all scalings of rotary frequencies have; arithmetic only."""

from dataclasses import dataclass

from lightning_megatron.errors import at_least


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Scaling of rotary frequencies by YaRN (arXiv 2309.00071)."""

    beta_fast: float = 32.0
    """Frequencies with more turns in ``rope_original_length`` than this are kept."""
    beta_slow: float = 1.0
    """Frequencies with fewer turns than this are divided in full."""
    truncate: bool = True
    """Whether the ramp between the two begins and ends at a whole index."""
    attention_factor: float | None = None
    """Factor of rotated queries and keys; when None ``0.1 ln(rope_factor) + 1``, or what `mscale`
    says."""
    mscale: float | None = None
    """With `mscale_all_dim`: that factor is the ratio of ``0.1 w ln(rope_factor) + 1`` with these
    two for ``w``."""
    mscale_all_dim: float | None = None
    """In latent attention scores get the square of ``0.1 w ln(rope_factor) + 1`` with this ``w``
    (DeepSeek-V3)."""

    def problems(self) -> list[str]:
        """Faults of the options."""
        given = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        found = at_least(0.0, **{f"yarn.{name}": value for name, value in given.items()})
        if not found and not self.beta_slow < self.beta_fast:
            found.append(
                f"yarn.beta_fast={self.beta_fast}, yarn.beta_slow={self.beta_slow}: the second "
                "must be smaller; nearest valid: 32.0 and 1.0"
            )
        return found
