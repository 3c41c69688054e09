"""Plan of what will happen to a module, worked out on its structure alone.

A `ModulePlan` is made from a module whose parameters may be on the meta device, before any process
group exists: which item goes to which pipeline stage, which names are aliases of one tied
parameter, what lies outside the trunk, and everything that is wrong with it.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn

from lightning_megatron._torch.fsdp import class_name
from lightning_megatron.errors import ConfigError, whole_numbers
from lightning_megatron.layers.base import ParallelLayer, is_expert_layer
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.context_problems import context_problems
from lightning_megatron.parallel.item_flops import ItemFlops, count_item_flops
from lightning_megatron.schedules.layout_string import (
    TrunkParts,
    is_layout,
    layout_counts,
    layout_problems,
    syntax_problems,
)
from lightning_megatron.schedules.partition import (
    explicit_partition,
    partition_by_cost,
    partition_problems,
)
from lightning_megatron.schedules.schedule import CUSTOM, load_schedule, make_schedule
from lightning_megatron.topology.degrees import Degrees

MEASURED = "measured"
"""Stages that are balanced by the times of the first steps."""
PARTITIONS = ("parameters", "flops", MEASURED)
"""Names of what stages can be balanced by."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism: how many ranks, in which order, and how the trunk is cut."""

    degree: int
    """Pipeline ranks; 1 is no pipeline."""
    schedule: str = "1f1b"
    """Order of forwards and backwards (`schedules.schedule`): ``"1f1b"``, ``"gpipe"``,
    ``"interleaved"``, ``"breadth-first"``, ``"zb-h1"``, ``"zb-h2"``, ``"zbv"``, ``"v-half"``,
    ``"v-min"``, ``"dualpipev"``, ``"custom"`` or ``"auto"`` (the fastest, by the times of the first
    steps)."""
    partition: list[int] | str | None = None
    """Which items go to which stage: ``"parameters"`` (what None stands for) or ``"flops"`` make
    contiguous stages of which the largest is as small as possible, embedding, head and loss
    included; ``"measured"`` begins with the first of these, measures some steps, and then moves
    items between stages once, if that saves time (`tuning.partition`); a list holds
    the number of items on every stage; ``"Et*3|(tt|)*29,m|L"`` is Megatron-LM's layout string
    (`schedules.layout_string`)."""
    sequence_length: int | None = None
    """For ``partition="flops"``: tokens of a sample. By default those of the module's
    ``example_input_array``."""
    stages_per_rank: int | None = None
    """Stages that every pipeline rank holds. None: the schedule's usual number, 2 for those of V
    shape, ``interleaved`` and ``breadth-first``, else 1."""
    table: str | None = None
    """For ``schedule="custom"``: path of the schedule, CSV or JSON."""
    activation_gib: float | None = None
    """For ``schedule="auto"``: GiB of activations that a rank may keep; None: any."""
    scatter_gather: bool | Literal["auto"] = "auto"
    """Whether each tp rank sends its part of an activation that all of them hold alike, and gathers
    the parts of what it receives (`pipeline.scatter_gather`): ``"auto"`` between stages on
    different nodes whose tp ranks share a node. Under ``sequence_parallel`` ranks hold parts
    anyway."""

    def placement(self, schedule: str) -> tuple[int, ...]:
        """Pipeline rank of every stage under a schedule.

        Raises:
            ConfigError: the schedule is not legal.
        """
        if schedule == CUSTOM and self.table is not None:
            return load_schedule(self.table).stage_ranks
        return make_schedule(schedule, self.degree, 1, self.stages_per_rank).stage_ranks

    @property
    def layout(self) -> str | None:
        """The partition, if it is a layout string."""
        given = self.partition
        return given if isinstance(given, str) and is_layout(given) else None

    def problems(self) -> list[str]:
        """Faults of the partition that show without the module."""
        given, layout, length = self.partition, self.layout, self.sequence_length
        problems = []
        if isinstance(given, str) and layout is None and given not in PARTITIONS:
            close = difflib.get_close_matches(given, PARTITIONS, n=1, cutoff=0.0)
            problems.append(
                f"pp.partition={given!r}: it is one of {', '.join(map(repr, PARTITIONS))}, a list "
                f"of numbers of items, or a layout string such as 'Ett|ttL'; nearest valid: "
                f"partition={(close or PARTITIONS)[0]!r}"
            )
        elif self.degree == 1 and (isinstance(given, list) or layout is not None):
            stages = len(given) if isinstance(given, list) else str(layout).count("|") + 1
            problems.append(
                f"pp.partition={given!r}, pp=1: the partition says how a pipeline is cut, "
                f"and there is none; nearest valid: partition=None, or pp={max(stages, 2)}"
            )
        elif layout is not None:
            problems += [f"pp.{problem}" for problem in syntax_problems(layout)]
        if self.scatter_gather not in ("auto", True, False):
            problems.append(
                f"pp.scatter_gather={self.scatter_gather!r}: must be 'auto', True or False; "
                "nearest valid: scatter_gather='auto'"
            )
        if length is not None:
            problems += [f"pp.{problem}" for problem in whole_numbers(1, sequence_length=length)]
        return problems


class ModulePlan:
    """Structure of a module under a layout.

    Args:
        module: the LightningModule, whole (no rank has dropped or sliced anything yet).
        degrees: the layout.
        pipeline: how the trunk is cut.
        stage_ranks: pipeline rank of every stage; one stage per rank by default.

    Attributes:
        has_experts: whether any layer has parameters that are divided over ep.
    """

    def __init__(
        self,
        module: nn.Module,
        degrees: Degrees,
        pipeline: PipelineConfig,
        stage_ranks: Sequence[int] | None = None,
    ) -> None:
        self._module = module
        self._degrees = degrees
        self._config = pipeline
        self.stage_ranks = tuple(range(degrees.pp) if stage_ranks is None else stage_ranks)
        self.trunks = {
            name: child
            for name, child in module.named_modules()
            if isinstance(child, PipelineSequential)
        }
        self.has_experts = any(map(is_expert_layer, module.modules()))
        names: dict[int, str] = {}
        self.canonical: dict[str, str] = {
            name: names.setdefault(id(parameter), name)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    @property
    def trunk_name(self) -> str | None:
        """Name of the only trunk; None without one."""
        return next(iter(self.trunks)) if len(self.trunks) == 1 else None

    @property
    def trunk(self) -> PipelineSequential | None:
        """The only trunk; None without one."""
        return self.trunks[self.trunk_name] if self.trunk_name is not None else None

    @cached_property
    def stages(self) -> list[range]:
        """Item indices of every stage."""
        trunk = self.trunk
        if trunk is None:
            raise ConfigError(_NO_TRUNK.format(pp=self._degrees.pp))
        counts, num_stages = self._config.partition, len(self.stage_ranks)
        if self._config.layout is not None:
            parts = TrunkParts.of(trunk.item_names)
            counts = layout_counts(self._config.layout, parts, num_stages)
        if isinstance(counts, list):
            return explicit_partition(counts, len(trunk), num_stages)
        return partition_by_cost(self._costs(trunk), num_stages)

    @property
    def estimated_items(self) -> tuple[str, ...]:
        """Items whose operations could not be counted; empty where they do not matter."""
        return () if self._item_flops is None else self._item_flops.estimated

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """Stage of every parameter name inside the trunk, aliases included."""
        trunk = self.trunk
        if trunk is None or self._degrees.pp == 1:
            return {}
        stage_of_item = {item: stage for stage, part in enumerate(self.stages) for item in part}
        found: dict[str, int] = {}
        for index, item in enumerate(trunk.items()):
            prefix = _join(self.trunk_name or "", trunk.item_names[index])
            for name, _ in item.named_parameters(remove_duplicate=False):
                found[_join(prefix, name)] = stage_of_item[index]
        return found

    @cached_property
    def shared_stages(self) -> Mapping[str, tuple[int, ...]]:
        """Stages that hold each tied parameter, by canonical name, where there are several."""
        stages: dict[str, set[int]] = {}
        for alias, stage in self.stage_of.items():
            stages.setdefault(self.canonical[alias], set()).add(stage)
        return {name: tuple(sorted(s)) for name, s in stages.items() if len(s) > 1}

    @cached_property
    def tied_ranks(self) -> Mapping[str, tuple[int, ...]]:
        """Pipeline ranks that hold each tied parameter, where there are several."""
        ranks = {
            name: tuple(sorted({self.stage_ranks[stage] for stage in stages}))
            for name, stages in self.shared_stages.items()
        }
        return {name: found for name, found in ranks.items() if len(found) > 1}

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages on a pipeline rank, along the network."""
        return tuple(s for s, owner in enumerate(self.stage_ranks) if owner == rank)

    def problems(self, *, sequence_parallel: bool = False) -> list[str]:
        """Everything about the module that the layout forbids."""
        found = _layer_problems(self._module, self._degrees)
        if self._degrees.cp > 1:
            found += context_problems(self.trunks, self._degrees.cp)
        if sequence_parallel:
            found += self._sequence_problems()
        if self._degrees.pp > 1:
            found += self._pipeline_problems()
        return found

    def _sequence_problems(self) -> list[str]:
        """Plain modules among parallel layers: they would see a part of the sequence unawares."""
        if not any(isinstance(m, ParallelLayer) for m in self._module.modules()):
            return [
                f"sequence_parallel=True: {type(self._module).__name__} has no parallel layer, "
                "between which a sequence could be split; nearest valid: "
                "sequence_parallel=False, or layers of lightning_megatron.layers"
            ]
        split = [trunk for trunk in self.trunks.values() if trunk.splits_sequences]
        known = {module for trunk in split for module in trunk.modules()}
        return [
            f"sequence_parallel=True: {prefix}.{name} ({type(child).__name__}) is no parallel "
            "layer, so the gradients of its parameters would miss the other ranks' part of the "
            "sequence; nearest valid: a layer of lightning_megatron.layers, or "
            "sequence_parallel=False"
            for prefix, part in self._module.named_children()
            if any(isinstance(m, ParallelLayer) for m in part.modules())
            for name, child in part.named_modules()
            if not isinstance(child, ParallelLayer)
            and child not in known
            and any(True for _ in _own_parameters(child))
        ]

    def _pipeline_problems(self) -> list[str]:
        pp = self._degrees.pp
        if not self.trunks:
            return [_NO_TRUNK.format(pp=pp)]
        if len(self.trunks) > 1:
            return [
                f"pp={pp}: the module holds {len(self.trunks)} PipelineSequentials "
                f"({', '.join(self.trunks)}), a pipeline has one; nearest valid: put all of its "
                "parts into one PipelineSequential, or pp=1"
            ]
        assert self.trunk is not None
        problems = self._partition_problems(self.trunk)
        if problems:
            return problems
        inside = set(self.stage_of)
        return [
            f"pp={pp}: parameter {canonical!r} is shared between the PipelineSequential and the "
            f"rest of the module ({alias!r}); nearest valid: move both uses into the "
            "PipelineSequential, or pp=1"
            for alias, canonical in self.canonical.items()
            if (alias in inside) != (canonical in inside)
        ]

    def _partition_problems(self, trunk: PipelineSequential) -> list[str]:
        given, layout = self._config.partition, self._config.layout
        num_items, num_stages = len(trunk), len(self.stage_ranks)
        counts = given if isinstance(given, list) else None
        problems = partition_problems(num_items, num_stages, counts=counts)
        if layout is not None and not problems:
            problems = layout_problems(layout, TrunkParts.of(trunk.item_names), num_stages)
        elif given == "flops" and self._config.sequence_length is None and self._example is None:
            problems.append(
                "partition='flops', sequence_length=None: operations are counted for samples of "
                "some length; nearest valid: sequence_length=<tokens of a sample>, or "
                "example_input_array in the module, or partition='parameters'"
            )
        elif self._item_flops is not None and not problems:  # an item's own may be negative
            problems = partition_problems(num_items, num_stages, costs=self._item_flops.flops)
        # Where there are too few items the problem is about pp, else about its partition.
        return [f"pp.{p}" if p.startswith("partition=") else p for p in problems]

    @property
    def _example(self) -> Any:
        return getattr(self._module, "example_input_array", None)

    @cached_property
    def _item_flops(self) -> ItemFlops | None:
        """Operations of the items; None where they are not asked for or cannot be told any more."""
        trunk, asked = self.trunk, self._config.partition == "flops" and self._degrees.pp > 1
        if trunk is None or not asked or _is_spread(trunk):
            return None
        return count_item_flops(trunk, self._config.sequence_length, self._example)

    def _costs(self, trunk: PipelineSequential) -> Sequence[float]:
        if self._item_flops is not None:
            return self._item_flops.flops
        return [sum(p.numel() for p in item.parameters()) for item in trunk.items()]


_NO_TRUNK = (
    "pp={pp}: the module has no PipelineSequential, so there is nothing to cut into stages; "
    "nearest valid: wrap the sequential part of the network in "
    "lightning_megatron.PipelineSequential(embedding=..., layers=[...], head=...) and call it once "
    "in every step, or pp=1"
)


def units(module: nn.Module, wrap: Sequence[str] | None, min_numel: int) -> Iterator[nn.Module]:
    """Submodules that data parallelism gathers and frees one at a time, outermost only.

    Args:
        module: where to look.
        wrap: class names, or None for the members of lists and sequences.
        min_numel: smaller candidates are left to their parent.

    A candidate that shares a parameter with anything outside it is left out: a parameter belongs
    to one unit.
    """
    owners: dict[int, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    trunks = [child for child in module.modules() if isinstance(child, PipelineSequential)]
    items = {item for trunk in trunks for item in trunk.items()}
    # A module may be in several others: a network, and what `torch.compile` made of it.
    yield from dict.fromkeys(_units(module, wrap, min_numel, owners, items))


def _units(
    module: nn.Module,
    wrap: Sequence[str] | None,
    min_numel: int,
    owners: Mapping[int, int],
    items: Collection[nn.Module],
) -> Iterator[nn.Module]:
    is_sequence = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        container = isinstance(child, nn.ModuleList | nn.ModuleDict | PipelineSequential)
        chosen = class_name(child) in wrap if wrap is not None else is_sequence or child in items
        if chosen and not container and _fits(child, min_numel, owners):
            yield child
        else:
            yield from _units(child, wrap, min_numel, owners, items)


def _fits(module: nn.Module, min_numel: int, owners: Mapping[int, int]) -> bool:
    own: dict[int, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
    size = sum(p.numel() for p in module.parameters())
    return size >= max(min_numel, 1) and all(owners[key] == count for key, count in own.items())


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _layer_problems(module: nn.Module, degrees: Degrees) -> list[str]:
    """Faults of ``module``, or where it has none, of its parts: a whole speaks for its parts."""
    check = getattr(module, "problems", None)
    own = list(check(degrees)) if callable(check) else []
    return own or [p for child in module.children() for p in _layer_problems(child, degrees)]


def _is_spread(trunk: PipelineSequential) -> bool:
    """Whether an earlier run has put the trunk on a layout: items are elsewhere, or in parts."""
    return any(
        isinstance(m, RemoteItem) or (isinstance(m, ParallelLayer) and m.topology is not None)
        for m in trunk.modules()
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
