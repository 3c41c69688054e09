"""Optimizer steps on the shards of parameters that this rank owns.

An element-wise optimizer computes the same numbers on a part of a tensor as on the whole. Below
ZeRO 3 a rank owns rows of plain tensors (`RowShard`), under ZeRO 3 the shard inside a DTensor,
whose dispatch for every operation would cost several times the arithmetic on small parameters.
`ShardedStep` puts these shards into the optimizer for the duration of a step; before and after the
step, parameter groups and state are keyed by the module's own parameters, as users and checkpoints
expect.

The swap must cost next to nothing beside a fused step of 5 us a parameter. So no dictionary is
rebuilt from step to step: there are two dictionaries of state, one with the parameters as keys and
one with the shards, which share their inner dictionaries, and two lists for each group. A step
swaps the outer dictionaries and the lists. For each parameter it passes on the gradient and checks
that shard and state are the objects of the step before. If they are not (a checkpoint was loaded, a
group was added, parameters moved), both dictionaries are rebuilt.

An optimizer that is not element-wise but supports shards (`optim.shard_spec.ShardAware`) gets the
shards too, with their specs.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch.dtensor import lend_gradients, shard_of, shards_of
from lightning_megatron.optim.shard_spec import ShardAware, ShardSpec

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
"""Element-wise optimizers of torch."""


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is right on shards in place of whole parameters.

    torch's element-wise optimizers are known; the class of another has ``elementwise = True`` or is
    `ShardAware`.
    """
    known = type(optimizer) in ELEMENTWISE or isinstance(optimizer, ShardAware)
    return known or bool(type(optimizer).__dict__.get("elementwise", False))


class RowShard(Protocol):
    """Rows of a plain parameter on which an optimizer steps in its place."""

    def refresh(self) -> Tensor:
        """Return a plain tensor with the newest values, the same object until parameters move."""
        ...

    def lend_gradient(self) -> None:
        """Give that tensor its gradient."""
        ...

    def forget_gradient(self) -> None:
        """Forget the parameter's gradient, as ``.grad = None`` does."""
        ...


class ShardedStep:
    """Gives one optimizer shards in place of its parameters, for each step.

    Args:
        optimizer: optimizer that `steps_on_shards`, or whose parameters this rank owns whole.
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
        self._all_rows = {} if rows is None else rows
        self._rows: list[RowShard] = []
        self._row_values: list[Tensor] = []
        self._lists: list[list[Tensor]] = []
        self._lent_lists: list[list[Tensor]] = []
        self._sharded: list[DTensor] = []
        self._shards: list[Tensor] = []
        self._parameter_of: dict[Tensor, Tensor] = {}
        self._state: Any = None
        self._values: list[Any] = []
        self._lent_state: defaultdict[Tensor, Any] = defaultdict(dict)

    @contextmanager
    def tensors_swapped(self) -> Iterator[None]:
        """Context in which the optimizer holds local tensors."""
        optimizer = self._optimizer
        if not self._is_current():
            self._prepare()
        if not self._sharded and not self._rows:
            yield
            return
        own = [group["params"] for group in optimizer.param_groups]
        lend_gradients(self._sharded, self._shards)
        for rows in self._rows:
            rows.lend_gradient()
        for group, members in zip(optimizer.param_groups, self._lent_lists, strict=True):
            group["params"] = members
        optimizer.state = self._lent_state
        try:
            yield
        finally:
            for group, members in zip(optimizer.param_groups, own, strict=True):
                group["params"] = members
            optimizer.state = self._state
            if not _same(self._lent_state.values(), self._values):
                self._take_back_state()
            for lent in (*self._shards, *self._row_values):
                lent.grad = None

    def _is_current(self) -> bool:
        """Whether groups, shards and state are the objects that `_prepare` saw."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        return (
            len(groups) == len(self._lists)
            and all(map(_same, (group["params"] for group in groups), self._lists))
            and _same(shards_of(self._sharded), self._shards)
            and _same([rows.refresh() for rows in self._rows], self._row_values)
            and state is self._state
            and _same(state.values(), self._values)
        )

    def _prepare(self) -> None:
        self._lists = [list(group["params"]) for group in self._optimizer.param_groups]
        self._sharded = [p for members in self._lists for p in members if isinstance(p, DTensor)]
        self._shards = shards_of(self._sharded)
        lent: dict[Tensor, Tensor] = dict(zip(self._sharded, self._shards, strict=True))
        owned = [p for members in self._lists for p in members if p in self._all_rows]
        self._rows = [self._all_rows[p] for p in owned]
        self._row_values = [rows.refresh() for rows in self._rows]
        lent.update(zip(owned, self._row_values, strict=True))
        self._parameter_of = {shard: parameter for parameter, shard in lent.items()}
        self._lent_lists = [[lent.get(p, p) for p in members] for members in self._lists]
        self._state = self._optimizer.state
        self._lent_state = defaultdict(dict)
        for parameter, values in self._state.items():
            # Another path may have made it a DTensor: `zeros_like` when a checkpoint is loaded.
            values.update({k: shard_of(v) for k, v in values.items() if isinstance(v, DTensor)})
            held = lent.get(parameter, parameter)
            values.update(_brought_to(held, values))
            self._lent_state[held] = values
        self._values = list(self._state.values())
        if isinstance(self._optimizer, ShardAware):
            held = [p for members in self._lists for p in members]
            # An empty stage's placeholder is no part of anything.
            known = {lent.get(p, p): self._specs[p] for p in held if p in self._specs}
            self._optimizer.set_shard_specs(known)

    def _take_back_state(self) -> None:
        """Move state that the step has added to the module's parameters."""
        self._state.clear()
        for lent, values in self._lent_state.items():
            self._state[self._parameter_of.get(lent, lent)] = values
        self._values = list(self._state.values())


def _brought_to(lent: Tensor, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """State of the shard's shape that a checkpoint left on another device, moved to the shard's."""
    return {
        key: value.to(lent.device)
        for key, value in values.items()
        if isinstance(value, Tensor) and value.shape == lent.shape and value.device != lent.device
    }


def _same(found: Collection[object], known: Collection[object]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(found) == len(known) and all(map(is_, found, known))
