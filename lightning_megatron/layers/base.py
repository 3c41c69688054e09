"""Base of parallel layers, and what it tells the rest of the library about their parameters.

A parallel layer is built with *global* sizes and behaves like the plain layer of the same name. The
strategy then calls `ParallelLayer.distribute`, which replaces each partitioned parameter by this tp
rank's slice: a plain local tensor, so that the forward pass pays nothing for being parallel
(``DTensor.to_local`` costs about 70 microseconds of autograd per parameter and step). A
`TensorShard` beside the slice describes its place in the full parameter; checkpoints, the gradient
norm and initialisation read it. ZeRO then shards the slice over the data-parallel axis like any
parameter.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.segments import Segments
from lightning_megatron.topology.tensor_shard import TensorShard
from lightning_megatron.whole.memory import mark_forward


class ParallelLayer(nn.Module):
    """Base of layers whose parameters are partitioned over the tp axis.

    Subclasses create full parameters in ``__init__`` and override `shard_dims` and, where the
    default (``reset_parameters`` semantics) does not fit, `init_parameter`.

    Attributes:
        topology: topology of the run; None until `distribute`.
        in_trunk: whether a `PipelineSequential` holds the layer: inside of one cp splits sequences.
        trunk_context: split of the sequences in that `PipelineSequential`; None for the one of the
            whole run.
        splits_context: whether the layer takes whole sequences and returns this cp rank's part.
        joins_context: whether it takes this cp rank's part and returns whole sequences.
        shard_axis: axis over which the parameters are divided.
        stacked: names of parameters that are stacks of independent matrices along dim 0;
            `init_parameter` fills one matrix at a time.
        tensor_shards: shard of each parameter by its local name; empty until `distribute`.
        wgrad_queue: queue of weight gradients that are computed later (`layers.delayed_wgrad`).
        without_graphs: queue that calls the layer between compiled graphs, if no compiler may trace
            the layer.
        never_in_graphs: whether none may, however the layer is distributed.
    """

    topology: Topology | None = None
    in_trunk: bool = False
    trunk_context: Context | None = None
    splits_context: bool = False
    joins_context: bool = False
    shard_axis: Literal["tp", "ep"] = "tp"
    stacked: frozenset[str] = frozenset()
    wgrad_queue: Any = None
    without_graphs: Any = None
    never_in_graphs: bool = False
    tensor_shards: Mapping[str, TensorShard] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            mark_forward(cls)

    @property
    def tp_size(self) -> int:
        """Degree of tensor parallelism; 1 for a layer that is not distributed."""
        return 1 if self.topology is None else self.topology.tp.size

    @property
    def context(self) -> Context | None:
        """Split of the sequences over cp; None where the layer works on whole sequences."""
        if self.topology is None or not self.in_trunk:
            return None
        context = self.trunk_context or self.topology.context
        return context if context.is_active else None

    def shard_dims(self) -> dict[str, int]:
        """Dimension along which each partitioned parameter is split; others are held whole."""
        return {}

    def segments(self) -> dict[str, tuple[int, ...]]:
        """Lengths of the segments of a parameter's split dimension, if each is split by itself."""
        return {}

    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        """Names of whole parameters whose gradients are partial sums (see `TensorShard`)."""
        del topology
        return frozenset()

    def problems(self, degrees: Degrees) -> list[str]:
        """Reasons why this layer cannot be distributed over ``degrees``; none by default."""
        del degrees
        return []

    def context_problems(self, config: ContextConfig, tp: int) -> list[str]:
        """Reasons why sequences cannot be split so over cp; asked of layers inside of a trunk."""
        del config, tp
        return []

    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill the full parameter ``full`` in place; called under ``no_grad``.

        Random numbers come from ``generator``, or from PyTorch's default one when None.

        Raises:
            KeyError: the layer has no rule for ``name``.
        """
        raise KeyError(f"{type(self).__name__} has no initialisation for {name!r}")

    def reset_parameters(self) -> None:
        """Initialise the real parameters of a layer that is not distributed; for ``__init__``."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if not parameter.is_meta:
                    for part in parameter if name in self.stacked else (parameter,):
                        self.init_parameter(name, part)

    def distribute(self, topology: Topology) -> None:
        """Keep this rank's slice of every partitioned parameter (real or meta)."""
        dims, summed = self.shard_dims(), self.summed_parameters(topology)
        segments = self.segments()
        axis = topology.ep if self.shard_axis == "ep" else topology.tp
        shards: dict[str, TensorShard] = {}
        for name, parameter in list(self.named_parameters(recurse=False)):
            shape, dim = tuple(parameter.shape), dims.get(name)
            held = TensorShard(full_shape=shape, axis=self.shard_axis, stacked=name in self.stacked)
            if dim is None or axis.size == 1:
                shards[name] = replace(held, sum_gradients=name in summed)
                continue
            length = shape[dim] // axis.size
            offset = length * axis.rank
            parts = Segments(segments[name], axis.size) if name in segments else None
            shards[name] = replace(held, dim=dim, offset=offset, segments=parts)
            piece = shards[name].part_of(parameter.detach(), length)
            setattr(self, name, nn.Parameter(piece, requires_grad=parameter.requires_grad))
        self.tensor_shards = shards
        self.topology = topology

    def withdraw(self) -> None:
        """Undo `distribute` for a layer that holds all of its parameters (tp of 1)."""
        self.topology = None
        self.in_trunk = False
        self.trunk_context = None
        self.tensor_shards = {}
        self.wgrad_queue = None
        self.without_graphs = None

    @override
    def extra_repr(self) -> str:
        return f"tp={self.tp_size}"


def is_expert_layer(module: nn.Module) -> bool:
    """Whether the parameters of a layer lie over the axes of experts (`Topology.experts`)."""
    return isinstance(module, ParallelLayer) and module.shard_axis == "ep"


def expert_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of the layers of experts in a module."""
    layers = filter(is_expert_layer, module.modules())
    return {parameter for layer in layers for parameter in layer.parameters(recurse=False)}


def has_hooks_of_user(module: nn.Module) -> bool:
    """Whether somebody's own code runs before or after the forward of a module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(map(_is_of_user, hooks))


def _is_of_user(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{module}.".startswith(("torch.", "lightning.", "lightning_megatron."))
