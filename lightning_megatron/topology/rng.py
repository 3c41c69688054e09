"""Random streams that are equal on tensor-parallel ranks, and differ only where they must.

Dropout on an activation that every tp rank holds whole must drop the *same* elements on all of
them, or the replicas drift apart; dropout on a shard (attention heads, the sequence-parallel part
of the residual stream) must drop *different* ones, or the shards are correlated (Megatron-LM, arXiv
1909.08053, section 3). PyTorch's default generator is seeded alike on all tp peers; within
`RandomStreams.sharded` it draws from a place that the tp rank and the generator's own position
decide, and afterwards goes on as if a single number had been drawn. So everything random is a
function of the default generator alone, and what saves and restores that (the recomputation of
activations by ``torch.utils.checkpoint``, wherever it is called) gets the same masks again.
Megatron-LM keeps a second stream beside it, of which only its own recomputation knows.

A stream of its own, *trunk*, is what the items of a pipeline's stage draw from, and under context
parallelism the items of every `PipelineSequential`: ranks with other parts of the same sequences
must draw other masks there, and the same numbers around it. What the user's
step draws itself comes from the default generators of PyTorch, Python and numpy, which `StepSeeds`
seeds anew for every microbatch.

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
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.devices import device_module, is_cuda


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed that depends on ``seed`` and on every one of ``names``.

    >>> derive_seed(1, "a") == derive_seed(1, "a"), derive_seed(1, "a") == derive_seed(1, "b")
    (True, False)
    """
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class RandomStream:
    """Random sequence that can replace that of PyTorch's default generator.

    Args:
        seed: seed of the sequence (see `derive_seed`).
        device: device whose default generator it replaces.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.state: Tensor = torch.Generator(device=device).manual_seed(seed).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which PyTorch's default generator draws from this stream."""
        default = default_state(self.device)
        set_default_state(self.device, self.state)
        try:
            yield
        finally:
            self.state = default_state(self.device)
            set_default_state(self.device, default)


class RandomStreams:
    """Random streams of one process, beside PyTorch's default one.

    Args:
        seed: seed of the run.
        tp_rank: position on the tp axis.
        position: coordinates that all tp peers share: the data they read, their stage.
        device: device that draws dropout masks.
    """

    def __init__(
        self, seed: int, tp_rank: int, position: tuple[int, ...], device: torch.device
    ) -> None:
        self._seeds = {"trunk": derive_seed(seed, "trunk", *position)}
        self._streams = {name: RandomStream(s, device) for name, s in self._seeds.items()}
        # Not of the run's seed, which a resumed run may lack: the generator's position is saved.
        self._sharded_seed = derive_seed(0, "sharded", tp_rank)
        self._device = device

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Context whose draws differ between tp ranks."""
        seed = self._sharded_seed ^ _advance(self._device)
        default = default_state(self._device)
        _seed_default(self._device, seed)
        try:
            yield
        finally:
            set_default_state(self._device, default)

    def trunk(self) -> AbstractContextManager[None]:
        """Context of the draws of a pipeline stage.

        Stages draw different amounts, and from streams of their own; the step around them, which
        runs on every stage, must not notice.
        """
        return self._streams["trunk"].active()

    def state_dict(self) -> dict[str, Tensor]:
        """Position of every stream, for a checkpoint."""
        return {name: stream.state.clone() for name, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Return to the positions saved by `state_dict`."""
        for name, stream in self._streams.items():
            stream.state = state[name].clone()

    def reseed(self, *names: object) -> None:
        """Restart every stream, with a seed that depends on ``names`` and its coordinates."""
        for name, stream in self._streams.items():
            self._streams[name] = RandomStream(
                derive_seed(self._seeds[name], *names), stream.device
            )


def default_state(device: torch.device) -> Tensor:
    """Position of PyTorch's default generator of a device, in host memory."""
    if is_cuda(device):
        state: Tensor = device_module(device).get_rng_state(device)
        return state
    return torch.get_rng_state()


def set_default_state(device: torch.device, state: Tensor) -> None:
    """Set the position of PyTorch's default generator of a device."""
    if is_cuda(device):
        device_module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed_default(device: torch.device, seed: int) -> None:
    if is_cuda(device):
        state = torch.tensor([seed, 0], dtype=torch.int64, device="cpu").view(torch.uint8)
        device_module(device).set_rng_state(state, device)
    else:
        torch.default_generator.manual_seed(seed)


def _advance(device: torch.device) -> int:
    """Advance the default generator by one draw; returns 63 bits that depend on its position.

    On a GPU nothing is drawn, as reading it would wait for the device: the state of its Philox
    generator is a seed and an offset, a multiple of four.
    """
    if not is_cuda(device):
        return _draw()
    seed, offset = device_module(device).get_rng_state(device).view(torch.int64).tolist()
    moved = torch.tensor([seed, offset + 4], dtype=torch.int64, device="cpu").view(torch.uint8)
    device_module(device).set_rng_state(moved, device)
    return derive_seed(seed, offset)


def _draw() -> int:
    """63 bits of PyTorch's default generator on the host."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


class StepSeeds:
    """Seeds of the host's and the device's generators for the user's step.

    Every rank of a model runs the step on the same samples and must draw the same: each pipeline
    stage adds the same noise to its copy of the batch. So the numbers that a step draws follow from
    where the generators stood before the batch, the rank among those that read other samples, and
    the microbatch. All ranks of a model agree on the first: the user's code that draws on some
    ranks only (samples that global rank 0 logs) separates nothing. Afterwards the generators are
    seeded once more, alike on all ranks, so that what is drawn between steps does not depend on how
    much a stage or rank drew within. A seed that the user sets between two steps decides both.

    Cost: some 25 microseconds a microbatch and batch, and for a model on several ranks one
    broadcast of 24 bytes a batch on the host.

    Args:
        reader: rank among those that read different samples.
        device: device whose default generator is seeded beside those of the host.
        leader: global rank whose seed counts.
        group: group of the ranks of this rank's model, for tensors on the host; None for one rank.
    """

    def __init__(
        self, reader: int, device: torch.device, leader: int, group: dist.ProcessGroup | None
    ) -> None:
        self._reader = reader
        self._device = device
        self._leader = leader
        self._group = group
        self._numbers: tuple[int, ...] = ()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context of all microbatches of a batch; collective over the ranks of the model."""
        self._numbers = (
            _draw(),
            random.getrandbits(63),
            int(numpy.random.randint(1 << 62, dtype=numpy.int64)),
        )
        if self._group is not None:
            drawn = torch.tensor(self._numbers, device="cpu")
            dist.broadcast(drawn, self._leader, group=self._group)
            self._numbers = tuple(drawn.tolist())
        try:
            yield
        finally:
            self._seed("between")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of the latest batch on some of the ranks; afterwards all draw alike again."""
        self.microbatch(0)
        try:
            yield
        finally:
            self._seed("between")

    def microbatch(self, index: int) -> None:
        """Seed the generators for the step on a microbatch."""
        self._seed("step", self._reader, index)

    def _seed(self, *names: object) -> None:
        seed = derive_seed(*self._numbers, *names)
        seed_generators(seed)
        if is_cuda(self._device):
            _seed_default(self._device, seed)


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's generator on the host."""
    torch.default_generator.manual_seed(seed >> 1)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@dataclass(frozen=True)
class HostRandomness:
    """Positions of this process' generators, apart from `RandomStreams`."""

    torch: Tensor
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> "HostRandomness":
        """Return the present positions."""
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        """Set the generators to these positions."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the positions as bytes, equally many in every process."""
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
