"""Hooks of optimizers before and after their steps."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as of_torch


class StepHooks:
    """Hooks that torch calls around a step of an optimizer (2.11-2.13).

    Torch calls them in the wrapper of the class's ``step``, and so next to the step itself. Here
    they are called where the caller says.

    Private: `Optimizer._optimizer_step_pre_hooks` and its like, and those of all optimizers.

    Args:
        optimizer: whose hooks they are.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def before(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Call the hooks before a step with its arguments, and return those that it is to have."""
        args: Any = (self._optimizer,)
        own = getattr(self._optimizer, _BEFORE, {})
        for hook in (*of_torch._global_optimizer_pre_hooks.values(), *own.values()):
            found = hook(self._optimizer, args, kwargs)
            if found is None:
                continue
            if not (isinstance(found, tuple) and len(found) == 2):
                raise RuntimeError(
                    f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {found}"
                )
            args, kwargs = found
        return {**kwargs, **({"closure": args[1]} if len(args) > 1 else {})}

    def after(self, kwargs: dict[str, Any]) -> None:
        """Call the hooks after a step."""
        own = getattr(self._optimizer, _AFTER, {})
        for hook in (*own.values(), *of_torch._global_optimizer_post_hooks.values()):
            hook(self._optimizer, (self._optimizer,), kwargs)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which a step calls none of them."""
        every: Any = (of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks)
        of_all = [dict(hooks) for hooks in every]
        held = vars(self._optimizer)
        own = {name: held[name] for name in (_BEFORE, _AFTER) if name in held}
        for hooks in every:
            hooks.clear()
        held.update({name: OrderedDict() for name in own})
        try:
            yield
        finally:
            held.update(own)
            for hooks, kept in zip(every, of_all, strict=True):
                hooks.update(kept)


def step_hooks(optimizer: Optimizer) -> StepHooks | None:
    """The hooks around steps of an optimizer; None if torch would call none (2.11-2.13)."""
    there = (
        getattr(optimizer, _BEFORE, None)
        or getattr(optimizer, _AFTER, None)
        or of_torch._global_optimizer_pre_hooks
        or of_torch._global_optimizer_post_hooks
    )
    if not there or not getattr(type(optimizer).step, "hooked", False):
        return None
    return StepHooks(optimizer)


_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
