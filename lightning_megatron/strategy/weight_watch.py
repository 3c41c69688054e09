"""The part of the strategy that lets user's code see whole weights where ranks have parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_megatron.layers.memory import on_memory
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.layers.stage_weights import ItemWeights, StageWeight, StageWeights
from lightning_megatron.layers.weights import WeightParts
from lightning_megatron.parallel.gradients import GradientSet
from lightning_megatron.parallel.weight_places import place_of_role, weight_places
from lightning_megatron.strategy.group_weights import GroupWeights
from lightning_megatron.strategy.run import Run


class WeightWatch:
    """Lets weights know their places, and hooks see those of all stages.

    Args:
        run: with the weights.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parts: WeightParts | None = None
        self._stages: StageWeights | None = None

    def begin(self) -> None:
        """Let weights know what they are from now on; collective under a pipeline."""
        gradients, trunk = self._run.parallel.gradients, self._run.parallel.trunk
        if trunk is not None and self._run.topology.pp.size > 1:
            self._stages = self._show_stages(gradients, trunk)
        self._parts = WeightParts(weight_places(gradients, self._stages))
        for optimizer in self._run.optimizers if self._stages is not None else ():
            self.show_groups(optimizer)
            vars(optimizer)["zero_grad"] = on_memory(optimizer.zero_grad)

    def stop(self) -> None:
        """Undo `begin`."""
        stages, self._stages = self._stages, None
        if stages is not None:
            stages.sees_all = stages.alive = False
            for optimizer in self._run.optimizers:
                vars(optimizer).pop("zero_grad", None)
                for group in optimizer.param_groups:
                    group["params"] = list.copy(group["params"])
            for item in self._run.module.modules():
                if isinstance(item, RemoteItem):
                    item.show(None)
                elif isinstance(item, PipelineSequential):
                    vars(item).pop("around_items", None)
        if self._parts is not None:
            self._parts.end()
            self._parts = None

    def follow(self, gradients: GradientSet) -> None:
        """Let the weights of another layout know what they are; collective under a pipeline."""
        del gradients
        if self._parts is not None:
            self.stop()
            self.begin()

    @contextmanager
    def on_own_stage(self) -> Iterator[None]:
        """Context of steps and of this library: with the weights of the own stage, as they are."""
        stages, parts = self._stages, self._parts
        if stages is None or parts is None or not stages.sees_all:
            yield
            return
        stages.sees_all, whole = False, parts.hide()
        try:
            yield
        finally:
            if stages.alive:
                parts.show(whole)
                stages.sees_all = True
                stages.forget_gradients()

    def show_groups(self, optimizer: Optimizer) -> None:
        """Let hooks see the weights of all stages in the groups of an optimizer.

        A hook may have added a group, with weights of other stages, on which this rank does not
        step.
        """
        if self._stages is None:
            return
        with self._stages.within_stage():
            self._stages.forget_gradients()
            for index, group in enumerate(optimizer.param_groups):
                if not isinstance(group["params"], GroupWeights):
                    number = self._run.optimizers.index(optimizer)
                    group["params"] = GroupWeights(group["params"], self._stages, (number, index))

    def _show_stages(self, gradients: GradientSet, trunk: PipelineSequential) -> StageWeights:
        topology = self._run.topology
        roles = {id(r.parameter): r for r in gradients.roles if not r.outside}
        groups = {
            id(p): (number, index)
            for number, optimizer in enumerate(self._run.optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        mine: dict[str, list[tuple[str, StageWeight]]] = {}
        for name, item in zip(trunk.item_names, trunk.items(), strict=True):
            if isinstance(item, RemoteItem):
                continue
            mine[name] = []
            for local, p in item.named_parameters(remove_duplicate=False):
                role = roles.get(id(p))
                if role is not None:
                    place = place_of_role(role, topology)
                    weight = StageWeight(
                        name=role.name,
                        owner=topology.pp.rank,
                        shape=tuple(place.shape),
                        dtype=p.dtype,
                        requires_grad=p.requires_grad,
                        group=groups.get(id(p)),
                    )
                    mine[name].append((local, weight))
        found: Sequence[Mapping[str, list[tuple[str, StageWeight]]]]
        found = topology.pp.all_gather_object(mine)
        known: dict[str, StageWeight] = {}
        for rank in found:  # a weight that several have belongs to the first
            for pairs in rank.values():
                for _, weight in pairs:
                    known.setdefault(weight.name, weight)
        by_item = {name: pairs for rank in found for name, pairs in rank.items()}
        order = [weight.name for name in trunk.item_names for _, weight in by_item[name]]
        own = {role.name: role.parameter for role in roles.values()}
        stages = StageWeights(topology, own, [known[name] for name in dict.fromkeys(order)])
        for name, item in zip(trunk.item_names, trunk.items(), strict=True):
            if isinstance(item, RemoteItem):
                names = {_plain(local): weight.name for local, weight in by_item[name]}
                item.show(ItemWeights(stages, names))
        around: Callable[[], Any] = self.on_own_stage
        vars(trunk)["around_items"] = around
        stages.sees_all = True
        return stages


def _plain(name: str) -> str:
    from lightning_megatron._torch import WRAPPER_NAMES

    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
