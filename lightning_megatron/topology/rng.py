"""Random streams that tell tensor-parallel peers apart only where they must differ.

Dropout on an activation that every tp rank holds whole must drop the *same* elements on all of
them, or the replicas drift apart; dropout on a shard (attention heads, the sequence-parallel part
of the residual stream) must drop *different* ones, or the shards are correlated. So a process has
two streams: PyTorch's default generator, seeded alike on all tp peers, and a *sharded* stream,
seeded per tp rank, which `RandomStreams.sharded` swaps in (Megatron-LM, arXiv 1909.08053,
section 3, keeps the same two).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed that depends on ``seed`` and on every one of ``names``.

    >>> derive_seed(1, "a") == derive_seed(1, "a"), derive_seed(1, "a") == derive_seed(1, "b")
    (True, False)
    """
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class RandomStreams:
    """The sharded random stream of one process.

    Args:
        seed: the run's seed.
        position: coordinates that must have a stream of their own: tp rank, batch rank, stage.
        device: where dropout masks are drawn.
    """

    def __init__(self, seed: int, position: tuple[int, ...], device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device=device)
        generator.manual_seed(derive_seed(seed, "sharded", *position))
        self._state: Tensor = generator.get_state()

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Within the block PyTorch's default generator draws from the sharded stream."""
        default = self._default_state()
        self._set_default_state(self._state)
        try:
            yield
        finally:
            self._state = self._default_state()
            self._set_default_state(default)

    def state_dict(self) -> dict[str, Tensor]:
        """The stream's position, for a checkpoint."""
        return {"sharded": self._state.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Return to a position saved by `state_dict`."""
        self._state = state["sharded"].clone()

    def _default_state(self) -> Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_default_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
