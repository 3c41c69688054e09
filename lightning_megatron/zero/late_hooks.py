"""Users' hooks on gradients that are added up (``register_post_accumulate_grad_hook``).

torch calls such a hook in the backward, when the gradient of a parameter is complete in one
process. Here it is not: other ranks and microbatches have their part. So hooks are put off until
the gradient is what one process would have, at the end of the backward. A hook that steps and
clears the gradient (an optimizer in the backward) is right so, and saves no memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron._torch.dtensor import hooks_of_sums, with_hooks_of_sums
from lightning_megatron._torch.graphs import EnableTorchFunction
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.grad_buckets import OwnHook
from lightning_megatron.zero.gradients import GradientSet, ParameterRole


@dataclass
class _Late(OwnHook):
    """A hook that is put off; in its place, so that its handle removes it."""

    hook: Callable[[Any], None]
    is_due: bool = False
    """Whether torch has called it since it was called last."""

    def __call__(self, parameter: Any) -> None:
        self.is_due = True


@memory_of_parts
class LateHooks:
    """Users' hooks on the gradients of a module.

    Args:
        gradients: those of all parameters of this rank.
    """

    def __init__(self, gradients: GradientSet) -> None:
        self._gradients = gradients
        self._roles: Sequence[ParameterRole] = ()
        self._parameters: list[nn.Parameter] = []
        self._with_hooks: list[nn.Parameter] = []

    def find(self) -> None:
        """Put off what has been registered since."""
        roles = self._gradients.roles
        if roles is not self._roles:
            self._roles, self._parameters = roles, self._gradients.parameters
        found = with_hooks_of_sums(self._parameters)
        self._with_hooks = [p for p in found if self._put_off(p)]

    @staticmethod
    def _put_off(parameter: nn.Parameter) -> bool:
        hooks = hooks_of_sums(parameter)
        for key, hook in hooks.items():
            if not isinstance(hook, OwnHook):
                hooks[key] = _Late(hook)
        return any(isinstance(hook, _Late) for hook in hooks.values())

    def call(self, *, accumulates: bool) -> None:
        """Call the hooks of parameters that have got a gradient, on all ranks alike; collective.

        Args:
            accumulates: whether a later backward adds to the gradients of this one.

        Raises:
            ConfigError: it does, and only then are gradients brought together.
        """
        if not self._with_hooks:
            return
        members = {id(p) for p in self._with_hooks}
        roles = [r for r in self._gradients.roles if id(r.parameter) in members]
        if accumulates and any(map(self._gradients.is_spread, roles)):
            raise ConfigError(
                "register_post_accumulate_grad_hook on a parameter, accumulate_grad_batches: "
                "gradients are averaged over ranks once for all batches of a step, so that there "
                "is nothing that the hook could see after the others; nearest valid: "
                "accumulate_grad_batches=1, or on_before_optimizer_step"
            )
        topology = self._gradients.topology
        for axes in topology.all_axes:
            self._agree([r for r in roles if r.axes(topology) is axes], axes.mean.group)
        self._agree([r for r in roles if r.outside], topology.pp.group)
        for group, shared in self._gradients.shared_by_stages:
            self._agree([r for r in shared if id(r.parameter) in members], group)
        for role in roles:
            for late in _late(role.parameter):
                is_due, late.is_due = late.is_due, False
                if is_due:
                    with torch.no_grad(), EnableTorchFunction():
                        late.hook(role.parameter)

    def _agree(self, roles: Sequence[ParameterRole], group: dist.ProcessGroup | None) -> None:
        """Have hooks called that are due on any rank of a group; collective."""
        if not roles or group is None:
            return
        held = [_late(role.parameter) for role in roles]
        due = torch.tensor([any(late.is_due for late in hooks) for hooks in held])
        flags = due.to(self._gradients.device, torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        for hooks, is_due in zip(held, flags.bool().tolist(), strict=True):
            for late in hooks:
                late.is_due = is_due

    def close(self) -> None:
        """Let torch call the hooks again."""
        for parameter in self._with_hooks:
            hooks = hooks_of_sums(parameter)
            for key, hook in hooks.items():
                if isinstance(hook, _Late):
                    hooks[key] = hook.hook
        self._with_hooks = []


def _late(parameter: nn.Parameter) -> list[_Late]:
    return [hook for hook in hooks_of_sums(parameter).values() if isinstance(hook, _Late)]
