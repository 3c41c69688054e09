"""Random streams that tell tensor-parallel peers apart only where they must differ.

Dropout on an activation that every tp rank holds whole must drop the *same* elements on all of
them, or the replicas drift apart; dropout on a shard (attention heads, the sequence-parallel part
of the residual stream) must drop *different* ones, or the shards are correlated. So a process has
PyTorch's default generator, seeded alike on all tp peers, and a *sharded* stream, seeded per tp
rank, which `RandomStreams.sharded` swaps in (Megatron-LM, arXiv 1909.08053, section 3, does the
same). A third one, *step*, keeps computation from disturbing the order of the data.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed that depends on ``seed`` and on every one of ``names``.

    >>> derive_seed(1, "a") == derive_seed(1, "a"), derive_seed(1, "a") == derive_seed(1, "b")
    (True, False)
    """
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class RandomStream:
    """A random sequence that can stand in for PyTorch's default generator.

    Args:
        seed: where the sequence starts (see `derive_seed`).
        device: whose default generator it replaces.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.state: Tensor = torch.Generator(device=device).manual_seed(seed).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block PyTorch's default generator draws from this stream."""
        default = self._default_state()
        self._set_default_state(self.state)
        try:
            yield
        finally:
            self.state = self._default_state()
            self._set_default_state(default)

    def _default_state(self) -> Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_default_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


class RandomStreams:
    """The random streams of one process, beside PyTorch's default one.

    Args:
        seed: the run's seed.
        tp_rank: position on the tp axis.
        position: coordinates that all tp peers share: the data they read, their stage.
        device: where dropout masks are drawn.
    """

    def __init__(
        self, seed: int, tp_rank: int, position: tuple[int, ...], device: torch.device
    ) -> None:
        self._streams = {
            "sharded": RandomStream(derive_seed(seed, "sharded", tp_rank, *position), device),
            "step": RandomStream(derive_seed(seed, "step", *position), device),
        }

    def sharded(self) -> AbstractContextManager[None]:
        """Draw from a stream that differs between tp peers, within the block."""
        return self._streams["sharded"].active()

    def step(self) -> AbstractContextManager[None]:
        """Draw from a stream for computation, within the block.

        Pipeline stages draw different amounts; data loading, which draws from the default
        generator, must not notice, because all stages read the same batches.
        """
        return self._streams["step"].active()

    def state_dict(self) -> dict[str, Tensor]:
        """Position of every stream, for a checkpoint."""
        return {name: stream.state.clone() for name, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Return to the positions saved by `state_dict`."""
        for name, stream in self._streams.items():
            stream.state = state[name].clone()
