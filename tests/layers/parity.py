"""Runs a layer plainly and distributed, and compares outputs and all gradients."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import own_part

TOLERANCE = 1e-12

Split = Literal["no", "features", "residual"]
"""How tp ranks hold an activation: whole, split on the last dim, or as the residual stream (whole,
and split on dim 1 under sequence parallelism)."""


@dataclass
class Case:
    """One comparison.

    Args:
        build: makes the plain layer, in the default dtype.
        inputs: makes its positional arguments.
        input_split: how tp ranks hold floating-point inputs.
        output_split: how they hold the output.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    input_split: Split = "residual"
    output_split: Split = "residual"
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def make_topology(tp: int, sequence_parallel: bool = False, **degrees: int) -> Topology:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Topology(
        Degrees(tp=tp, **degrees), torch.device("cpu"), sequence_parallel=sequence_parallel
    )


def distribute(module: nn.Module, topology: Topology) -> nn.Module:
    """What the strategy does: distribute every parallel layer, then tie again what was tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for layer in module.modules():
        if isinstance(layer, ParallelLayer):
            assert layer.problems(topology.degrees) == []
            layer.distribute(topology)
    for first, *others in names.values():
        for other in others:
            owner, _, local = other.rpartition(".")
            setattr(module.get_submodule(owner), local, module.get_parameter(first))
    return module


def piece(x: Tensor, split: Split, topology: Topology) -> Tensor:
    """What this rank holds of a whole activation."""
    if split == "no" or (split == "residual" and not topology.sequence_parallel):
        return x
    return x.chunk(topology.tp.size, dim=1 if split == "residual" else -1)[topology.tp.rank]


def local_part(module: nn.Module, name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """What this rank should hold of a whole parameter, or of its gradient."""
    owner, _, local = name.rpartition(".")
    shard = module.get_submodule(owner).tensor_shards[local]
    if shard.dim is None:
        return whole
    return whole.narrow(shard.dim, shard.offset, parameter.shape[shard.dim])


def finished_gradient(
    module: nn.Module, name: str, parameter: Tensor, topology: Topology
) -> Tensor:
    """The gradient after the sums over tp that the layers leave to the strategy."""
    assert parameter.grad is not None, name
    owner, _, local = name.rpartition(".")
    grad = parameter.grad.clone()
    if module.get_submodule(owner).tensor_shards[local].sum_gradients:
        dist.all_reduce(grad, group=topology.tp.group)
    return grad


def check(case: Case, topology: Topology) -> None:
    """Compare one layer with itself distributed; raises AssertionError."""
    torch.manual_seed(0)
    plain = case.build().double()
    inputs = [x.double() if x.is_floating_point() else x for x in case.inputs()]
    parallel = distribute(copy.deepcopy(plain), topology)
    whole_in = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    expected = plain(*whole_in, **case.kwargs)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)

    local_in = [
        piece(x.detach(), case.input_split, topology).clone().requires_grad_()
        if x.is_floating_point()
        else x
        for x in whole_in
    ]
    found = own_part(parallel(*local_in, **case.kwargs))
    close("output", found, piece(expected, case.output_split, topology))
    found.backward(piece(upstream, case.output_split, topology))
    for i, (mine, whole) in enumerate(zip(local_in, whole_in, strict=True)):
        if mine.is_floating_point():
            close(
                f"gradient of input {i}", mine.grad, piece(whole.grad, case.input_split, topology)
            )
    for name, parameter in parallel.named_parameters():
        grad = finished_gradient(parallel, name, parameter, topology)
        whole_grad = plain.get_parameter(name).grad
        close(f"gradient of {name}", grad, local_part(parallel, name, whole_grad, parameter))


def close(what: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )
