"""ZeRO 0 to 2: whole, plain parameters, gradients in buckets, rows for the optimizer.

The parameters that a module shows are what they would be under ``DistributedDataParallel``, before,
in and after every step, so a module may do with them what it likes: write to them, read them
outside of any forward, copy or save them, use them on one rank only. What happens around a step::

    backward       buckets of gradients are reduced as they fill     `parallel.grad_buckets`
    optimizer      steps on the rows that this rank owns             `parallel.owned_rows`
    after it       rows are gathered into the parameters, by bucket  `parallel.row_gather`

Gradients reach their owners only (reduce-scatter), and ``.grad`` is None after the backward. Where
somebody may look at them, the strategy calls `show_gradients`: the mean is then made whole
(all-reduce) and ``.grad`` holds it, as under ``DistributedDataParallel``; owners step on their rows
of it.

Under ``bf16-mixed`` and its like the parameters that are trained are narrow while a run lasts, and
the rows float32. What is frozen when the run begins stays as it is (autocast narrows what it
multiplies with), so that a network which is updated by hand, such as a moving average, keeps its
precision.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.comm.scratch import Scratch
from lightning_megatron.optim.sharded_step import RowShard
from lightning_megatron.parallel.grad_buckets import GradientBuckets, ReductionGroups
from lightning_megatron.parallel.owned_rows import OwnedRows
from lightning_megatron.parallel.row_gather import RowCodec, RowGather
from lightning_megatron.parallel.zero import ComputeTypes, ZeroDataParallel, has_no_rows
from lightning_megatron.topology.mesh import Topology


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
        self._divides = zero > 0 and topology.fsdp.size > 1
        self._offload = offload
        self._buckets: list[GradientBuckets] = []
        self._pending: set[int] = set()
        """Stages with a reduction under way."""
        self._gather: RowGather | None = None
        self._blocked = False
        self._whole = not self._divides
        self._members: WeakKeyDictionary[Optimizer, tuple[list[int], list[OwnedRows]]] = (
            WeakKeyDictionary()
        )
        self._reduced: set[nn.Parameter] = set()
        self.rows: dict[nn.Parameter, OwnedRows] = {}
        self.lends: Mapping[nn.Parameter, RowShard] = self.rows

    def own(self, parameters: Collection[nn.Parameter], *, narrow: bool) -> None:
        """Give this rank's optimizer its rows, and the layers narrow parameters.

        Args:
            parameters: with their values; those that have rows already are left alone.
            narrow: whether they are computed with in the format of the computation.
        """
        shard = self._topology.fsdp
        for parameter in parameters:
            if parameter in self.rows or has_no_rows(parameter):
                continue
            low = self._types.parameters
            narrows = narrow and low is not None and parameter.requires_grad
            narrows = narrows and parameter.is_floating_point() and parameter.dtype != low
            if not (narrows or self._divides or self._offload):
                continue
            at_rest = parameter.dtype
            self.rows[parameter] = OwnedRows(
                parameter,
                shard.size if self._divides else 1,
                shard.rank if self._divides else 0,
                wide=at_rest if narrows else None,
                narrow=low if narrows else None,
                summed_in=self._types.reduction,
                device=torch.device("cpu") if self._offload else None,
            )

    def reduce(
        self, stages: Sequence[Sequence[nn.Parameter]], names: Mapping[nn.Parameter, str]
    ) -> None:
        """Average the gradients of these parameters; collective.

        Args:
            stages: the parameters of each stage of this rank, in the order of the network.
            names: of the parameters.
        """
        topology = self._topology
        everyone = topology.new_group("loss")
        if everyone is None:
            return
        groups, scratch = ReductionGroups(everyone=everyone), Scratch()
        if self._divides:
            hybrid = topology.dp_replicate.size > 1
            shard = topology.new_group("fsdp") if hybrid else everyone
            copies = topology.new_group("dp_replicate") if hybrid else None
            levels = topology.levels("fsdp") if topology.device.type == "cpu" else None
            groups = replace(groups, shard=shard, replicate=copies, levels=levels)
            assert shard is not None
            self._gather = RowGather(shard, topology.loss.meter, scratch=scratch, levels=levels)
        self._buckets = [
            GradientBuckets(
                parameters,
                groups,
                rows=self.rows,
                names=names,
                reduction=self._types.reduction,
                meter=topology.loss.meter,
                scratch=scratch,
            )
            for parameters in stages
        ]
        self._reduced = {parameter for parameters in stages for parameter in parameters}
        self.show_gradients(self._whole)

    def pack_with(self, parameter: nn.Parameter, codec: RowCodec) -> None:
        """Gather the rows of a parameter by a codec from now on; it is to look so already."""
        if self._gather is not None and not self.rows[parameter].is_whole:
            self._gather.codecs[parameter] = codec
            self._gather.forget_plans()
            self.rows[parameter].round_trip = codec.round_trip

    def pack_plainly(self) -> None:
        """Gather all rows by a cast again."""
        if self._gather is not None:
            for parameter in self._gather.codecs:
                self.rows[parameter].round_trip = None
            self._gather.codecs.clear()
            self._gather.forget_plans()

    @override
    def show_gradients(self, whole: bool) -> None:
        self._whole = whole or not self._divides
        for buckets in self._buckets:
            buckets.whole = self._whole
        for rows in self.rows.values():
            rows.shows_gradient = self._whole or rows.parameter not in self._reduced

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
            self._buckets[stage].arm()
            self._pending.add(stage)

    @override
    def after_weights(self, stage: int, *, last: bool) -> None:
        if stage < len(self._buckets) and self._reduces(last):
            self._finish_pending(stage)
            self._buckets[stage].start()
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
        members = self._stepped_by(optimizer)
        for rows in members:
            if rows.is_whole:
                rows.write_back()
        divided = [rows for rows in members if not rows.is_whole]
        if self._gather is not None and divided:
            self._gather.gather(divided)

    @override
    def gather_all(self) -> None:
        for rows in self.rows.values():
            if rows.is_whole:
                rows.write_back()
        divided = [rows for rows in self.rows.values() if not rows.is_whole]
        if self._gather is not None and divided:
            self._gather.gather(divided)

    @override
    def come_to_rest(self) -> None:
        """No-op: parameters are whole at all times."""

    @override
    def resume(self) -> None:
        for rows in self.rows.values():
            rows.part_again()

    @override
    def release(self, *, collective: bool = True) -> None:
        narrowed = [rows for rows in self.rows.values() if rows.is_copy]
        for rows in narrowed:
            rows.become_whole()
        divided = [rows for rows in narrowed if not rows.is_whole]
        if collective and self._gather is not None and divided:
            self.pack_plainly()
            self._gather.forget_plans()
            self._gather.gather(divided)
        for buckets in self._buckets:
            buckets.close()

    def _stepped_by(self, optimizer: Optimizer) -> list[OwnedRows]:
        """The rows of the trained parameters of an optimizer, in its order."""
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        key = list(map(id, trained))
        known = self._members.get(optimizer)
        if known is None or known[0] != key:
            known = key, [self.rows[p] for p in trained if p in self.rows]
            self._members[optimizer] = known
        return known[1]
