"""Sizes of multi-head latent attention; arithmetic only, so that planning imports no torch."""

from dataclasses import dataclass

from lightning_megatron.errors import raise_if_any, whole_numbers


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of `LatentAttention`, each of one token.

    Raises:
        ConfigError: a size is no whole number in its range; lists all problems.

    >>> LatentSizes(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128).cached
    576
    """

    q_rank: int | None = None
    """Size of the latent from which queries are made; None: they are made from the stream itself,
    as in DeepSeek-V2-Lite."""
    kv_rank: int
    """Size of the latent from which keys and values are made."""
    rope_dim: int
    """Numbers of each query and key that turn with the position; even. The keys' are shared by all
    heads."""
    nope_dim: int
    """Numbers of each query and key that do not turn."""
    value_dim: int
    """Numbers of each value."""

    def __post_init__(self) -> None:
        raise_if_any(self._problems())

    @property
    def key_dim(self) -> int:
        """Numbers of each query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Numbers of a token from which all keys and values follow: the latent and shared key."""
        return self.kv_rank + self.rope_dim

    def _problems(self) -> list[str]:
        found = whole_numbers(
            1, kv_rank=self.kv_rank, nope_dim=self.nope_dim, value_dim=self.value_dim
        )
        found += whole_numbers(2, rope_dim=self.rope_dim)
        if self.q_rank is not None:
            found += whole_numbers(1, q_rank=self.q_rank)
        if not found and self.rope_dim % 2:
            found.append(
                f"rope_dim={self.rope_dim}: must be even, as its numbers turn in pairs; nearest "
                f"valid: rope_dim={self.rope_dim - 1} or {self.rope_dim + 1}"
            )
        return found
