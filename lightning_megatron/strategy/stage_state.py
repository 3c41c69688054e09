"""State that steps leave behind in a module, brought from a pipeline's last stage to the others.

Under a pipeline the code of a step behind the trunk runs on the last stage only, and with it
``metric.update(...)``, ``self.outputs.append(...)`` and ``self.count += 1``. Hooks run on every
rank, log what they compute there, and loggers, checkpoints and early stopping act on it. So after
each step what it has changed on the last stage goes to the others: metrics, buffers and attributes
of the module and of the modules beside the trunk. What hooks change is each rank's own. Modules,
parameters, optimizers and what refers to them stay what they are on each rank.

Two looks at the attributes, before the step and after it, find what it has changed
(`strategy.attribute_changes`). What they cannot see, a class attribute of the module names::

    shared_between_stages = ("table", "memory.queue")

Attributes named there are compared by value around each step. At the end of an epoch a digest of
all others tells whether a step has changed one unseen: that is an error, which says to name it.

Cost: two looks a step on the last stage, some microseconds for each attribute, without waiting for
a device; one message of eight bytes where nothing changed, and else what changed; twice an epoch a
digest of all attributes and buffers on each stage.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_megatron.comm.objects import ObjectBroadcast, StaysInProcessError, dump
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.strategy.attribute_changes import MISSING, Change, Look, apply, changes
from lightning_megatron.strategy.attributes import (
    OF_A_PROCESS,
    attributes_of,
    dotted,
    modules_beside_trunk,
    set_attribute,
    value_of,
)
from lightning_megatron.strategy.code_inspection import is_users
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.memory import weights_in_parts
from lightning_megatron.whole.splits import whole

NAME = "shared_between_stages"
"""Class attribute of a module with the names of what no look can see."""
_Key: TypeAlias = tuple[str, str]
"""Name of a module, and of its attribute."""


class StepState:
    """Makes true on all stages what steps have filled on the last.

    Args:
        module: the user's.
        topology: the layout, with a pipeline.
        source: rank of the last stage on the pipeline axis.
        host_group: gloo group over the axis, where the axis' own group is not gloo.
        microbatches: gives the number of microbatches of the latest training batch.
        ends_epoch: tells whether the batch that runs is the last one of its epoch.

    Raises:
        ConfigError: ``shared_between_stages`` is no tuple of names, or names a part of the trunk.
    """

    def __init__(
        self,
        module: LightningModule,
        topology: Topology,
        source: int,
        host_group: dist.ProcessGroup | None = None,
        *,
        microbatches: Callable[[], int],
        ends_epoch: Callable[[], bool],
    ) -> None:
        self._module = module
        self._pp = topology.pp
        self._device = topology.device
        self._splits = topology.tp.size * topology.cp.size > 1
        self._gives = topology.pp.rank == source
        self._from = [
            ObjectBroadcast(topology.pp, rank, topology.device, host_group)
            for rank in topology.pp.ranks
        ]
        self._source, self._broadcast = source, self._from[source]
        self._layers_hooked = False
        self._microbatches = microbatches
        self._ends_epoch = ends_epoch
        self._named = shared_names(module)
        self._noted: dict[_Key, bytes] | None = None
        self._before: dict[_Key, Look] = {}
        self._after: dict[_Key, Look] = {}
        self._values: dict[_Key, bytes] = {}
        self._visibly: set[_Key] = set()
        self._warned: set[str] = set()

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Context of a step, after which all stages have what it has left behind."""
        self.begin_step()
        yield
        self.end_step()

    def begin_step(self) -> None:
        """Note what there is before a step."""
        if self._noted is None:
            self._noted = {key: digest for key, _, digest in self._digests()}
            self._visibly = set()
            self._after = {}
            self._layers_hooked = any(
                Peers.over(self._pp).all_gather(_has_layer_hooks(self._module))
            )
        if self._gives or self._layers_hooked:
            self._before = self._looks()
            if self._after:  # what hooks have changed since
                self._visibly |= {key for key, _ in self._differences(self._after, self._before)}
            self._values = {key: digest for key, _, digest in self._digests(named=True)}

    def end_step(self) -> None:
        """Give all stages what the step has changed; collective over the pipeline."""
        found: dict[_Key, list[Change]] = {}
        refused: list[str] = []
        mine: dict[_Key, list[Change]] = {}
        if self._gives or self._layers_hooked:
            mine, refused = self._found()
        found, refused = self._broadcast((mine, refused))
        if refused:
            raise ConfigError(
                f"{', '.join(refused)}: a step fills it with what cannot be pickled, so that other "
                "pipeline stages than the last do not get it; nearest valid: a list or dict "
                "of numbers and tensors, a torchmetrics.Metric, or pp=1"
            )
        if not self._gives:
            self._take(found)
        if self._layers_hooked:
            self._share_of_layers(found, {} if self._gives else mine)
        if self._ends_epoch():
            self.check()

    def _share_of_layers(
        self, of_last: Mapping[_Key, Sequence[Change]], mine: Mapping[_Key, Sequence[Change]]
    ) -> None:
        """Give all stages what hooks of layers have changed on others than the last; collective.

        Args:
            of_last: what the last stage has changed. Where another stage has changed the same, it
                comes from code before the trunk.
            mine: what this stage has changed, if it is another one.
        """
        own = {
            key: [c for c in some if not any(_overlap(c, d) for d in of_last.get(key, ()))]
            for key, some in mine.items()
        }
        for rank, broadcast in enumerate(self._from):
            if rank != self._source:
                theirs = broadcast({key: some for key, some in own.items() if some})
                if rank != self._pp.rank:
                    self._take(theirs)
        if self._gives:
            self._after = self._looks()

    def check(self) -> None:
        """Refuse what steps have changed unseen; collective over the pipeline.

        Raises:
            ConfigError: it is there on the last stage only; on every rank alike.
        """
        if self._noted is None:  # no step has run since
            return
        noted, self._noted = self._noted, None
        asked: dict[_Key, Any] = self._broadcast(self._changed_unseen(noted) if self._gives else {})
        if not asked:
            return
        mine = {key: now for key, _, now in self._digests() if key in asked}
        kept = [] if self._gives else [key for key, now in mine.items() if noted.get(key) == now]
        everywhere = {key for part in Peers.over(self._pp).all_gather(kept) for key in part}
        lost = sorted(dotted(*key) for key in everywhere if asked[key] is None)
        if lost:
            raise ConfigError(
                f"{', '.join(f'self.{name}' for name in lost)}: steps have changed it on the last "
                "pipeline stage in a way that cannot be seen from outside, so that the other "
                f"stages have another; nearest valid: {NAME} = {(*lost,)!r} in the class "
                f"{type(self._module).__name__}, a torchmetrics.Metric, or pp=1"
            )
        modules = dict(modules_beside_trunk(self._module))
        for path, name in kept:
            set_attribute(modules[path], name, asked[path, name])

    # On the last stage ----------------------------------------------------------------------------

    def _looks(self) -> dict[_Key, Look]:
        """Looks at all attributes that are not named."""
        found: dict[_Key, Look] = {}
        for path, module in modules_beside_trunk(self._module):
            if isinstance(module, MetricCollection):
                # Only the first of several metrics with equal states is updated.
                list(module.values(copy_state=False))
            # Kernels of batch norms write two of its three buffers without counting.
            versions = tuple(b._version for b in module._buffers.values() if b is not None)
            for name, content in attributes_of(module):
                key = path, name
                if not self._is_named(*key):
                    found[key] = Look().at(content)
                    if name in module._buffers:
                        found[key].counts(versions)
        return found

    def _differences(
        self, old: Mapping[_Key, Look], new: Mapping[_Key, Look]
    ) -> Iterator[tuple[_Key, list[Change]]]:
        modules = dict(modules_beside_trunk(self._module))
        for key, look in new.items():
            content = _get(modules[key[0]], key[1])
            was = old[key].mark if key in old else MISSING
            found = changes(was, look.mark, content)
            if found:
                yield key, found
        for key in old.keys() - new.keys():
            yield key, [Change((), None, MISSING)]

    def _found(self) -> tuple[dict[_Key, list[Change]], list[str]]:
        """What the step has changed, and names of what cannot be pickled of it."""
        self._after = self._looks()
        found = dict(self._differences(self._before, self._after))
        for key, content, digest in self._digests(named=True):
            if self._values.get(key) != digest:
                found[key] = [Change((), None, content)]
        self._before = {}
        self._visibly |= found.keys()
        self._warn_of_microbatches(found)
        refused: list[str] = []
        packed = {key: list(self._packed(key, some, refused)) for key, some in found.items()}
        return {key: some for key, some in packed.items() if some}, refused

    def _packed(self, key: _Key, found: Iterable[Change], refused: list[str]) -> Iterator[Change]:
        """Changes that can be sent; the name of the attribute is added to the others."""
        name = f"self.{dotted(*key)}"
        for change in found:
            sent = change._replace(value=whole(change.value)) if self._splits else change
            try:
                dump(sent, self._device.type, OF_A_PROCESS)
                yield sent
            except StaysInProcessError:
                continue
            except Exception:  # whatever a class raises that is not meant to be pickled
                if not change.in_object:
                    refused.append(name)
                else:
                    self._warn_once(
                        name,
                        "holds what cannot be pickled: what steps leave there behind the trunk is "
                        "there on the last pipeline stage only",
                    )

    def _warn_of_microbatches(self, found: Iterable[_Key]) -> None:
        """Warn that the first stage would not see in a batch what the last makes of it."""
        count = self._microbatches()
        if count == 1 or not self._module.training:
            return
        modules = dict(modules_beside_trunk(self._module))
        names = [
            f"self.{dotted(path, name)}"
            for path, name in found
            if not isinstance(modules.get(path), Metric)
        ]
        new = [name for name in names if name not in self._warned]
        if new:
            self._warned.update(new)
            warnings.warn(
                f"{', '.join(new)}: training_step changes it for each of {count} microbatches of a "
                "batch; if it does so behind its trunk and reads it before its trunk, stages "
                "before the last see what it was when the batch began; num_microbatches=1 keeps "
                "batches whole",
                stacklevel=2,
            )

    def _changed_unseen(self, noted: Mapping[_Key, bytes]) -> dict[_Key, Any]:
        """Attributes with other digests than before, where no look has seen a change.

        Those of which a look sees a part only are there with their values, the others with None.
        """
        now = self._looks()
        self._visibly |= {key for key, _ in self._differences(self._after, now)}
        found: dict[_Key, Any] = {}
        for key, content, digest in self._digests():
            if key in self._visibly or noted.get(key, digest) == digest:
                continue
            if not now[key].hidden:
                found[key] = None
            elif self._can_travel(content):
                found[key] = content
                self._warn_once(
                    f"self.{dotted(*key)}",
                    f"({type(content).__name__}) is changed by steps inside, which the other "
                    f"pipeline stages get at the end of an epoch; {NAME} = ({dotted(*key)!r},) "
                    "shares it after each step",
                )
        return found

    def _can_travel(self, content: Any) -> bool:
        try:
            dump(content, self._device.type, OF_A_PROCESS)
        except Exception:  # whatever a class raises that is not meant to be pickled
            return False
        return True

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{name} {text}", stacklevel=2)

    # On all stages --------------------------------------------------------------------------------

    def _digests(self, *, named: bool = False) -> Iterator[tuple[_Key, Any, bytes]]:
        """Attributes that are named, or all others, with digests of those that can be pickled."""
        if named and not self._named:
            return
        for path, module in modules_beside_trunk(self._module):
            for name, content in attributes_of(module):
                if self._is_named(path, name) == named:
                    value = value_of(content, self._device)
                    if value is not None:
                        yield (path, name), content, value.digest()

    def _is_named(self, path: str, name: str) -> bool:
        """Whether the module names an attribute, or a part of it."""
        start = dotted(path, name)
        return any(f"{one}.".startswith(f"{start}.") for one in self._named)

    def _take(self, found: Mapping[_Key, Iterable[Change]]) -> None:
        """Make what the last stage has changed that of this rank."""
        modules = dict(modules_beside_trunk(self._module))
        for (path, name), some in found.items():
            for change in some:
                try:
                    _change(modules[path], name, change)
                except (LookupError, AttributeError, TypeError) as error:
                    if change.in_object:  # it is an object of another kind here
                        continue
                    raise ConfigError(
                        f"self.{dotted(path, name)}: a step changes a part of it, and on this "
                        "pipeline stage there is no such part, as a hook has made it another on "
                        f"each rank ({error}); nearest valid: the same in hooks of all ranks, "
                        f"{NAME} = ({dotted(path, name)!r},) in the class "
                        f"{type(self._module).__name__}, or pp=1"
                    ) from error


def _overlap(one: Change, other: Change) -> bool:
    """Whether two changes are of one place, or of a place in the other's."""
    return all(a == b for a, b in zip(one.path, other.path, strict=False))


def _has_layer_hooks(module: nn.Module) -> bool:
    """Whether the user has hooks on layers of a trunk of which this rank has a part."""
    with weights_in_parts():  # without those of other stages
        trunks = [part for part in module.modules() if isinstance(part, PipelineSequential)]
        layers = [layer for trunk in trunks for layer in trunk.modules()]
    hooks = (
        h for x in layers for h in (*x._forward_hooks.values(), *x._forward_pre_hooks.values())
    )
    return any(is_users(hook) for hook in hooks)


def _get(module: nn.Module, name: str) -> Any:
    return module.__dict__[name] if name in module.__dict__ else getattr(module, name)


def _change(module: nn.Module, name: str, change: Change) -> None:
    if change.path or change.start is not None:
        apply(change, _get(module, name))
        set_attribute(module, name, _get(module, name))
    elif change.value is MISSING:
        module.__dict__.pop(name, None)
        if name in module._buffers:
            module._buffers[name] = None
    else:
        set_attribute(module, name, change.value)


def shared_names(module: LightningModule) -> frozenset[str]:
    """Names of attributes that a module shares between stages.

    Raises:
        ConfigError: they are no tuple of names, or one is of a part of the trunk.
    """
    names: Any = getattr(module, NAME, ())
    place = f"in the class {type(module).__name__}"
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{NAME}={names!r} {place}: it is a tuple of names of attributes; nearest valid: "
            f"{NAME} = ('outputs',)"
        )
    trunks = [path for path, m in module.named_modules() if isinstance(m, PipelineSequential)]
    for name in names:
        if any(f"{name}.".startswith(f"{trunk}.") for trunk in trunks):
            raise ConfigError(
                f"{NAME} {place} names {name!r}: parts of the PipelineSequential are on one stage "
                "each; nearest valid: attributes of the module and of what is beside the "
                "PipelineSequential"
            )
    return frozenset(names)
