"""Steps of optimizers that need whole tensors and know nothing of shards.

An optimizer that takes norms or products of a parameter's elements is wrong on a shard.
`GatheredStep` gathers parameters and gradients, lets the optimizer step on the whole tensors, on
every rank alike, and keeps each rank's part of the result. The result is right for any optimizer
that treats parameters one by one. It costs nothing where parameters are whole; elsewhere it costs
what sharding saves: the whole parameters and gradients of a pipeline stage during the step, the
whole state all the time, and ``2 P`` elements received in each step.

The state stays whole between steps, keyed by the module's parameters. Checkpoints shard state of
the parameter's shape, and load it under any layout (`checkpoint.optimizer_state`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch.dtensor import shard_of
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.owner_all_to_all import gather_whole
from lightning_megatron.optim.shard_spec import ShardSpec
from lightning_megatron.optim.sharded_step import RowShard, steps_on_shards

_OURS = {
    "Muon": "lightning_megatron.optim.Muon",
    "Adafactor": "lightning_megatron.optim.Adafactor",
}


def steps_on_whole(optimizer: Optimizer, specs: Mapping[Tensor, ShardSpec]) -> bool:
    """Whether parameters must be gathered for ``optimizer``."""
    return not steps_on_shards(optimizer) and any(
        not specs[p].is_whole
        for group in optimizer.param_groups
        for p in group["params"]
        if p in specs
    )


class GatheredStep:
    """Gives one optimizer whole tensors in place of its parameters, for each step.

    Args:
        optimizer: any optimizer that needs no closure.
        specs: shard spec of each parameter.
        rows: rows of plain parameters that this rank owns.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        specs: Mapping[Tensor, ShardSpec],
        rows: Mapping[Any, RowShard] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._specs = specs
        self._rows = {} if rows is None else rows

    @contextmanager
    def tensors_swapped(self) -> Iterator[None]:
        """Context in which the optimizer holds whole tensors; collective."""
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
                        spec = self._specs[parameter]
                        self._own(parameter).copy_(spec.part_of(spec.in_rank_order(tensor)))
        finally:
            stepped, optimizer.state = optimizer.state, state
            state.clear()
            parameter_of = {tensor: parameter for parameter, tensor in whole.items()}
            for tensor, values in stepped.items():
                state[parameter_of.get(tensor, tensor)] = values
            for group, members in zip(optimizer.param_groups, own, strict=True):
                group["params"] = members

    def _own(self, parameter: Tensor) -> Tensor:
        """Rows of a parameter that this rank owns, with their newest values."""
        rows = self._rows.get(parameter)
        return _local(parameter).detach() if rows is None else rows.refresh()

    def _own_gradient(self, parameter: Tensor) -> Tensor | None:
        rows = self._rows.get(parameter)
        if rows is None:
            return None if parameter.grad is None else _local(parameter.grad)
        rows.lend_gradient()
        values = rows.refresh()
        gradient, values.grad = values.grad, None
        return gradient

    def _gather(self, parameters: list[Tensor]) -> dict[Tensor, Tensor]:
        """Map each parameter to a whole tensor with a whole gradient; whole ones to themselves."""
        whole: dict[Tensor, Tensor] = {p: p for p in parameters}
        sharded: dict[torch.dtype, list[Tensor]] = {}
        for p in parameters:
            if p not in self._specs:
                continue
            if isinstance(p, DTensor) or p in self._rows or not self._specs[p].is_whole:
                sharded.setdefault(self._own(p).dtype, []).append(p)
        for members in sharded.values():
            specs = [self._specs[p] for p in members]
            values = _gathered([self._own(p) for p in members], specs)
            found = [self._own_gradient(p) for p in members]
            there = [(p, g) for p, g in zip(members, found, strict=True) if g is not None]
            gradients = _gathered([g for _, g in there], [self._specs[p] for p, _ in there])
            whole |= {p: v.clone() for p, v in zip(members, values, strict=True)}
            for (p, _), gradient in zip(there, gradients, strict=True):
                whole[p].grad = gradient
        return whole


def _gathered(parts: list[Tensor], specs: list[ShardSpec]) -> list[Tensor]:
    found = gather_whole(parts, specs)
    return [spec.in_canonical_order(value) for spec, value in zip(specs, found, strict=True)]


def check_optimizer(
    optimizer: Optimizer,
    specs: Mapping[Tensor, ShardSpec],
    rows: Mapping[Any, RowShard] | None = None,
) -> str | None:
    """Check an optimizer against the layout: refuse it, warn of its price, or accept it.

    Args:
        optimizer: any optimizer.
        specs: shard spec of each parameter.
        rows: rows of plain parameters that this rank owns.

    Returns:
        A warning if the optimizer steps on whole tensors, else None.

    Raises:
        ConfigError: the optimizer cannot step on this layout.
    """
    name = type(optimizer).__name__
    members = [p for group in optimizer.param_groups for p in group["params"]]
    divided = any(p in (rows or {}) or (p in specs and not specs[p].is_whole) for p in members)
    if name == "ZeroRedundancyOptimizer" and divided:
        raise ConfigError(
            f"optimizer={name}: it divides its state over the ranks itself, and here parameters "
            "are divided already; nearest valid: the optimizer that it wraps, under zero=1 or "
            "higher, or zero=0"
        )
    if not steps_on_whole(optimizer, specs):
        if isinstance(optimizer, torch.optim.LBFGS) and any(p in (rows or {}) for p in members):
            raise ConfigError(
                f"optimizer={name}: it evaluates the loss several times in a step, between which "
                "it changes other tensors than the layers see (float32 ones, or in host memory); "
                "nearest valid: precision='32-true' without offload_optimizer, or AdamW"
            )
        return None
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
