"""Optimizer steps on the local shards of DTensor parameters.

An element-wise optimizer computes the same numbers on a shard as on the whole, so it needs nothing
of a DTensor but the tensor inside it, and going through DTensor dispatch for every operation costs
several times the arithmetic on small parameters. `local_shards` therefore lends the optimizer plain
tensors that share the shards' memory, for the duration of a step; before and after it the parameter
groups and the state are keyed by the module's own parameters, as users and checkpoints expect.

Optimizers that are not element-wise (they take norms or products of whole matrices) step on the
DTensors, which know the whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch import shard_of
from lightning_megatron.errors import ConfigError

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers of torch that treat every element by itself."""

_WHOLE_TENSOR = ("Muon", "Adafactor", "LBFGS", "Shampoo", "SOAP", "LAMB", "LARS")


class LocalShards:
    """Plain tensors in place of an optimizer's DTensors, kept from step to step."""

    def __init__(self) -> None:
        self._of: dict[DTensor, nn.Parameter] = {}

    def of(self, parameter: DTensor) -> nn.Parameter:
        """A parameter that shares the memory of the shard, with its gradient."""
        shard = shard_of(parameter)
        held = self._of.get(parameter)
        if held is None or held.data_ptr() != shard.data_ptr() or held.shape != shard.shape:
            held = nn.Parameter(shard.detach(), requires_grad=parameter.requires_grad)
            self._of[parameter] = held
        gradient = parameter.grad
        held.grad = shard_of(gradient) if isinstance(gradient, DTensor) else gradient
        return held


@contextmanager
def local_shards(optimizer: Optimizer, shards: LocalShards) -> Iterator[None]:
    """Within the block an element-wise ``optimizer`` holds local tensors; others are left alone."""
    groups = [group["params"] for group in optimizer.param_groups]
    if type(optimizer) not in ELEMENTWISE or not any(
        isinstance(p, DTensor) for group in groups for p in group
    ):
        yield
        return
    swapped: dict[Tensor, Tensor] = {
        p: shards.of(p) if isinstance(p, DTensor) else p for group in groups for p in group
    }
    _rekey(optimizer, swapped)
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [swapped[p] for p in members]
    try:
        yield
    finally:
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members
        _rekey(optimizer, {local: parameter for parameter, local in swapped.items()})
        for parameter, local in swapped.items():
            if local is not parameter:
                local.grad = None


def check_optimizer(optimizer: Optimizer, tp: int) -> str | None:
    """Refuse an optimizer that would mistake a tensor-parallel slice for a matrix.

    Returns:
        A warning for an optimizer that is not known.

    Raises:
        ConfigError: the optimizer needs whole matrices.
    """
    name = type(optimizer).__name__
    if tp == 1 or type(optimizer) in ELEMENTWISE:
        return None
    if name in _WHOLE_TENSOR:
        raise ConfigError(
            f"tp={tp}, optimizer={name}: it computes on whole matrices, but under tp every rank "
            "holds a slice; nearest valid: an element-wise optimizer such as AdamW, or tp=1"
        )
    return (
        f"tp={tp}, optimizer={name}: every rank steps on its slices of the parallel layers, "
        "which is right for element-wise optimizers only"
    )


def _rekey(optimizer: Optimizer, keys: dict[Tensor, Tensor]) -> None:
    state = optimizer.state
    for old, new in keys.items():
        if old is not new and old in state:
            state[new] = {k: _local(v) for k, v in state.pop(old).items()}


def _local(value: object) -> object:
    """State that another path made as DTensor, as its shard."""
    return shard_of(value) if isinstance(value, DTensor) else value
