"""Random streams that tell tensor-parallel peers apart only where they must differ.

Dropout on an activation that every tp rank holds whole must drop the *same* elements on all of
them, or the replicas drift apart; dropout on a shard (attention heads, the sequence-parallel part
of the residual stream) must drop *different* ones, or the shards are correlated (Megatron-LM, arXiv
1909.08053, section 3). PyTorch's default generator is seeded alike on all tp peers; within
`RandomStreams.sharded` it draws from a place that the tp rank and the generator's own position
decide, and afterwards goes on as if a single number had been drawn. So everything random is a
function of the default generator alone, and what saves and restores that (the recomputation of
activations by ``torch.utils.checkpoint``, wherever it is called) gets the same masks again.
Megatron-LM keeps a second stream beside it, of which only its own recomputation knows.

A stream of its own, *step*, keeps computation from disturbing the order of the data.

`HostRandomness` is the position of the generators that every process has: torch's, Python's and
numpy's.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
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
        default = _default_state(self.device)
        _set_default_state(self.device, self.state)
        try:
            yield
        finally:
            self.state = _default_state(self.device)
            _set_default_state(self.device, default)


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
        self._seeds = {"step": derive_seed(seed, "step", *position)}
        self._streams = {name: RandomStream(s, device) for name, s in self._seeds.items()}
        # Not of the run's seed, which a resumed run may lack: the generator's position is saved.
        self._sharded_seed = derive_seed(0, "sharded", tp_rank)
        self._device = device

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Draw what differs between tp peers, within the block."""
        seed = self._sharded_seed ^ _advance(self._device)
        default = _default_state(self._device)
        _seed_default(self._device, seed)
        try:
            yield
        finally:
            _set_default_state(self._device, default)

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

    def reseed(self, *names: object) -> None:
        """Begin every stream anew, at a place that ``names`` and its coordinates decide."""
        for name, stream in self._streams.items():
            self._streams[name] = RandomStream(
                derive_seed(self._seeds[name], *names), stream.device
            )


def _default_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_default_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed_default(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        state = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8)
        torch.cuda.set_rng_state(state, device)
    else:
        torch.default_generator.manual_seed(seed)


def _advance(device: torch.device) -> int:
    """Go one draw on in the default generator; a 63-bit number that its position decides.

    On a GPU nothing is drawn, as reading it would wait for the device: the state of its Philox
    generator is a seed and an offset, a multiple of four.
    """
    if device.type != "cuda":
        return int(torch.empty((), dtype=torch.int64).random_())
    seed, offset = torch.cuda.get_rng_state(device).view(torch.int64).tolist()
    moved = torch.tensor([seed, offset + 4], dtype=torch.int64).view(torch.uint8)
    torch.cuda.set_rng_state(moved, device)
    return derive_seed(seed, offset)


@dataclass(frozen=True)
class HostRandomness:
    """Where the generators of this process stand, apart from `RandomStreams`."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> "HostRandomness":
        """The present position."""
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        """Return to this position."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def to_tensors(self) -> dict[str, Tensor]:
        """The same as bytes, of equal number in every process."""
        version, words, gauss = self.python
        _, keys, position, has_gauss, cached = self.numpy
        return {
            "torch": self.torch.clone(),
            "python": _bytes(numpy.array([version, *words], dtype="<u4")),
            "python gauss": _bytes(numpy.array([float("nan") if gauss is None else gauss])),
            "numpy": _bytes(numpy.array([*keys, position, has_gauss], dtype="<u4")),
            "numpy gauss": _bytes(numpy.array([cached])),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "HostRandomness":
        """Reverse `to_tensors`."""
        version, *words = tensors["python"].numpy().view("<u4").tolist()
        gauss = float(tensors["python gauss"].numpy().view("f8")[0])
        keys = tensors["numpy"].numpy().view("<u4")
        cached = float(tensors["numpy gauss"].numpy().view("f8")[0])
        return cls(
            tensors["torch"].clone(),
            (version, tuple(words), None if gauss != gauss else gauss),
            ("MT19937", keys[:-2].copy(), int(keys[-2]), int(keys[-1]), cached),
        )


def _bytes(array: Any) -> Tensor:
    return torch.from_numpy(array.view(numpy.uint8).copy())
