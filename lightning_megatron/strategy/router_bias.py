"""When routers' biases are updated (`layers.experts.bias`), and by whose counts.

An update follows each step that is taken of the optimizer that holds the router's weight. Where a
step is left out (a loss scale that is too large, `NumberGuard`), the weights stay as they are, and
so does the bias; the counts are dropped. A batch that is undone and run again is counted once.
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.experts.bias import forget_counts, update_biases
from lightning_megatron.layers.experts.router import Router, RouterStatistics
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.topology.axis import Axis


class RouterBias:
    """Updates the biases of this rank's routers.

    Args:
        parallel: module on its layout. Each rank of a stage holds the stage's routers, and counts
            the choices of its own tokens; tokens differ over the loss axis and tp.

    Raises:
        ConfigError: several stages share a router with a bias.
    """

    def __init__(self, parallel: ParallelModule) -> None:
        topology, trunk = parallel.topology, parallel.trunk
        self._all = [part for part in parallel.module.modules() if isinstance(part, Router)]
        self._routers = _with_bias(parallel.module)
        raise_if_any(self._shared(parallel))
        inside = set() if trunk is None else set(trunk.modules())
        everywhere = trunk is None or topology.pp.size == 1
        self._inside = [r for r in self._routers if everywhere or r in inside]
        self._outside = [r for r in self._routers if not (everywhere or r in inside)]
        self._axes = (topology.tp, topology.loss)
        self._pp = topology.pp
        self.forget()

    def _shared(self, parallel: ParallelModule) -> list[str]:
        """Problems of routers that several stages share."""
        roles = {role.parameter: role for role in parallel.gradients.roles if role.tied_ranks}
        return [
            f"{roles[router.weight].name}: pipeline ranks {roles[router.weight].tied_ranks} share "
            "the router, and each would move its bias by the tokens that it sees alone; nearest "
            "valid: a mixture for each block, or bias_update=0"
            for router in self._routers
            if router.weight in roles
        ]

    def forget(self) -> None:
        """Drop what was counted since the last update."""
        forget_counts(self._routers)

    def counted(self) -> list[tuple[Tensor | None, RouterStatistics]]:
        """Return what all routers have counted, to be given to `return_to`."""
        return [(r.step_counts_e, r.statistics.now()) for r in self._all]

    def return_to(self, counted: Sequence[tuple[Tensor | None, RouterStatistics]]) -> None:
        """Undo what was counted since."""
        for router, (of_step, statistics) in zip(self._all, counted, strict=True):
            router.step_counts_e, router.statistics = of_step, statistics.now()

    def after_step(self, optimizer: Optimizer, *, taken: bool) -> None:
        """Update the biases after a step; collective over the ranks of a stage.

        Args:
            optimizer: whose step it was.
            taken: whether it was not left out.
        """
        if not self._routers:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for routers, axes in ((self._inside, self._axes), (self._outside, (*self._axes, self._pp))):
            mine = [r for r in routers if id(r.weight) in stepped and r.weight.requires_grad]
            if taken:
                update_biases(mine, partial(_sum, axes))
            else:
                forget_counts(mine)


def _with_bias(module: nn.Module) -> list[Router]:
    return [
        child for child in module.modules() if isinstance(child, Router) and child.bias is not None
    ]


def _sum(axes: Sequence[Axis], counts: Tensor) -> Tensor:
    for axis in axes:
        if axis.group is not None:
            dist.all_reduce(counts, group=axis.group)
    return counts
