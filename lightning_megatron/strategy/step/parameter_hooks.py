"""Hooks of the user's on parameters, which are called once a batch, with its gradients.

A backward of a microbatch calls what ``p.register_post_accumulate_grad_hook`` was given with the
gradients so far, of this rank's samples. So these hooks are taken off the parameters while a batch
runs backward, and called when its gradients are complete, those of the last layers first.

Cost: a look at each parameter in each step, far below a microsecond.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.strategy.code_inspection import is_users
from lightning_megatron.whole.memory import on_memory
from lightning_megatron.zero.gradients import GradientSet

_Hooks = dict[int, Callable[[Any], None]]


class ParameterHooks:
    """Hooks on accumulated gradients, from the beginning of a batch to the end of its backward.

    Args:
        gradients: those of all parameters of this rank.
    """

    def __init__(self, gradients: GradientSet) -> None:
        self._gradients = gradients
        self._held: list[tuple[Tensor, _Hooks]] = []

    @on_memory
    def hold(self) -> None:
        """Take the user's hooks off the parameters."""
        for role in reversed(self._gradients.roles):
            hooks: _Hooks | None = getattr(role.parameter, "_post_accumulate_grad_hooks", None)
            if not hooks:
                continue
            users = {key: hook for key, hook in hooks.items() if is_users(hook)}
            if users:
                self._held.append((role.parameter, users))
            for key in users:
                del hooks[key]

    @on_memory
    def release(self) -> None:
        """Put the hooks back."""
        for parameter, users in self._held:
            hooks: Any = parameter._post_accumulate_grad_hooks
            hooks.update(users)

    def call(self, *, is_complete: bool) -> None:
        """Put the hooks back, and call those of parameters that have a gradient.

        Args:
            is_complete: whether gradients are those of all ranks.

        Raises:
            ConfigError: they are this rank's, and there are hooks.
        """
        self.release()
        held, self._held = self._held, []
        if held and not is_complete:
            raise ConfigError(
                "register_post_accumulate_grad_hook, accumulate_grad_batches > 1 on several "
                "data-parallel ranks: gradients of a batch are those of this rank's samples until "
                "the last batch; nearest valid: on_before_optimizer_step, or "
                "accumulate_grad_batches=1"
            )
        for parameter, users in held:
            if parameter.grad is not None:
                for hook in users.values():
                    hook(parameter)
