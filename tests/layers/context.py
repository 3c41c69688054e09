"""Puts a module on cp ranks as the strategy does, and compares it with one process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.context_exit import ContextExit
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from tests.layers.parity import close, distribute, local_part

LENGTHS = (1, 2, 5, 61)


def context_topology(
    cp: int = 2,
    tp: int = 1,
    *,
    sequence_parallel: bool = False,
    order: str = "auto",
    kind: str = "auto",
) -> Topology:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Topology(
        Degrees(cp=cp, tp=tp),
        torch.device("cpu"),
        sequence_parallel=sequence_parallel,
        context=ContextConfig(degree=cp, order=order, kind=kind),
    )


def on_context(module: nn.Module, topology: Topology) -> nn.Module:
    """A copy of ``module`` on the layout."""
    parallel = distribute(copy.deepcopy(module), topology)
    for trunk in parallel.modules():
        if isinstance(trunk, PipelineSequential):
            for layer in trunk.modules():
                if isinstance(layer, ParallelLayer):
                    layer.in_trunk = True
            trunk.boundary = ContextExit(trunk, topology)
    return parallel


def same_as_whole(
    plain: nn.Module,
    topology: Topology,
    loss: Callable[..., Tensor],
    *inputs: Any,
    parallel: nn.Module | None = None,
) -> Tensor:
    """Compare ``loss(module, *inputs)`` and all gradients with those of one process.

    Gradients of parameters, and of inputs that learn, are means over the cp ranks.
    """
    mine = on_context(plain, topology) if parallel is None else parallel
    plain.zero_grad()
    topology.context.begin(0, forget=True)
    own, theirs = ([_learning(x) for x in inputs] for _ in range(2))
    expected, found = loss(plain, *own), loss(mine, *theirs)
    close("value", found.detach(), expected.detach())
    expected.backward()
    found.backward()
    for i, (x, y) in enumerate(zip(own, theirs, strict=True)):
        if isinstance(x, Tensor) and x.grad is not None:
            close(f"gradient of input {i}", _mean(y.grad, topology), x.grad)
    for name, parameter in mine.named_parameters():
        whole = plain.get_parameter(name).grad
        if whole is None:
            continue
        assert parameter.grad is not None, name
        grad = _mean(parameter.grad, topology)
        owner, _, local = name.rpartition(".")
        layer = mine.get_submodule(owner)
        if isinstance(layer, ParallelLayer):
            if layer.tensor_shards[local].sum_gradients:
                dist.all_reduce(grad, group=topology.tp.group)
            whole = local_part(mine, name, whole, parameter)
        close(f"gradient of {name}", grad, whole)
    return found.detach()


def _learning(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def _mean(grad: Tensor, topology: Topology) -> Tensor:
    if topology.cp.size == 1:
        return grad
    grad = grad.clone()
    dist.all_reduce(grad, group=topology.cp.group)
    return grad / topology.cp.size
