"""Several callbacks as one.

`CallbackGroup` passes every hook to its members, in their order, and keeps the state of each under
its own key, as if each were in the Trainer's list by itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.errors import ConfigError


class CallbackGroup(pl.Callback):
    """Callback that passes every hook to its members.

    Args:
        members: callbacks of different classes or state keys.

    Raises:
        ConfigError: two members would store their state under the same key.
    """

    def __init__(self, members: Sequence[pl.Callback]) -> None:
        keys = [member.state_key for member in members]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(
                    f"members: {key} occurs {keys.count(key)} times; must occur once; nearest "
                    "valid: one of them"
                )
        self.members = tuple(members)
        self._of_hook = {name: _overriding(name, self.members) for name in HOOKS}

    def member(self, kind: type[pl.Callback]) -> Any:
        """Member of this class; None without one."""
        return next((m for m in self.members if isinstance(m, kind)), None)

    @override
    def state_dict(self) -> dict[str, Any]:
        states = {member.state_key: member.state_dict() for member in self.members}
        return {key: state for key, state in states.items() if state}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for member in self.members:
            if member.state_key in state_dict:
                member.load_state_dict(state_dict[member.state_key])


def members_of(trainer: pl.Trainer) -> Iterator[pl.Callback]:
    """Callbacks of a Trainer, with the members of groups one by one."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        yield from getattr(callback, "members", (callback,))


def _overriding(name: str, members: Sequence[pl.Callback]) -> list[pl.Callback]:
    """Members that override this hook."""
    inherited = getattr(pl.Callback, name)
    return [member for member in members if getattr(type(member), name) is not inherited]


def _forward(name: str) -> Any:
    def hook(self: CallbackGroup, *args: Any, **kwargs: Any) -> None:
        for member in self._of_hook[name]:
            getattr(member, name)(*args, **kwargs)

    hook.__name__ = name
    hook.__doc__ = f"Pass ``{name}`` to the members."
    return hook


HOOKS = tuple(
    name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
"""Names of all hooks of Lightning."""
for _name in HOOKS:
    setattr(CallbackGroup, _name, _forward(_name))
