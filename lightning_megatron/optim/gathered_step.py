"""Steps of optimizers that need whole tensors and know nothing of shards.

An optimizer that takes norms or products of a parameter's elements is wrong on a shard.
`GatheredStep` lends it whole tensors in place of parameters, lets it step on them, on every rank
alike, and keeps each rank's part of the result. The result is right for any optimizer. It costs
nothing where parameters are whole; elsewhere it costs what sharding saves: the whole parameters and
gradients of a pipeline stage during the step, the whole state all the time, and ``2 P`` elements
received in each step.

* A whole tensor is lent everywhere: in the optimizer's groups, its state, lists of its own, and
  optimizers inside it (`optim.held_tensors`). It is the same object in every step, as something may
  be keyed by it, and has memory during a step only.
* The optimizer may call its closure, as often as it wants and when it wants, as it may in one
  process. For a closure the optimizer's values are given back, and the network runs with them. So
  that nothing is gathered twice, a lent tensor has no values until something looks at it, which is
  mostly behind the closure.
* Under ZeRO 1 and 2 parameters are whole already, and so is a gradient once it is looked at
  (`whole.divided_gradient`): the optimizer gets the parameters themselves.

Between steps, state is keyed by the module's parameters. Checkpoints shard state of the parameter's
shape, and load it under any layout (`checkpoint.optimizer_state`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._torch.dtensor import shard_of
from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass, tree_flatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.held_tensors import HeldTensors
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


class LentTensor(nn.Parameter):
    """Whole tensor that has its values from the moment when something looks at it."""

    handles_split_tensors = True
    handles_weights = True
    lender: "GatheredStep"

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.__hash__:
            found = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, LentTensor))
            found.lender.fill()
            return func(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class GatheredStep:
    """Gives one optimizer whole tensors in place of its parameters, for each step.

    Args:
        optimizer: any optimizer.
        specs: shard spec of each parameter.
        rows: rows of plain parameters that this rank owns.
        tell: tells other ranks what an optimizer has made of this rank's part; collective.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        specs: Mapping[Tensor, ShardSpec],
        rows: Mapping[Any, RowShard] | None = None,
        tell: Callable[[Optimizer], None] = lambda _: None,
    ) -> None:
        self._optimizer = optimizer
        self._specs = specs
        self._rows = {} if rows is None else rows
        self._tell = tell
        self._held = HeldTensors(optimizer)
        self._known: dict[Tensor, tuple[LentTensor, Tensor | None]] = {}
        """Tensors that were ever lent, by parameter, and their memory; None if it is theirs."""
        self._lent: dict[Tensor, LentTensor] = {}
        self._own_values: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        """This rank's part of the values and gradients that were lent."""
        self._stepped_on_whole: list[RowShard] = []
        self._filled = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Context of a step, in which the optimizer holds whole tensors; collective."""
        self._take()
        try:
            yield
            self._write()
        finally:
            self._return()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Context within a step of the closure, which sees what the optimizer has written."""
        stepped = self._filled
        self._write()
        self._return()
        if stepped:
            self._tell(self._optimizer)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with DisableTorchFunctionSubclass():
            members = [p for group in self._optimizer.param_groups for p in group["params"]]
            self._lent = {p: self._lent_for(p) for p in members if self._is_lent(p)}
            whole = [p for p in members if p in self._rows and not self._is_apart(p)]
            self._stepped_on_whole = [self._rows[p] for p in whole]
            self._filled = False
            self._put_in({id(p): lent for p, lent in self._lent.items()})

    def _put_in(self, lent: Mapping[int, Tensor]) -> None:
        """Put lent tensors in the place of parameters, which are given by their ``id``."""
        self._held.exchange(lent)

    def _take_out(self, parameters: Mapping[int, Tensor]) -> None:
        """Undo `_put_in`; the tensors are given by their ``id``."""
        self._held.exchange(parameters)

    def _is_lent(self, parameter: Tensor) -> bool:
        """Whether the optimizer gets another tensor in the place of a parameter."""
        return self._is_apart(parameter)

    def _is_apart(self, parameter: Tensor) -> bool:
        """Whether a parameter itself is not the whole tensor on which to step."""
        if isinstance(parameter, DTensor):
            return True
        spec = self._specs.get(parameter)
        if spec is None:
            return False
        return tuple(parameter.shape) != spec.full_shape or not _shares_memory(
            self._own(parameter), parameter
        )

    def _lent_for(self, parameter: Tensor) -> LentTensor:
        known = self._known.get(parameter)
        values = self._own(parameter) if self._is_apart(parameter) else parameter.detach()
        if known is None or known[0].dtype != values.dtype or known[0].device != values.device:
            known = self._known[parameter] = self._made_for(parameter, values)
        lent, memory = known
        lent.data = values if memory is None else memory
        lent.__class__ = LentTensor
        lent.requires_grad_(parameter.requires_grad)
        return lent

    def _made_for(self, parameter: Tensor, values: Tensor) -> tuple[LentTensor, Tensor | None]:
        """Make what is lent in the place of a parameter, and memory if it is another's."""
        memory = None
        if self._is_apart(parameter):
            memory = values.new_empty(self._specs[parameter].full_shape)
        lent = LentTensor(values if memory is None else memory, parameter.requires_grad)
        lent.lender = self
        if memory is not None:
            memory.untyped_storage().resize_(0)
        return lent, memory

    @property
    def is_looked_at(self) -> bool:
        """Whether the optimizer has looked at what it was lent."""
        return self._filled

    def fill(self) -> None:
        """Give all lent tensors values and gradients; collective."""
        if self._filled:
            return
        self._filled = True
        with torch.no_grad(), DisableTorchFunctionSubclass():
            by_format: dict[Any, list[Tensor]] = {}
            for p, lent in self._lent.items():
                lent.__class__ = nn.Parameter  # type: ignore[assignment]
                by_format.setdefault((lent.dtype, lent.device), []).append(p)
            for members in by_format.values():
                self._fill(members)

    def _fill(self, members: list[Tensor]) -> None:
        owned = [self._own(p) for p in members]
        self._fill_values(members, owned)
        found = [self._own_gradient(p, own) for p, own in zip(members, owned, strict=True)]
        self._own_values |= dict(zip(members, zip(owned, found, strict=True), strict=True))
        there = [(p, g) for p, g in zip(members, found, strict=True) if g is not None]
        gradients = _gathered([g for _, g in there], [self._specs[p] for p, _ in there])
        for (p, own), gradient in zip(there, gradients, strict=True):
            apart = gradient is own and self._known[p][1] is not None
            self._lent[p].grad = gradient.clone() if apart else gradient

    def _fill_values(self, members: list[Tensor], owned: list[Tensor]) -> None:
        apart = [
            (p, own) for p, own in zip(members, owned, strict=True) if self._known[p][1] is not None
        ]
        values = _gathered([own for _, own in apart], [self._specs[p] for p, _ in apart])
        for (p, _), value in zip(apart, values, strict=True):
            lent, memory = self._known[p]
            assert memory is not None
            memory.untyped_storage().resize_(memory.numel() * memory.itemsize)
            lent.data = memory.copy_(value)

    def _write(self) -> None:
        """Keep this rank's part of what the optimizer has made of the tensors."""
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for rows in self._stepped_on_whole:
                rows.refresh()  # the parameter may have other memory
            for p, lent in self._lent.items() if self._filled else ():
                values, gradient = self._own_values[p]
                if self._known[p][1] is not None or not _shares_memory(lent, p):
                    values.copy_(self._part(p, lent))
                if gradient is not None and lent.grad is not None:
                    gradient.copy_(self._part(p, lent.grad))
                elif gradient is not None:
                    self._forget_gradient(p)

    def _forget_gradient(self, parameter: Tensor) -> None:
        """Clear a gradient that the optimizer has cleared."""
        rows = self._rows.get(parameter)
        if rows is None:
            parameter.grad = None
        else:
            rows.forget_gradient()

    def _part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        spec = self._specs[parameter]
        return spec.part_of(spec.in_rank_order(tensor))

    def _return(self) -> None:
        """Let the optimizer hold its parameters again; what was lent has no memory then."""
        with DisableTorchFunctionSubclass():
            lent, self._lent, self._own_values = self._lent, {}, {}
            self._filled = False
            self._take_out({id(tensor): p for p, tensor in lent.items()})
            if not lent:
                return
            shared = {_address(tensor) for tensor in self._held.tensors()}
            for p, tensor in lent.items():
                memory = self._known[p][1]
                tensor.grad = None
                tensor.data = p.detach() if memory is None else memory
                if memory is not None and _address(memory) not in shared:
                    memory.untyped_storage().resize_(0)

    def _own(self, parameter: Tensor) -> Tensor:
        """Rows of a parameter that this rank owns, with their newest values."""
        rows = self._rows.get(parameter)
        return _local(parameter).detach() if rows is None else rows.refresh()

    def _own_gradient(self, parameter: Tensor, values: Tensor) -> Tensor | None:
        rows = self._rows.get(parameter)
        if rows is None:
            return None if parameter.grad is None else _local(parameter.grad)
        rows.lend_gradient()
        gradient, values.grad = values.grad, None
        return gradient


def _gathered(parts: list[Tensor], specs: list[ShardSpec]) -> list[Tensor]:
    found = gather_whole(parts, specs) if parts else []
    return [spec.in_canonical_order(value) for spec, value in zip(specs, found, strict=True)]


def _address(tensor: Tensor) -> int:
    """Address of a tensor's memory, 0 if it has none."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


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
        return None
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
