"""Parameters that only an optimizer knows: of a list, or of a layer that was added in mid-run.

The layout is made from the module, so it has no place for them. They are what parameters outside of
a pipeline's trunk are: whole on every rank, with a gradient that is averaged over the data-parallel
ranks and added up over the stages. Their values are those of rank 0.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.strategy.run import Run
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.whole.stage_weights import StageTensor


@memory_of_parts
class OptimizerParameters:
    """Gives a role to every parameter of an optimizer.

    Args:
        run: with the optimizers.
        changed: called with those whose gradients have become means over several ranks.
    """

    def __init__(self, run: Run, changed: Callable[[], None]) -> None:
        self._run = run
        self._changed = changed
        self._found: dict[nn.Parameter, str] = {}

    def begin(self) -> None:
        """Learn of what is added to the optimizers from now on."""
        for optimizer in optimizers_of_users(self._run):
            self._learn_from(optimizer)

    def follow(self) -> None:
        """Go to another layout with the module."""
        self._run.parallel.gradients.know_optimizers(self._found)

    def know(self) -> None:
        """Give the parameters that have no role one; collective over all processes."""
        found = self._found = self._unknown()
        if self._run.world_size > 1:
            self._compare(found)
            for parameter in found:
                values = parameter.detach().contiguous()
                dist.broadcast(values, src=0)
                with torch.no_grad():
                    parameter.copy_(values)
        self._run.parallel.gradients.know_optimizers(found)

    def stop(self) -> None:
        """Let optimizers be what they were."""
        self._found = {}
        for optimizer in optimizers_of_users(self._run):
            vars(optimizer).pop("add_param_group", None)

    def _learn_from(self, optimizer: Optimizer) -> None:
        add = optimizer.add_param_group

        @wraps(add)
        def add_and_know(param_group: dict[str, Any]) -> None:
            add(param_group)
            self.know()
            self._changed()

        vars(optimizer)["add_param_group"] = add_and_know

    def _unknown(self) -> dict[nn.Parameter, str]:
        """Parameters that have no place on the layout, and their names."""
        run, parallel = self._run, self._run.parallel
        known: set[Tensor] = set(parallel.gradients.own_parameters)
        if parallel.trunk is not None:
            known |= set(parallel.trunk.parameters())  # an empty stage has a placeholder
        names: Mapping[Any, str] = {p: name for name, p in run.module.named_parameters()}
        every = (p for o in run.optimizers for group in o.param_groups for p in group["params"])
        found = dict.fromkeys(p for p in every if not isinstance(p, StageTensor) and p not in known)
        return {p: names.get(p, f"optimizer_parameters.{place}") for place, p in enumerate(found)}

    def _compare(self, found: Mapping[nn.Parameter, str]) -> None:
        """Refuse parameters that not all ranks have, or not where they compute."""
        device = self._run.root_device
        mine = [(name, tuple(p.shape), str(p.dtype)) for p, name in found.items()]
        for rank, theirs in enumerate(Peers(self._run.host_group).all_gather(mine)):
            if theirs != mine:
                raise ConfigError(
                    f"an optimizer has parameters that are not the module's, {_text(mine)}, and on "
                    f"rank {rank} {_text(theirs)}; nearest valid: the same on all ranks, or "
                    "parameters of the module"
                )
        away = [name for p, name in found.items() if p.device.type != device.type]
        if away:
            raise ConfigError(
                f"{', '.join(away)}: a parameter that only an optimizer knows is not on {device}, "
                "and its gradient could not be averaged; nearest valid: an attribute of the module "
                "(torch.nn.ParameterList for a list), which brings it there"
            )


def optimizers_of_users(run: Run) -> list[Any]:
    """Return the optimizers, and what Lightning gives to users in their place."""
    shown = run.module.optimizers(use_pl_optimizer=True) if run.optimizers else []
    return [*run.optimizers, *(shown if isinstance(shown, list) else [shown])]


def _text(found: list[tuple[str, tuple[int, ...], str]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape, _ in found) or "none"
