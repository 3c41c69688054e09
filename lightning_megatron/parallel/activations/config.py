"""Options of activation memory, and their faults."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast, get_args

from torch import nn
from torch.jit import ScriptModule

from lightning_megatron._torch.fsdp import class_name
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.errors import holds, lists_of_names, switches, whole_numbers
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.activations.selective import DEAR, OPERATIONS, is_operation

Mode = Literal["none", "full", "selective", "adaptive"]


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Recomputation and offloading of activations, to train with less memory."""

    recompute: Mode = "none"
    """Activations that are computed again in the backward: none, all inside a block (full), or all
    but the results of the operations in ``keep`` (selective); or for each block one of these, at
    the least cost of time that memory allows, by sizes and times in two batches (adaptive)."""
    limit_gib: float | None = None
    """For adaptive: most that the activations of a rank's blocks may take. What is outside of
    blocks, parameters, gradients and optimizer state come on top."""
    limit_fraction: float | None = None
    """Limit as a part of the memory of the device (on CPUs: that of the host, divided by the
    processes on it)."""
    keep: list[str] | None = None
    """For selective, and adaptive of blocks that are not compiled: ``attention`` (fused, without
    dropout), ``context`` (only that over cp, which then sends nothing twice), ``matmul``, the
    products of linear layers, ``norm`` (those that are one operator; RMS norms are on GPUs),
    ``activation`` functions, or single operators of torch (``"aten.bmm"``). None: attention and
    matmul, so that all else, dropout and rotary embeddings too, is computed again. ``["matmul"]``
    also recomputes attention."""
    blocks: list[str] | None = None
    """Modules to recompute and to offload, by class name or by a pattern of their names
    (``"*.mlp"``), outermost. None: the composite modules in the lists of the network (every
    ``nn.ModuleList`` and ``nn.Sequential``, ``layers=[...]`` of a PipelineSequential)."""
    every: int = 1
    """Recompute each n-th block, beginning with the first."""
    group: int = 1
    """For full: how many consecutive blocks are recomputed together, so that only the input of the
    first is kept (`parallel.block_transforms`). More than 1 asks for blocks that are items of a
    PipelineSequential."""
    offload: bool = False
    """Whether what autograd keeps of the blocks, recomputed or not, waits for the backward in host
    memory (`parallel.activations.offload`)."""
    offload_min_bytes: int = 65_536
    """Smaller tensors stay on the device, as copying them costs more than they take."""
    distribute_inputs: bool = False
    """Whether each tensor-parallel rank keeps but a part of the input of a recomputed block, to be
    gathered in the backward (`parallel.activations.distribute_inputs`)."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Operations whose results blocks keep that are recomputed."""
        return self.selection if self.recompute == "selective" else ()

    @property
    def selection(self) -> tuple[str, ...]:
        """Operations whose results are kept wherever blocks are recomputed selectively."""
        return DEAR if self.keep is None else tuple(self.keep)

    def problems(self, module: nn.Module | None) -> list[str]:
        """Faults of the options, and if ``module`` is given, of applying them to it."""
        if self.recompute not in get_args(Mode):
            close = difflib.get_close_matches(str(self.recompute), get_args(Mode), n=1, cutoff=0.0)
            return [
                f"activations.recompute={self.recompute!r}: no such mode; valid: "
                f"{', '.join(get_args(Mode))}; nearest valid: {close[0]!r}",
                *self._kind_problems(),
            ]
        problems = self._kind_problems() + self._keep_problems()
        problems += self._limit_problems() + self._offload_problems() + self._group_problems()
        if self._kind_problems():
            return problems
        if self.recompute == "none":
            blocks = None if self.offload else self.blocks
            if (blocks, self.every) != (None, 1):
                problems.append(
                    f"activations.recompute='none', blocks={self.blocks}, every={self.every}: they "
                    "say which blocks to recompute, and none is; nearest valid: recompute='full'"
                )
                return problems
        if self.recompute == "none" and not self.offload:
            return problems
        if module is None or any(isinstance(child, RemoteItem) for child in module.modules()):
            return problems  # an earlier run, whose problems were told, has left some stages here
        return problems + self._block_problems(module)

    def _kind_problems(self) -> list[str]:
        """Values that no mode takes."""
        numbers = whole_numbers(1, every=self.every, group=self.group)
        numbers += whole_numbers(0, offload_min_bytes=self.offload_min_bytes)
        lists = lists_of_names(blocks=self.blocks, keep=self.keep)
        flags = switches(offload=self.offload, distribute_inputs=self.distribute_inputs)
        return [f"activations.{problem}" for problem in numbers + lists + flags]

    def _limit_problems(self) -> list[str]:
        gib, fraction = self.limit_gib, self.limit_fraction
        adaptive, problems = self.recompute == "adaptive", []
        if adaptive and self.every != 1:
            problems.append(
                f"activations.recompute='adaptive', every={self.every}: it chooses the blocks "
                "itself; nearest valid: every=1, or recompute='full'"
            )
        given = [limit for limit in (gib, fraction) if limit is not None]
        if len(given) != adaptive or not all(holds(lambda limit: limit > 0, x) for x in given):
            problems.append(
                f"activations.recompute={self.recompute!r}, limit_gib={gib!r}, limit_fraction="
                f"{fraction!r}: one number above 0 is what adaptive recomputation, and only that, "
                "has to keep to; nearest valid: "
                + ("limit_gib=1.0" if adaptive else "limit_gib=None")
            )
        if holds(lambda fraction: fraction > 1, fraction):
            problems.append(
                f"activations.limit_fraction={fraction}: a device has no more than all of its "
                "memory; nearest valid: limit_fraction=1.0"
            )
        return problems

    def _offload_problems(self) -> list[str]:
        problems = []
        if self.distribute_inputs and self.recompute not in ("full", "selective"):
            problems.append(
                f"activations.distribute_inputs=True, recompute={self.recompute!r}: it is the "
                "inputs of blocks that are chosen to be recomputed; nearest valid: "
                "recompute='full', or distribute_inputs=False"
            )
        if self.offload and self.recompute == "adaptive":
            problems.append(
                "activations.recompute='adaptive', offload=True: what is in host memory "
                "does not count towards the limit, so there is nothing to choose; nearest valid: "
                "recompute='selective', or offload=False"
            )
        return problems

    def _group_problems(self) -> list[str]:
        if self.group == 1:
            return []
        problems = []
        if self.recompute != "full" or self.every != 1:
            problems.append(
                f"activations.group={self.group}, recompute={self.recompute!r}, "
                f"every={self.every}: groups are of consecutive blocks that keep nothing but an "
                "input; nearest valid: recompute='full' with every=1, or group=1"
            )
        if self.offload or self.distribute_inputs:
            problems.append(
                f"activations.group={self.group}, offload={self.offload}, "
                f"distribute_inputs={self.distribute_inputs}: these move the inputs of single "
                "blocks; nearest valid: group=1, or group without them"
            )
        return problems

    def _keep_problems(self) -> list[str]:
        if self.keep is None or isinstance(cast(object, self.keep), str):
            return []
        if self.recompute not in ("selective", "adaptive"):
            return [
                f"activations.recompute={self.recompute!r}, keep={self.keep}: only selective "
                "recomputation keeps results; nearest valid: recompute='selective'"
            ]
        if not self.keep or not all(is_operation(str(name)) for name in self.keep):
            return [
                f"activations.keep={self.keep}: must name some of {', '.join(OPERATIONS)}, or "
                "operators of torch ('aten.mm'); nearest valid: keep=['attention', 'matmul'], or "
                "recompute='full' to keep nothing"
            ]
        return []

    def _block_problems(self, module: nn.Module) -> list[str]:
        classes = sorted({class_name(child) for child in module.modules()})
        problems = []
        done = "offloaded" if self.recompute == "none" else "recomputed"
        for name in self.blocks or ():
            if not find_blocks(module, [name]):
                close = difflib.get_close_matches(str(name), classes, n=1, cutoff=0.0)
                problems.append(
                    f"activations.blocks={name!r}: the module holds nothing of this class or name, "
                    f"so nothing would be {done}; nearest valid: {close[0]!r}, or blocks=None"
                )
        if not problems and not find_blocks(module, self.blocks):
            problems.append(
                f"activations.recompute={self.recompute!r}, blocks={self.blocks}: the module has "
                f"no lists of composite modules, so nothing would be {done}; nearest valid: "
                "blocks=[<class names>], or recompute='none'"
            )
        return problems or [*self._item_problems(module), *self._script_problems(module)]

    def _script_problems(self, module: nn.Module) -> list[str]:
        """Scripts in blocks: torch optimizes one between its runs, and then it keeps others."""
        found = {
            class_name(block): name
            for block in blocks_to_recompute(module, self)
            for name, child in block.named_modules()
            if isinstance(child, ScriptModule)
        }
        return [
            f"activations.recompute={self.recompute!r}: {block} has a script of torch.jit "
            f"({name or 'it is one'}), which keeps other tensors when it runs again; nearest "
            "valid: blocks=[<other classes>], or the module without torch.jit.script"
            for block, name in found.items()
        ]

    def _item_problems(self, module: nn.Module) -> list[str]:
        """Blocks that only their own network could call one after the other."""
        if self.group == 1:
            return []
        trunks = [child for child in module.modules() if isinstance(child, PipelineSequential)]
        if adopted := [class_name(t) for t in trunks if isinstance(t, AdoptedTrunk)]:
            return [
                f"activations.group={self.group}: the forward of the adopted {adopted[0]} calls "
                "its blocks one by one, so that none can be run again with the next; nearest "
                "valid: group=1"
            ]
        items = {item for trunk in trunks for item in trunk.items()}
        others = {class_name(b) for b in find_blocks(module, self.blocks) if b not in items}
        if not others:
            return []
        return [
            f"activations.group={self.group}, blocks={self.blocks}: {', '.join(sorted(others))} "
            "are no items of a PipelineSequential, which alone can run several of them again at "
            "once; nearest valid: group=1"
        ]


def find_blocks(module: nn.Module, wanted: Sequence[str] | None) -> list[nn.Module]:
    """The modules that can be recomputed one by one, outermost only, in their order.

    Args:
        module: where to look.
        wanted: class names, and patterns of names; None for the members of lists, and of a
            PipelineSequential that holds no list, that are made of other modules: a single layer
            keeps little but its input.
    """
    return list(dict.fromkeys(_find(module, wanted, "")))


def _find(module: nn.Module, wanted: Sequence[str] | None, prefix: str) -> Iterator[nn.Module]:
    children = dict(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    members = set(children.values())
    if isinstance(module, PipelineSequential):
        is_list = not any(isinstance(child, nn.ModuleList) for child in children.values())
        members &= set(module.items())
    for name, child in children.items():
        path = prefix + name
        if wanted is not None:
            kind = class_name(child)
            chosen = any(kind == entry or fnmatchcase(path, entry) for entry in wanted)
        else:
            container = isinstance(child, nn.ModuleList | nn.ModuleDict | PipelineSequential)
            composite = isinstance(child, RemoteItem) or any(True for _ in child.children())
            chosen = is_list and child in members and not container and composite
        if chosen:
            yield child
        else:
            yield from _find(child, wanted, f"{path}.")


def blocks_to_recompute(module: nn.Module, config: ActivationConfig) -> list[nn.Module]:
    """The blocks that ``config`` chooses of a whole module, that of all pipeline stages."""
    if config.recompute == "none":
        return []
    return find_blocks(module, config.blocks)[:: config.every]
