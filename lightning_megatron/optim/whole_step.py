"""Steps of optimizers that must see whole tensors and know nothing of pieces.

An optimizer that takes norms or products of a parameter's elements is wrong on a shard. `WholeStep`
gathers parameters and gradients, lets the optimizer step on the whole tensors, on every rank alike,
and keeps each rank's part of the result. That is right for any optimizer that treats parameters one
by one, and costs nothing where they are not cut; elsewhere it costs what sharding saves: the whole
parameters and gradients of a pipeline stage during the step, the whole state all the time, and
``2 P`` elements received in each step.

The state stays whole between steps, keyed by the module's parameters. Checkpoints store it cut
where its shape is the parameter's, and load it under any layout (`checkpoint.optimizer`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch import shard_of
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.exchange import gather_whole
from lightning_megatron.optim.local_step import steps_on_shards
from lightning_megatron.optim.pieces import Piece

_OURS = {
    "Muon": "lightning_megatron.optim.muon.Muon",
    "Adafactor": "lightning_megatron.optim.adafactor.Adafactor",
}


def steps_on_whole(optimizer: Optimizer, pieces: Mapping[Tensor, Piece]) -> bool:
    """Whether parameters must be put together for ``optimizer``."""
    return not steps_on_shards(optimizer) and any(
        not pieces[p].is_whole
        for group in optimizer.param_groups
        for p in group["params"]
        if p in pieces
    )


class WholeStep:
    """Lends one optimizer whole tensors, step after step.

    Args:
        optimizer: of any kind that needs no closure.
        pieces: of which whole each parameter is a part.
    """

    def __init__(self, optimizer: Optimizer, pieces: Mapping[Tensor, Piece]) -> None:
        self._optimizer, self._pieces = optimizer, pieces

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within the block the optimizer holds whole tensors; collective."""
        optimizer = self._optimizer
        own = [group["params"] for group in optimizer.param_groups]
        state = optimizer.state
        whole = self._gather([p for members in own for p in members])
        optimizer.state = defaultdict(dict)
        for parameter, values in state.items():
            optimizer.state[whole.get(parameter, parameter)] = values
        for group, members in zip(optimizer.param_groups, own, strict=True):
            group["params"] = [whole[p] for p in members]
        try:
            yield
            with torch.no_grad():
                for parameter, tensor in whole.items():
                    if tensor is not parameter:
                        _local(parameter).copy_(self._pieces[parameter].part_of(tensor))
        finally:
            stepped, optimizer.state = optimizer.state, state
            state.clear()
            parameter_of = {tensor: parameter for parameter, tensor in whole.items()}
            for tensor, values in stepped.items():
                state[parameter_of.get(tensor, tensor)] = values
            for group, members in zip(optimizer.param_groups, own, strict=True):
                group["params"] = members

    def _gather(self, parameters: list[Tensor]) -> dict[Tensor, Tensor]:
        """For each parameter a whole one with a whole gradient, or itself if it is whole."""
        whole: dict[Tensor, Tensor] = {p: p for p in parameters}
        cut: dict[torch.dtype, list[Tensor]] = {}
        for p in parameters:
            if p in self._pieces and (isinstance(p, DTensor) or not self._pieces[p].is_whole):
                cut.setdefault(p.dtype, []).append(p)
        for members in cut.values():
            pieces = [self._pieces[p] for p in members]
            values = gather_whole([_local(p).detach() for p in members], pieces)
            with_gradient = [p for p in members if p.grad is not None]
            gradients = gather_whole(
                [_local(p.grad) for p in with_gradient if p.grad is not None],
                [self._pieces[p] for p in with_gradient],
            )
            whole |= {p: v.clone() for p, v in zip(members, values, strict=True)}
            for p, gradient in zip(with_gradient, gradients, strict=True):
                whole[p].grad = gradient
        return whole


def check_optimizer(optimizer: Optimizer, pieces: Mapping[Tensor, Piece]) -> str | None:
    """Whether, and at what price, an optimizer is right for parameters that are cut.

    Returns:
        A warning for one that steps on whole tensors.

    Raises:
        ConfigError: the optimizer cannot step on this layout.
    """
    if not steps_on_whole(optimizer, pieces):
        return None
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"optimizer={name}: it evaluates the loss several times in a step and works on all "
            "parameters as one vector, of which every rank holds a part; nearest valid: AdamW, or "
            "one process"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            f"optimizer={name}: gradients of sharded parameters are dense; nearest valid: AdamW"
        )
    ours = _OURS.get(name) if type(optimizer).__module__.startswith("torch.") else None
    remedy = (
        f"{ours} is the same and works on shards"
        if ours
        else "if it treats every element by itself, say so by elementwise = True in its class"
    )
    return (
        f"optimizer={name}: parameters and gradients are put together for each step, and its state "
        f"is held whole on every rank of a pipeline stage, as it may need whole tensors; {remedy}"
    )


def _local(tensor: Tensor) -> Any:
    return shard_of(tensor) if isinstance(tensor, DTensor) else tensor
