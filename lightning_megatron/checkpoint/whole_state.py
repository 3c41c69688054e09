"""The whole state_dict of a sharded module, for hooks that look at it.

``on_save_checkpoint``, a ``state_dict`` that a module overrides, hooks on ``state_dict`` and a
``_save_to_state_dict`` of a layer may read, rename, drop, add and replace entries. Under a layout
that shards the module no rank has the whole entries. So every entry is a `LazyTensor`, under all
names of all stages; a use of its values gathers its parts from all ranks.

Gathering takes all ranks, but not all of them use the values. A rank whose hooks are done goes on
to `WholeState.conclude`, where it serves the gathers of the others until all have arrived. So no
rank waits for one that uses no values, as long as no other collective comes in between. The
state_dict that rank 0 leaves is the one that is saved, as rank 0 writes in plain Lightning.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron._torch.state_dicts import (
    first_state_hook,
    saves_itself,
    state_hooks,
    tree_any,
)
from lightning_megatron.checkpoint.chunks import (
    StateMapping,
    assemble,
    clean_name,
    describe,
    own_chunks,
    own_tensors,
    tensors_of,
    versions_of,
    whole,
)
from lightning_megatron.checkpoint.load.lazy_tensor import LazyCache, LazyTensor
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.unparallelize import is_whole
from lightning_megatron.whole.memory import parts_of_weights
from lightning_megatron.whole.stage_weights import StageTensor


@dataclass(frozen=True, kw_only=True)
class _Edited:
    """The state_dict of one rank as its hooks left it."""

    sources: Mapping[str, str | None]
    """Parameter or buffer of each entry, by name; None for any other value."""
    problems: tuple[str, ...]


@parts_of_weights
class WholeState:
    """The whole state_dict that hooks see while a checkpoint is saved or loaded; collective.

    From `attach` to `detach` ``state_dict`` of the module, and of every module in it, has whole
    values under the names of all stages.

    Args:
        parallel: the module on its layout, at rest.
        group: all ranks, for objects.
        when: name of the hook in which values can be used.

    Attributes:
        is_cut: whether any rank lacks values.
        renamed: after `finish`, the new names of tensors that hooks have renamed.
    """

    def __init__(
        self, parallel: ParallelModule, group: dist.ProcessGroup | None, when: str
    ) -> None:
        self._parallel = parallel
        self._when = when
        self._peers = Peers(group)
        module = parallel.module
        self._chunks = own_chunks(module, parallel.canonical, parallel.data.rows)
        self._paths = {m: clean_name(f"{n}.") if n else "" for n, m in module.named_modules()}
        self._handles: list[RemovableHandle] = []
        self._swapped: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        self._remote: dict[str, dict[str, Any]] = {}
        self.renamed: dict[str, str] = {}
        self._cache = LazyCache()
        copies = any(rows.is_copy for rows in parallel.data.rows.values())
        self.is_cut = not is_whole(parallel) or (copies and self._peers.size > 1)
        self._everyone = self._exchange({n: describe(c) for n, c in self._chunks.items()})
        if self.is_cut:
            self._given = self._lazy_tensors()
        else:
            self._given = {name: t.detach() for name, t in own_tensors(module)}
            if copies:
                for name, chunk in self._chunks.items():
                    self._given |= dict.fromkeys((name, *chunk.aliases), chunk.tensor)
        owners = {name: name for name in self._chunks}
        owners |= {alias: name for name, c in self._chunks.items() for alias in c.aliases}
        self._sources = {id(t): owners.get(name, name) for name, t in self._given.items()}

    def _lazy_tensors(self) -> dict[str, Tensor]:
        device, found = self._parallel.topology.device, dict[str, Tensor]()
        for known in self._everyone:
            for name, ((shape, _, dtype), aliases) in known.items():
                lazy = found.get(name)
                if lazy is None:

                    def fetch(name: str = name) -> Tensor:
                        return self._fetch(name)

                    lazy = LazyTensor(name, shape, dtype, device, fetch, self._cache)
                found |= {n: lazy for n in (name, *aliases) if n not in found}
        return found

    def state(self) -> dict[str, Any]:
        """Return ``state_dict`` of the module, with all overrides and hooks."""
        state = self._parallel.module.state_dict()
        return OrderedDict((clean_name(name), value) for name, value in state.items())

    def attach(self) -> None:
        """Have ``state_dict`` return whole values from now on."""
        for module in self._parallel.module.modules():
            # In front of other hooks, which see the entries of this one.
            self._handles.append(first_state_hook(module, self._put))
            if self.is_cut and _saves_itself(module) and tensors_of(module):
                handle = module.register_state_dict_pre_hook(self._make_whole)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

        if self._parallel.topology.pp.size > 1:
            self._remote = self._items_of_all_stages()

    def _items_of_all_stages(self) -> dict[str, dict[str, Any]]:
        """Return the ``state_dict`` of every pipeline item of all stages, by path and name."""
        mine = {
            path: item.state_dict(prefix=path)
            for module, above in self._paths.items()
            if isinstance(module, PipelineSequential)
            for path, item in zip(
                (f"{above}{name}." for name in module.item_names), module.items(), strict=True
            )
            if not isinstance(item, RemoteItem)
        }
        told = {p: {clean_name(n): self._tell(v) for n, v in d.items()} for p, d in mine.items()}
        found: dict[str, dict[str, Any]] = {}
        for rank, known in enumerate(self.conclude(told)):
            for path in (path for path in known if path not in found):
                held = {clean_name(n): v for n, v in mine.get(path, {}).items()}
                found[path] = {
                    name: self._told(held.get(name), rank, *what)
                    for name, what in known[path].items()
                }
        return found

    def _tell(self, value: Any) -> tuple[Any, ...]:
        if (source := self._source_of(value)) is not None:
            return "source", source
        if isinstance(value, Tensor):
            return "tensor", tuple(value.shape), value.dtype
        return "value", value

    def _told(self, mine: Any, rank: int, kind: str, *what: Any) -> Any:
        if kind == "tensor":
            return self._broadcast(mine, *what, source=rank).to(self._parallel.topology.device)
        return self._given[what[0]] if kind == "source" else what[0]

    def detach(self) -> None:
        """Have ``state_dict`` return this rank's values again; lazy tensors are closed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, parameters in self._swapped.items():  # if state_dict failed
            module._parameters.update(parameters)
        self._swapped.clear()
        self._cache.closed = (
            f"values of the state_dict of a checkpoint can be used in {self._when} only; "
            "nearest valid: a clone() of them there"
        )

    def _put(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        path = self._paths[module]
        if isinstance(module, RemoteItem):
            remote = self._remote.get(path, {})
            state |= {prefix + name.removeprefix(path): value for name, value in remote.items()}
            module._parameters.update(self._swapped.pop(module, {}))
            return
        swapped = self._swapped.pop(module, {})
        for name, tensor in tensors_of(module).items():
            there = state.get(prefix + name)
            ours = there is not None and _address(there) == _address(tensor)
            if ours or (there is not None and not swapped and not _saves_itself(module)):
                state[prefix + name] = self._given[path + name]
        module._parameters.update(swapped)

    def _make_whole(self, module: nn.Module, *_: Any) -> None:
        self._swapped[module] = dict(module._parameters)
        for name, parameter in self._swapped[module].items():
            if parameter is not None:
                value = self._given[self._paths[module] + name]
                value = value.value() if isinstance(value, LazyTensor) else value
                module._parameters[name] = nn.Parameter(value, requires_grad=False)

    def _fetch(self, name: str) -> Tensor:
        value = self._serve(self._exchange(("read", name)), name)
        assert value is not None
        return value

    def _serve(self, messages: list[Any], mine: str | None = None) -> Tensor | None:
        """Gather the values that ranks have asked for; return the one asked for here."""
        result = None
        for name in sorted({text for kind, text in messages if kind == "read"}):
            chunk, wanted = self._chunks.get(name), name == mine
            with torch.no_grad():
                value = assemble(
                    name, chunk, self._everyone, self._parallel.topology.device, keep=wanted
                )
            result = value if wanted else result
        return result

    def conclude(self, mine: Any) -> list[Any]:
        """Wait until the hooks of all ranks are done; return the value of each rank."""
        while True:
            messages = self._exchange(("done", mine))
            if all(kind == "done" for kind, _ in messages):
                return [said for _, said in messages]
            self._serve(messages)

    def finish(self, state: Mapping[str, Any]) -> StateMapping:
        """Return the state of this rank to save, after the hooks."""
        edited = _Edited(
            sources={name: self._source_of(value) for name, value in state.items()},
            problems=tuple(self._problems(state)) if self.is_cut else (),
        )
        everyone: list[_Edited] = self.conclude(edited)
        raise_if_any([problem for one in everyone for problem in one.problems])
        first = everyone[0]
        names: dict[str, list[str]] = {}
        result: dict[str, Any] = {}
        for name, source in first.sources.items():
            if source is not None:
                names.setdefault(source, []).append(name)
            elif self._peers.is_first:
                value = state[name]
                result[name] = whole(value.clone()) if isinstance(value, Tensor) else value
        for source, (name, *others) in names.items():
            if source in others:
                name, others = source, [name, *(n for n in others if n != source)]
            if name != source:
                self.renamed[source] = name
            if (chunk := self._chunks.get(source)) is not None:
                result[name] = replace(chunk, aliases=tuple(others))
        return StateMapping(result, versions_of(self._parallel.module))

    def _source_of(self, value: Any) -> str | None:
        if isinstance(value, LazyTensor):
            return value.source if value.cache is self._cache else None
        return self._sources.get(id(value))

    def _problems(self, state: Mapping[str, Any]) -> list[str]:
        """Return faults: values that are shards, or were changed in place."""
        cut = [c.tensor for c in self._chunks.values() if not c.is_whole and c.tensor.numel()]
        parts = {_address(tensor) for tensor in cut}
        problems = []
        for name, value in state.items():
            whole_value = f"checkpoint['state_dict'][{name!r}]"
            if isinstance(value, LazyTensor):
                if value.is_written:
                    problems.append(
                        f"{self._when} changes {whole_value} in place, and every rank holds a "
                        f"shard of it; nearest valid: {whole_value} = the changed tensor"
                    )
            elif isinstance(value, DTensor) or (
                isinstance(value, Tensor) and _address(value) in parts
            ):
                problems.append(
                    f"{self._when} sets {whole_value} to this rank's shard of a parameter; nearest "
                    "valid: a value of checkpoint['state_dict'], which is whole"
                )
        return problems

    def resolve(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint whose only lazy tensors are in its state_dict."""
        return {
            key: _with_values(value) if key != "state_dict" else value
            for key, value in values.items()
        }

    def share(self, state: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return rank 0's state_dict, as its hooks left it, on every rank.

        Args:
            state: the state_dict after the hooks.
            stored: the state_dict before the hooks.
        """
        names = {id(value): name for name, value in stored.items()}
        mine: dict[str, tuple[Any, ...]] = {}
        values: dict[str, Any] = {}
        for name, value in state.items():
            source, values[name] = names.get(id(value)), value
            if isinstance(value, LazyTensor):
                values[name] = value.value() if source is None else value.changed()
            if values[name] is None or (source is not None and not isinstance(value, Tensor)):
                mine[name] = "stored", source
            elif isinstance(value, Tensor):
                mine[name] = "tensor", source, tuple(value.shape), value.dtype
            else:
                mine[name] = "value", value
        result: dict[str, Any] = {}
        for name, (kind, what, *form) in self.conclude(mine)[0].items():
            if kind != "tensor":
                result[name] = stored[what] if kind == "stored" else what
                continue
            result[name] = self._broadcast(values.get(name), *form)
            if what is not None:  # the state of the optimizers is that of the entry
                stored[what].become(result[name])
                result[name] = stored[what]
        return result

    def _broadcast(
        self, value: Any, shape: tuple[int, ...], dtype: torch.dtype, *, source: int = 0
    ) -> Tensor:
        if self._peers.size == 1:
            tensor: Tensor = value
            return tensor
        on_host = dist.get_backend(self._peers.group) == "gloo"
        device = torch.device("cpu") if on_host else self._parallel.topology.device
        ours = torch.empty(shape, dtype=dtype, device=device)
        if self._peers.rank == source:
            ours.copy_(value)
        dist.broadcast(ours, src=source, group=self._peers.group)
        return ours

    def _exchange(self, mine: Any) -> list[Any]:
        return self._peers.all_gather(mine)


def edits_state(module: nn.Module) -> bool:
    """Return whether a module, or one in it, changes the tensors in its ``state_dict``."""
    return any(
        _saves_itself(child)
        or type(child).state_dict is not nn.Module.state_dict
        or state_hooks(child)
        for child in module.modules()
        if not _keeps_state_beside(child)
    )


def _saves_itself(module: nn.Module) -> bool:
    kind = type(module)
    return not _keeps_state_beside(module) and (
        saves_itself(module)
        or (kind.get_extra_state is not nn.Module.get_extra_state and bool(tensors_of(module)))
    )


def _keeps_state_beside(module: nn.Module) -> bool:
    """Return whether a module is a metric, which adds its counts to state_dict."""
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def _address(value: Any) -> int | None:
    if isinstance(value, LazyTensor | StageTensor) or not isinstance(value, Tensor):
        return None
    return value.to_local().data_ptr() if isinstance(value, DTensor) else value.data_ptr()


def _with_values(value: Any) -> Any:
    def is_lazy(leaf: Any) -> bool:
        return isinstance(leaf, LazyTensor)

    if not tree_any(is_lazy, value):
        return value
    return tree_map(lambda leaf: leaf.value().clone() if is_lazy(leaf) else leaf, value)
