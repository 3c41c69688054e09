"""ZeRO 0 to 2: whole, plain parameters, gradients in buckets, rows for the optimizer.

The parameters that a module shows are what they would be under ``DistributedDataParallel``, before,
in and after every step, so a module may do with them what it likes: write to them, read them
outside of any forward, copy or save them, use them on one rank only. What happens around a step::

    backward       buckets of gradients are reduced as they fill     `zero.grad_buckets`
    optimizer      steps on the rows that this rank owns             `zero.owned_rows`
    after it       rows are gathered into the parameters, by bucket  `zero.row_gather`

Gradients reach their owners only (reduce-scatter). Whoever looks at ``.grad`` all the same has the
mean gathered into it (`whole.divided_gradient`). Where hooks exist to look, the strategy calls
`show_gradients`: the mean is then made whole at once (all-reduce) and ``.grad`` holds it, as under
``DistributedDataParallel``. Either way owners step on their rows of it from then on.

Experts have other owners than the rest (`Topology.experts`). Their buckets stand in the same order
as the others, so that ranks that meet in several groups begin reductions alike.

Under ``bf16-mixed`` and its like the parameters that are trained are narrow while a run lasts, and
the rows float32. What is frozen when the run begins stays as it is (autocast narrows what it
multiplies with), so that a network which is updated by hand, such as a moving average, keeps its
precision.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import expert_parameters
from lightning_megatron.layers.batch_norm import BATCH_NORMS_OVER_RANKS
from lightning_megatron.optim.sharded_step import RowShard
from lightning_megatron.topology.mesh import ParameterAxes, Topology
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.data_parallel import (
    ComputeTypes,
    ZeroDataParallel,
    dim_to_divide,
    has_no_rows,
)
from lightning_megatron.zero.grad_buckets import GradientBuckets, ReductionGroups
from lightning_megatron.zero.gradients import ParameterRole
from lightning_megatron.zero.owned_rows import OwnedRows
from lightning_megatron.zero.row_gather import RowCodec, RowGather


@memory_of_parts
class WholeParameters(ZeroDataParallel):
    """Reduces gradients to the owners of rows, and gathers what they have made of them.

    Args:
        topology: the layout.
        zero: ZeRO stage, 0 to 2.
        types: number formats.
        offload: whether rows and optimizer state are kept in host memory.
    """

    def __init__(
        self, topology: Topology, zero: int, types: ComputeTypes, *, offload: bool = False
    ) -> None:
        self._topology = topology
        self._zero = zero
        self._types = types
        self._divides = any(self._divided(axes) for axes in topology.all_axes)
        self._offload = offload
        self._buckets: list[GradientBuckets] = []
        self._pending: set[int] = set()
        """Stages with a reduction under way."""
        self._gathers: list[tuple[RowGather, set[nn.Parameter]]] = []
        """Ways back from the owners, and the parameters that each is for."""
        self._blocked = False
        self._meets = topology.cp.size > 1
        """Whether ranks that average gradients also communicate in the midst of a backward."""
        self._whole = not self._divides
        self._is_wide = False
        self._stepped: WeakKeyDictionary[Optimizer, _Stepped] = WeakKeyDictionary()
        self._reduced: set[nn.Parameter] = set()
        self.rows: dict[nn.Parameter, OwnedRows] = {}
        self.lends: Mapping[nn.Parameter, RowShard] = self.rows

    def _divided(self, axes: ParameterAxes) -> bool:
        """Whether ranks own rows of the parameters with these axes."""
        return self._zero > 0 and axes.shard.size > 1

    def own(self, module: nn.Module, *, narrow: bool) -> None:
        """Give this rank's optimizer its rows, and the layers narrow parameters.

        Args:
            module: with its values; parameters that have rows already are left alone.
            narrow: whether they are computed with in the format of the computation.
        """
        experts = expert_parameters(module)
        self._meets |= any(isinstance(m, BATCH_NORMS_OVER_RANKS) for m in module.modules())
        for parameter in module.parameters():
            if parameter in self.rows or has_no_rows(parameter):
                continue
            low = self._types.parameters
            narrows = narrow and low is not None and parameter.requires_grad
            narrows = narrows and parameter.is_floating_point() and parameter.dtype != low
            axes = self._topology.axes_of("ep" if parameter in experts else "tp")
            divides = self._divided(axes)
            if not (narrows or divides or self._offload):
                continue
            at_rest, device = parameter.dtype, torch.device("cpu") if self._offload else None
            apart = divides and parameter in experts
            dim = dim_to_divide(parameter, axes.shard.size) if apart else 0
            self.rows[parameter] = OwnedRows(
                parameter,
                axes.shard.size if divides else 1,
                axes.shard.rank if divides else 0,
                wide=at_rest if narrows else None,
                narrow=low if narrows else None,
                summed_in=self._types.reduction,
                device=device or (parameter.device if dim else None),
                dim=dim,
            )

    def reduce(
        self,
        stages: Sequence[Sequence[nn.Parameter]],
        roles: Sequence[ParameterRole],
        *,
        experts: bool,
    ) -> None:
        """Average the gradients of the parameters of stages, and gather all rows; collective.

        Args:
            stages: the parameters of each stage of this rank, in the order of the network.
            roles: roles of all parameters.
            experts: whether any rank has experts.
        """
        meter = self._topology.loss.meter
        meets = self._meets or experts
        groups: dict[nn.Parameter, ReductionGroups] = {}
        for axes in self._topology.all_axes if experts else (self._topology.dense,):
            own = self._groups(axes)
            if own is None:
                continue
            members = {r.parameter for r in roles if r.axes(self._topology) is axes}
            groups |= dict.fromkeys(members, own)
            if own.shard is not None:
                self._gathers.append((RowGather(own.shard, meter), members))
                assert axes.shard.group is not None
                self._let_look(RowGather(axes.shard.group, meter), members)
        if not groups:
            return
        self._buckets = [
            GradientBuckets(
                [parameter for parameter in stage if parameter in groups],
                groups,
                rows=self.rows,
                names={role.parameter: role.name for role in roles},
                reduction=self._types.reduction,
                meter=meter,
                meets=meets,
                alone=len(stages) == 1,
            )
            for stage in stages
        ]
        averaged = (p for stage in stages for p in stage if p in groups)
        self._reduced = {p for p in averaged if groups[p].shard is not None}
        self.show_gradients(self._whole)

    def _groups(self, axes: ParameterAxes) -> ReductionGroups | None:
        """New groups for the reduction of parameters with these axes; collective."""
        topology = self._topology
        everyone = topology.new_group(axes.mean.name)
        if everyone is None:
            return None
        groups = ReductionGroups(everyone=everyone)
        if not self._divided(axes):
            return groups
        hybrid = axes.copies.size > 1
        shard = topology.new_group(axes.shard.name) if hybrid else everyone
        copies = topology.new_group(axes.copies.name) if hybrid else None
        return replace(groups, shard=shard, replicate=copies)

    def _gather_of(self, parameter: nn.Parameter) -> RowGather | None:
        return next((gather for gather, members in self._gathers if parameter in members), None)

    def pack_with(self, parameter: nn.Parameter, codec: RowCodec) -> None:
        """Gather the rows of a parameter by a codec from now on; it is to look so already."""
        gather = self._gather_of(parameter)
        if gather is not None and not self.rows[parameter].is_whole:
            gather.codecs[parameter] = codec
            gather.forget_plans()
            self.rows[parameter].round_trip = codec.round_trip

    def pack_plainly(self) -> None:
        """Gather all rows by a cast again."""
        for gather, _ in self._gathers:
            for parameter in gather.codecs:
                self.rows[parameter].round_trip = None
            gather.codecs.clear()
            gather.forget_plans()

    def _gather_rows(self, members: Iterable[OwnedRows]) -> None:
        """Make divided parameters whole and new; collective."""
        for gather, own in self._by_gather(members):
            gather.gather(own)

    def _by_gather(self, members: Iterable[OwnedRows]) -> "list[tuple[RowGather, list[OwnedRows]]]":
        """Members of a gather of rows, and the gather."""
        divided = [rows for rows in members if not rows.is_whole]
        each = [
            (gather, [rows for rows in divided if rows.parameter in parameters])
            for gather, parameters in self._gathers
        ]
        return [(gather, own) for gather, own in each if own]

    @override
    def show_gradients(self, whole: bool) -> None:
        self._whole = whole or not self._divides
        for buckets in self._buckets:
            buckets.whole = self._whole
        for rows in self.rows.values():
            rows.shows_gradient = self._whole or rows.parameter not in self._reduced

    @override
    def tell_backwards(self, hook: Callable[[], None] | None) -> None:
        """No-op: a backward of which nobody tells (`before_backward`) reduces nothing."""

    @override
    def average_again(self) -> None:
        self.begin()
        self.finish()

    def _let_look(self, gather: RowGather, members: set[nn.Parameter]) -> None:
        """Have a look at one of these gradients bring them all, whichever rank looks at which.

        Args:
            gather: over a group in which nothing is under way: one rank that looks alone waits in
                it, and takes no part in another's reduction.
            members: parameters that the same ranks divide.
        """
        this, zero = ref(self), self._zero  # rows that held each other would outlive their layout

        def bring() -> None:
            of_all = {} if (alive := this()) is None else alive.rows
            own = [rows for parameter, rows in of_all.items() if parameter in members]
            try:
                gather.gather_gradients([rows for rows in own if rows.gradient is not None])
            except RuntimeError as error:
                raise ConfigError(
                    f"zero={zero}: `.grad` was read or changed on this rank, which brings "
                    "gradients together, and not on all that share them; nearest valid: code "
                    "that reads it on every rank, or an empty on_before_optimizer_step in the "
                    "module, with which every rank has whole gradients"
                ) from error

        for parameter in members & self.rows.keys():
            self.rows[parameter].bring_gradient = bring

    @property
    def _every_microbatch(self) -> bool:
        return self._zero >= 2 and not self._whole and bool(self._buckets)

    @property
    @override
    def accumulates_in_grad(self) -> bool:
        return bool(self._buckets) and not self._every_microbatch

    @property
    @override
    def communicates_every_microbatch(self) -> bool:
        return self._every_microbatch

    @override
    def begin(self, *, blocked: bool = False) -> None:
        self._blocked = blocked
        self._pending.clear()
        for buckets in self._buckets:
            buckets.forget()

    @override
    def before_forward(self, stage: int = 0) -> None:
        """No-op: the parameters are whole."""

    @override
    def before_backward(self, stage: int = 0, *, last: bool = True, split: bool = False) -> None:
        if stage < len(self._buckets) and not split and self._reduces(last):
            self._finish_pending(stage)
            self._buckets[stage].arm(last=last)
            self._pending.add(stage)

    @override
    def after_weights(self, stage: int, *, last: bool) -> None:
        if stage < len(self._buckets) and self._reduces(last):
            self._finish_pending(stage)
            self._buckets[stage].start(last=last)
            self._pending.add(stage)

    @override
    def finish(self) -> None:
        for stage, buckets in enumerate(self._buckets):
            if self._reduces(True) and (not self._every_microbatch or stage in self._pending):
                self._pending.add(stage)  # also one that has not run backward: others may have
            self._finish_pending(stage)
            buckets.settle()

    def _reduces(self, last: bool) -> bool:
        """Whether the backward, after which gradients may be complete, ends in a reduction."""
        return self._every_microbatch or (last and not self._blocked)

    def _finish_pending(self, stage: int) -> None:
        if stage in self._pending:
            self._buckets[stage].finish()
            self._pending.discard(stage)

    @override
    def after_step(self, optimizer: Optimizer) -> None:
        stepped = self._stepped_by(optimizer)
        for rows in stepped.whole:
            rows.write_back()
        for gather, own in stepped.divided:
            gather.gather(own)

    @override
    def gather_all(self) -> None:
        self.narrow()
        for rows in self.rows.values():
            if rows.is_whole:
                rows.write_back()
        self._gather_rows(self.rows.values())

    @override
    def widen(self) -> bool:
        if self._is_wide:
            return False
        wider = [rows for rows in self.rows.values() if rows.is_wider]
        for rows in wider:
            rows.widen()
        for gather, own in self._by_gather(wider):
            gather.gather_plainly(own)
        self._is_wide = bool(wider)
        return self._is_wide

    @override
    def narrow(self) -> None:
        if not self._is_wide:
            return
        self._is_wide = False
        for rows in self.rows.values():
            rows.narrow()
        packed = {parameter for gather, _ in self._gathers for parameter in gather.codecs}
        self._gather_rows(rows for rows in self.rows.values() if rows.parameter in packed)

    @override
    def come_to_rest(self) -> None:
        """No-op: parameters are whole at all times."""

    @override
    def resume(self) -> None:
        for rows in self.rows.values():
            rows.part_again()

    @override
    def dissolve(self) -> None:
        self.rows.clear()

    @override
    def release(self, *, collective: bool = True) -> None:
        self._is_wide = False
        narrowed = [rows for rows in self.rows.values() if rows.is_copy]
        for rows in narrowed:
            rows.become_whole()
        if collective and not all(rows.is_whole for rows in narrowed):
            self.pack_plainly()
            for gather, _ in self._gathers:
                gather.forget_plans()
            self._gather_rows(narrowed)
        for buckets in self._buckets:
            buckets.close()

    def _stepped_by(self, optimizer: Optimizer) -> "_Stepped":
        """The rows of the trained parameters of an optimizer, in its order."""
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        key = list(map(id, trained))
        known = self._stepped.get(optimizer)
        if known is None or known.key != key:
            members = [self.rows[p] for p in trained if p in self.rows]
            whole = [rows for rows in members if rows.is_whole]
            known = _Stepped(key, whole, self._by_gather(members))
            self._stepped[optimizer] = known
        return known


@dataclass(frozen=True)
class _Stepped:
    """Rows on which an optimizer has stepped."""

    key: list[int]
    """The trained parameters of the optimizer."""
    whole: list[OwnedRows]
    """Those of parameters that this rank owns whole."""
    divided: list[tuple[RowGather, list[OwnedRows]]]
    """The others, by the group that gathers them."""
