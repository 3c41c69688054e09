"""The distribution of a state_dict over the modules, as ``Module.load_state_dict`` does it.

torch walks through the modules. Each module runs its pre-hooks, takes the entries under its prefix
in ``_load_from_state_dict`` (which classes override to accept the names of earlier versions),
passes the rest to its children and runs its post-hooks. `ModuleState` does the same for a module
that is sharded over ranks. It copies nothing yet: without an override, an entry of a checkpoint is
only noted, and later read straight into this rank's shard.

A module that overrides ``_load_from_state_dict`` has whole parameters during that call, one module
at a time; this rank's shard of them is kept.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.state_dicts import (
    IncompatibleKeys,
    first_load_hook,
    is_fsdps,
    loads_itself,
)
from lightning_megatron.checkpoint.chunks import Chunk, clean_name, tensors_of
from lightning_megatron.checkpoint.load.lazy_tensor import LazyTensor
from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.whole.memory import parts_of_weights

_EXTRA = "_extra_state"


def edits_loaded(module: nn.Module) -> bool:
    """Return whether a module or one in it changes a state_dict while it is loaded."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or any(
        loads_itself(child) or not all(map(is_fsdps, child._load_state_dict_pre_hooks.values()))
        for child in module.modules()
    )


@parts_of_weights
class ModuleState:
    """The entries of a state_dict that each module takes.

    Tensors of the module do not change here. Other attributes may change at once, by the module's
    own ``_load_from_state_dict``.

    Args:
        module: the module as this rank holds it.
        chunks: chunks of its parameters and persistent buffers (`own_chunks`).
        names: canonical name of every parameter.
        versions: versions of the modules that wrote the state, by name, where not 1; None if
            unknown.

    Attributes:
        taken: for each chunk, its entry: one of a checkpoint, or a whole tensor.
        parts: for each chunk that is already cut, this rank's values.
        missing: names of the module that the state lacks.
        unplaced: names of the state that no module of this rank takes.
        problems: faults, one sentence each.
        misfits: shapes in the state and in the module of tensors that do not fit, by name.
        resized: buffers that got another shape.
    """

    def __init__(
        self,
        module: nn.Module,
        chunks: Mapping[str, Chunk],
        names: Mapping[Tensor, str],
        versions: Mapping[str, int | str] | None,
    ) -> None:
        self._module = module
        self._chunks = chunks
        self._names = names
        self._versions = versions
        self._top: Mapping[str, Any] = {}
        self._paths = {m: clean_name(f"{n}.") if n else "" for n, m in module.named_modules()}
        self._unexpected: list[str] = []
        self._foreign: list[str] = []
        self._messages: list[str] = []
        self._extra: list[tuple[nn.Module, Any]] = []
        self._hooks: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.taken: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.misfits: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.resized: list[tuple[nn.Module, str, Tensor]] = []

    @property
    def unplaced(self) -> list[str]:
        """Names of the state that no module of this rank takes."""
        return [*self._unexpected, *self._foreign]

    @property
    def has_hooks(self) -> bool:
        """Whether a module has post-hooks."""
        return bool(self._hooks)

    def find(self, state: Mapping[str, Any]) -> None:
        """Distribute a state_dict over the modules."""
        self._top = state
        self._walk(self._module, dict(state), "", post_hooks=True)

    def find_below(self, module: nn.Module, state: dict[str, Any], prefix: str) -> IncompatibleKeys:
        """Distribute a state_dict over one of the modules, whose own post-hooks torch runs."""
        self._top = state if module is self._module else {}
        known = len(self.missing), len(self._unexpected)
        self._walk(module, state, prefix, post_hooks=False)
        return IncompatibleKeys(self.missing[known[0] :], self._unexpected[known[1] :])

    def finish(self) -> None:
        """Set extra state and resized buffers, and run the post-hooks."""
        for module, value in self._extra:
            module.set_extra_state(value)
        for module, name, value in self.resized:
            module._buffers[name] = value
        for module, hook in self._hooks:
            hook(module, IncompatibleKeys(self.missing, self._unexpected))

    def _walk(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *, post_hooks: bool
    ) -> None:
        metadata: dict[str, Any] = {}
        if self._versions is not None:
            metadata["version"] = self._versions.get(self._paths[module].removesuffix("."), 1)
        given: tuple[Any, ...] = metadata, True, self.missing, [], self._messages
        if loads_itself(module):
            self._take_whole(module, state, prefix, given)
        else:
            for hook in module._load_state_dict_pre_hooks.values():
                hook(state, prefix, *given)
            self._take(module, state, prefix)
        self.problems += [m for m in self._messages if m not in self.problems]
        children = {
            clean_name(f"{prefix}{name}."): child
            for name, child in module._modules.items()
            if child is not None
        }
        self._find_unexpected(module, state, prefix, children)
        for child_prefix, child in children.items():
            below = {k: v for k, v in state.items() if k.startswith(child_prefix)}
            if isinstance(child, RemoteItem):
                self._foreign += below
            else:
                self._walk(child, below, child_prefix, post_hooks=True)
        if post_hooks:
            hooks = module._load_state_dict_post_hooks.values()
            self._hooks += [(module, hook) for hook in hooks if not is_fsdps(hook)]

    def _find_unexpected(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, children: Mapping[str, Any]
    ) -> None:
        own = tensors_of(module)
        for key in state:
            if not key.startswith(prefix) or any(key.startswith(child) for child in children):
                continue
            rest = key[len(prefix) :]
            extra = rest == _EXTRA and _takes_extra_state(module)
            if not extra and (rest not in own or self._is_shadowed(own[rest], state[key])):
                self._unexpected.append(key)

    def _is_shadowed(self, tensor: Tensor, value: Any) -> bool:
        """Return whether a shared parameter takes other values than these."""
        taken = self.taken.get(self._names.get(tensor, ""))
        if not isinstance(taken, LazyTensor) or not isinstance(value, LazyTensor):
            return False
        return taken.source != value.source and not torch.equal(taken, value)

    def _take(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        for name, tensor in tensors_of(module).items():
            owner = self._owner(module, name, tensor)
            found = self._lookup(prefix + name, owner, state)
            if found is None:
                self.missing.append(prefix + name)
            elif not isinstance(found, Tensor):
                self.problems.append(
                    f"state_dict[{prefix + name!r}] is a {type(found).__name__}; nearest valid: a "
                    "tensor"
                )
            elif owner not in self.taken and not self._misfit(prefix + name, found, owner):
                self.taken[owner] = found
        if _takes_extra_state(module):
            if (key := prefix + _EXTRA) in state:
                self._extra.append((module, state[key]))
            else:
                self.missing.append(key)

    def _lookup(self, key: str, owner: str, state: Mapping[str, Any]) -> Any:
        # What stages share has to come from one entry; and one of its names is enough.
        shared = self._chunks[owner].aliases
        names = (owner, key, *shared) if shared else (key,)
        return next((s[n] for n in names for s in (state, self._top) if n in s), None)

    def _owner(self, module: nn.Module, name: str, tensor: Tensor) -> str:
        return self._names.get(tensor, self._paths[module] + name)

    def _misfit(self, key: str, value: Tensor, owner: str) -> bool:
        chunk = self._chunks[owner]
        if chunk.tensor.is_meta:
            self.problems.append(
                f"parameter {key!r} has no memory (meta device); nearest valid: materialise it "
                "before loading"
            )
        elif tuple(value.shape) != chunk.full_shape:
            self.misfits[key] = tuple(value.shape), chunk.full_shape
        else:
            return False
        return True

    def _take_whole(
        self, module: nn.Module, state: dict[str, Any], prefix: str, given: tuple[Any, ...]
    ) -> None:
        """Run a module's own ``_load_from_state_dict`` on whole tensors, and keep our shards."""
        known, own = dict(state), tensors_of(module)
        with _whole_tensors(module, self._chunks_of(module)) as stand_ins:
            before = {name: value._version for name, value in stand_ins.items()}
            type(module)._load_from_state_dict(module, state, prefix, *given)
            after = tensors_of(module)
        for name, tensor in own.items():
            value, stand_in = after.get(name), stand_ins[name]
            if value is None or (value is stand_in and value._version == before[name]):
                continue
            self._keep(module, name, value.detach(), tensor)
            owner = self._owner(module, name, tensor)
            stored = known.get(prefix + name)
            if owner in self.parts and isinstance(stored, LazyTensor):
                self.taken[owner] = stored  # whose optimizer state it is

    def _chunks_of(self, module: nn.Module) -> dict[str, Chunk]:
        own = tensors_of(module).items()
        return {name: self._chunks[self._owner(module, name, t)] for name, t in own}

    def _keep(self, module: nn.Module, name: str, value: Tensor, tensor: Tensor) -> None:
        owner = self._owner(module, name, tensor)
        chunk = self._chunks[owner]
        if tuple(value.shape) != chunk.full_shape:
            if name in module._buffers:
                self.resized.append((module, name, value))
            else:
                self.misfits[owner] = tuple(value.shape), chunk.full_shape
        elif not _is_held(tensor, chunk) and value.is_floating_point() and value.isnan().any():
            self.problems.append(
                f"{type(module).__name__}._load_from_state_dict, parameter {owner!r}: it keeps "
                "values that the module had, which this rank does not hold; nearest valid: values "
                "for the whole parameter, or zero of at most 2 with tp=1"
            )
        else:
            self.parts[owner] = chunk.cut(value).clone()


def _takes_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _is_held(tensor: Tensor, chunk: Chunk) -> bool:
    """Return whether this rank has all values of a tensor."""
    return not isinstance(tensor, DTensor) and tuple(tensor.shape) == chunk.full_shape


@contextmanager
def _whole_tensors(module: nn.Module, chunks: Mapping[str, Chunk]) -> Iterator[dict[str, Tensor]]:
    """Give a module whole tensors in place of its own; unknown values are NaN."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    stand_ins: dict[str, Tensor] = {}
    for name, tensor in tensors_of(module).items():
        chunk = chunks[name]
        if _is_held(tensor, chunk):
            whole = tensor.detach().clone()
        else:
            like = chunk.tensor
            whole = torch.zeros(chunk.full_shape, dtype=like.dtype, device=like.device)
            if whole.is_floating_point():
                whole.fill_(torch.nan)
        if name in parameters:
            stand_in = nn.Parameter(whole, requires_grad=False)
            stand_ins[name] = module._parameters[name] = stand_in
        else:
            stand_ins[name] = module._buffers[name] = whole
    try:
        yield stand_ins
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


@contextmanager
def redirected(
    module: nn.Module, take: Callable[[nn.Module, dict[str, Any], str], IncompatibleKeys]
) -> Iterator[None]:
    """Have ``load_state_dict`` of a module, or of one in it, call ``take`` instead of copying.

    Modules that override it pass the final state_dict to torch's. That calls
    ``_load_from_state_dict`` of the module first and then of its children, which are hidden from it
    here, as ``take`` has handled them.
    """

    def stand_in(child: nn.Module) -> Callable[..., None]:
        def load(
            state: dict[str, Any],
            prefix: str,
            metadata: Any,
            strict: bool,
            missing: list[str],
            unexpected: list[str],
            messages: list[str],
        ) -> None:
            found = take(child, state, prefix)
            missing += found.missing_keys
            unexpected += found.unexpected_keys
            children, child._modules = child._modules, {}

            def restore(*_: Any) -> None:
                child._modules = children
                handle.remove()

            handle = first_load_hook(child, restore)

        return load

    children = list(module.modules())
    for child in children:
        child.__dict__["_load_from_state_dict"] = stand_in(child)
    try:
        yield
    finally:
        for child in children:
            child.__dict__.pop("_load_from_state_dict", None)
