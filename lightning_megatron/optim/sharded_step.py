"""Optimizer steps on what this rank owns of parameters.

An element-wise optimizer computes the same numbers on a part of a tensor as on the whole. Below
ZeRO 3 a rank owns rows of plain tensors (`LentRows`), under ZeRO 3 the shard inside a DTensor,
whose dispatch for every operation would cost several times the arithmetic on small parameters.
`LocalStep` lends the optimizer these parts for the duration of a step; before and after it the
parameter groups and the state are keyed by the module's own parameters, as users and checkpoints
expect.

Lending must cost next to nothing beside a fused step of 5 us a parameter. So nothing is keyed anew
from step to step: there are two dictionaries of state, one with the parameters as keys and one with
the shards, whose values are the same inner dictionaries, and two lists for each group. A step
exchanges the outer dictionary and the lists. What is done for each parameter is to hand on its
gradient, and to look whether shard and state are still the objects of the step before; where they
are not (a checkpoint was loaded, a group was added, parameters moved), all is made anew.

An optimizer that works on more than single elements, but knows how parameters are cut
(`optim.shard_spec.KnowsPieces`), is lent the shards too, and told what they are pieces of.
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

from lightning_megatron._torch import lend_gradients, shard_of, shards_of
from lightning_megatron.optim.shard_spec import KnowsPieces, Piece

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


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is right when it is given shards in place of whole parameters.

    Those of torch that are element-wise are known; others say so by an attribute ``elementwise =
    True`` of their class, or by being told of the pieces.
    """
    known = type(optimizer) in ELEMENTWISE or isinstance(optimizer, KnowsPieces)
    return known or bool(type(optimizer).__dict__.get("elementwise", False))


class LentRows(Protocol):
    """Rows that an optimizer steps on in place of a plain parameter."""

    def refresh(self) -> Tensor:
        """A plain tensor with the newest values; the same object as long as nothing was moved."""
        ...

    def lend_gradient(self) -> None:
        """Give that tensor its gradient."""
        ...


class LocalStep:
    """Lends one optimizer its shards, step after step.

    Args:
        optimizer: for which `steps_on_shards` holds, or whose parameters this rank owns whole.
        pieces: of which whole each parameter is a part.
        rows: what to lend in place of plain parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pieces: Mapping[Tensor, Piece],
        rows: Mapping[Any, LentRows] | None = None,
    ) -> None:
        self._optimizer, self._pieces = optimizer, pieces
        self._all_rows = {} if rows is None else rows
        self._rows: list[LentRows] = []
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
    def lent(self) -> Iterator[None]:
        """Within the block the optimizer holds local tensors."""
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
        """Whether groups, shards and state are the objects that everything was prepared for."""
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
        if isinstance(self._optimizer, KnowsPieces):
            held = [p for members in self._lists for p in members]
            # An empty stage's placeholder is no part of anything.
            known = {lent.get(p, p): self._pieces[p] for p in held if p in self._pieces}
            self._optimizer.use_pieces(known)

    def _take_back_state(self) -> None:
        """Put what the step has added to the state under the module's parameters."""
        self._state.clear()
        for lent, values in self._lent_state.items():
            self._state[self._parameter_of.get(lent, lent)] = values
        self._values = list(self._state.values())


def _brought_to(lent: Tensor, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """State of the shape of what is lent that a checkpoint has put on another device."""
    return {
        key: value.to(lent.device)
        for key, value in values.items()
        if isinstance(value, Tensor) and value.shape == lent.shape and value.device != lent.device
    }


def _same(found: Collection[object], known: Collection[object]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(found) == len(known) and all(map(is_, found, known))
