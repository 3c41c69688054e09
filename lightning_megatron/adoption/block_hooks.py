"""Hooks of others on blocks of which each cp rank computes a part of the sequences.

A block gets parts, and so would its hooks. Those of torch and of this library want them, as FSDP2's
do. All others (a user's, and those by which transformers collects hidden states) are called around
the block with the whole sequences that its caller sees. Hooks on what is inside of a block cannot
be: `problems` names them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_OURS = ("torch.", "lightning_megatron.")
_Args = tuple[Any, ...]


def call_with_hooks(
    block: nn.Module, args: _Args, kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Call a block on parts, and its hooks on whole sequences.

    Args:
        block: the block.
        args: whole arguments.
        kwargs: the same, by name.
        call: function that calls the block with whole arguments and returns whole results.
    """
    for key, hook in _of_others(block._forward_pre_hooks).items():
        if key in block._forward_pre_hooks_with_kwargs:
            changed = hook(block, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        elif (found := hook(block, args)) is not None:
            args = found if isinstance(found, tuple) else (found,)
    after = _of_others(block._forward_hooks)
    with _without_hooks(block):
        out = call(*args, **kwargs)
    for key, hook in after.items():
        with_kwargs = key in block._forward_hooks_with_kwargs
        found = hook(block, args, kwargs, out) if with_kwargs else hook(block, args, out)
        out = out if found is None else found
    return out


def problems(blocks: Mapping[str, nn.Module]) -> list[str]:
    """Hooks of others that would see a cp rank's positions only, each by module and name."""
    found = []
    for name, block in blocks.items():
        for path, module in block.named_modules(prefix=name):
            kinds: Sequence[Any] = [module._backward_hooks, module._backward_pre_hooks]
            if module is not block:
                kinds = [*kinds, module._forward_hooks, module._forward_pre_hooks]
            for hook in (hook for hooks in kinds for hook in _of_others(hooks).values()):
                if not _module_of(hook).startswith("transformers."):
                    found.append(f"{path} ({getattr(hook, '__qualname__', hook)})")
    return found


@contextmanager
def _without_hooks(block: nn.Module) -> Iterator[None]:
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for hooks in (block._forward_pre_hooks, block._forward_hooks):
        if others := _of_others(hooks):
            kept.append((hooks, dict(hooks)))
            for key in others:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, all_of_them in kept:
            hooks.clear()
            hooks.update(all_of_them)


def _of_others(hooks: Mapping[int, Any]) -> dict[int, Any]:
    return {k: hook for k, hook in hooks.items() if not _module_of(hook).startswith(_OURS)}


def _module_of(hook: Any) -> str:
    """Name of the module in which a hook was written."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
