"""What programs begin with: a tensor in parts, and the same in one process.

A `Subject` makes both from the same numbers, and knows which gradients one process has of what lies
behind them: of the input of the layer, and of the layer's own weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.layers.context_split import SplitContext
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.topology.mesh import Topology
from tests.fuzz.grammar import tensor
from tests.layers.context import context_topology, on_context
from tests.layers.parity import distribute, make_topology

Shape = tuple[int, ...]
Leaves = Mapping[str, Tensor]

FEATURES = 3
"""Size of the input of the layer."""
PATIENCE = timedelta(seconds=30)
"""Time after which ranks that wait for others are found to hang."""


class Subject(ABC):
    """A tensor in parts, and the same in one process."""

    shapes: tuple[Shape, ...]
    """Shapes of the tensor with which a program may begin."""
    world_size: int

    @abstractmethod
    def begin(self) -> None:
        """Form the groups of the ranks."""

    @abstractmethod
    def make(self, shape: Shape, parallel: bool, factor: float = 1.0) -> tuple[Tensor, Leaves]:
        """Return the tensor, and what it follows from, the input multiplied by ``factor``."""

    @abstractmethod
    def whole_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient of one process from those of the ranks; all call it."""


def _numbers(module: nn.Module) -> nn.Module:
    """Give all parameters numbers that follow from their shapes."""
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(tensor(*parameter.shape))
    return module


def _input(shape: Shape, factor: float) -> Tensor:
    return (tensor(*shape[:-1], FEATURES) * 0.7 * factor).requires_grad_()


def _from(module: Any, x: Tensor) -> tuple[Tensor, Leaves]:
    module.zero_grad()
    return module(x), {"input": x, **dict(module.named_parameters())}


class SplitOutput(Subject):
    """Output of a `ColumnParallelLinear` under tp."""

    shapes = ((2, 3, 4), (3, 4), (4, 6), (2, 2, 4), (1, 2, 8), (4, 2), (2, 2, 2, 4), (5, 4))

    def __init__(self, tp: int = 2) -> None:
        self.world_size = tp
        self._made: dict[tuple[int, bool], nn.Module] = {}

    @override
    def begin(self) -> None:
        self._topology = make_topology(self.world_size)
        self._made.clear()  # a worker may keep layers of another job's groups

    @override
    def make(self, shape: Shape, parallel: bool, factor: float = 1.0) -> tuple[Tensor, Leaves]:
        size = shape[-1]
        if (size, parallel) not in self._made:
            layer = _numbers(ColumnParallelLinear(FEATURES, size))
            self._made[size, parallel] = distribute(layer, self._topology) if parallel else layer
        return _from(self._made[size, parallel], _input(shape, factor))

    @override
    def whole_gradient(self, name: str, gradient: Tensor) -> Tensor:
        if name not in ("weight", "bias"):
            return gradient
        parts = [torch.empty_like(gradient) for _ in range(self.world_size)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class ContextOutput(Subject):
    """Output of a `PipelineSequential` under cp."""

    shapes = ((2, 4, 4), (2, 5, 3), (1, 2, 4), (2, 1, 3), (3, 6, 2), (2, 3, 4))

    def __init__(self, cp: int = 2) -> None:
        self.world_size = cp
        self._made: dict[tuple[int, bool], nn.Module] = {}

    @override
    def begin(self) -> None:
        self._topology: Topology = context_topology(self.world_size)
        self._made.clear()  # a worker may keep layers of another job's groups

    @override
    def make(self, shape: Shape, parallel: bool, factor: float = 1.0) -> tuple[Tensor, Leaves]:
        size = shape[-1]
        if (size, parallel) not in self._made:
            trunk = _numbers(PipelineSequential(SplitContext(), nn.Linear(FEATURES, size)))
            self._made[size, parallel] = on_context(trunk, self._topology) if parallel else trunk
        self._topology.context.begin(0, forget=True)
        return _from(self._made[size, parallel], _input(shape, factor))

    @override
    def whole_gradient(self, name: str, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self._topology.cp.group)
        return gradient / self.world_size


SUBJECTS: Mapping[str, Subject] = {"tp": SplitOutput(), "cp": ContextOutput()}
"""Subjects by names."""
