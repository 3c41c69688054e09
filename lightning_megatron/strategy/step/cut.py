"""Cutting a batch into microbatches, as many on every rank where ranks have to agree.

ZeRO 2 and 3 communicate in every microbatch, and so do mixtures whose experts are spread over ranks
with other samples, or in training balanced over them. Ranks may have batches of different sizes (at
the end of the data, or always, by a batch sampler that fills batches with tokens).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.comm.peers import Peers
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.pipeline.microbatch import (
    Microbatches,
    MicrobatchRule,
    SplitBatch,
    batch_size_of,
    split,
)
from lightning_megatron.topology.coordinates import experts_meet_samples
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.tuning.fit_memory import FittingMicrobatch


class BatchCut:
    """Cuts the batches of one module; made on all ranks alike, as they exchange what routers do.

    Args:
        module: the user's; its ``split_batch`` cuts in place of the rule, where it has one.
        parallel: the module on its layout.
        rule: how many pieces.
        fitting: finds the size of microbatches, in place of ``rule``.

    Attributes:
        experts_meet: whether experts get tokens of ranks that read different samples.
    """

    def __init__(
        self,
        module: nn.Module,
        parallel: ParallelModule,
        rule: MicrobatchRule,
        fitting: FittingMicrobatch | None = None,
    ) -> None:
        self._module = module
        self._data, self._topology = parallel.data, parallel.topology
        self._given = rule
        self._fitting = fitting
        self.experts_meet = experts_meet_samples(self._topology.degrees)
        self._balances_meet = _balances_over_samples(module, self._topology)

    def train(self, batch: Any) -> Microbatches:
        """Microbatches of a training batch; collective where their number has to be equal."""
        return self.alone(batch, self._common_count(batch, training=True))

    def evaluate(self, batch: Any) -> Microbatches:
        """Microbatches of a batch of another loop; collective where `train` would be."""
        return self.alone(batch, self._common_count(batch, training=False))

    def alone(self, batch: Any, at_least: int = 1) -> Microbatches:
        """Microbatches of a batch that runs without communication, or in a number that is known."""
        return split(batch, self._rule, self.own, at_least=at_least)

    @property
    def own(self) -> SplitBatch | None:
        """The module's own way to cut."""
        return getattr(self._module, "split_batch", None)

    @property
    def _rule(self) -> MicrobatchRule:
        return self._given if self._fitting is None else self._fitting.rule

    def _common_count(self, batch: Any, *, training: bool) -> int:
        """Number of microbatches that every rank needs, where they have to be equal; else 1."""
        together = self._data.communicates_every_microbatch or self.experts_meet
        if not (together or (training and self._balances_meet)):
            return 1
        rule = self._rule
        if rule.size is None:
            return rule.count(None)
        count, group = rule.count(batch_size_of(batch)), self._topology.batch.group
        if group is None:
            return count
        highest = torch.tensor(count, device=self._topology.device)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        return int(highest)


def _balances_over_samples(module: nn.Module, topology: Topology) -> bool:
    """Whether ranks that read different samples balance experts together; collective over pp."""
    if topology.batch.size == 1:
        return False
    balanced = any(
        isinstance(child, Router) and child.config.balance == "batch" for child in module.modules()
    )
    if topology.pp.size > 1:  # a stage without routers has as many microbatches as the others
        balanced = any(Peers.over(topology.pp).all_gather(balanced))
    return balanced
