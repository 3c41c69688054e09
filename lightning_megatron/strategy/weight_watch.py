"""The part of the strategy that lets user's code see whole weights and gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch.graphs import WRAPPER_NAMES
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.optim.held_tensors import HeldTensors
from lightning_megatron.optim.sharded_step import steps_on_shards
from lightning_megatron.strategy.group_weights import GroupWeights, StageState
from lightning_megatron.strategy.optimizer_parameters import optimizers_of_users
from lightning_megatron.strategy.run import Run
from lightning_megatron.strategy.wide_weights import WideWeights, overridden
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.divided_gradient import DividedGradients
from lightning_megatron.whole.memory import on_memory
from lightning_megatron.whole.places import Place
from lightning_megatron.whole.splits import place_of, split_of, whole
from lightning_megatron.whole.stage_weights import (
    StageBuffer,
    StageTensor,
    StageWeight,
    StageWeights,
)
from lightning_megatron.whole.weights import WeightParts, unmark, whole_weight
from lightning_megatron.zero.gradients import GradientSet, ParameterRole
from lightning_megatron.zero.gradients_by_hand import GradientsByHand
from lightning_megatron.zero.late_hooks import LateHooks


class WeightWatch:
    """Lets weights know their places, and hooks see those of all stages.

    Args:
        run: with the weights.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parts: WeightParts | None = None
        self._divided: DividedGradients | None = None
        self._stages: StageWeights | None = None
        self._by_hand: GradientsByHand | None = None
        self._late_hooks: LateHooks | None = None
        self._wide: WideWeights | None = None
        self._is_wide = False
        """Whether hooks around epochs see weights."""
        self._goes_on = False
        """Whether the run is between two layouts."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightWatch":
        """Return itself: a copy of a module is on the same stages."""
        return self

    def begin(self) -> None:
        """Let weights know what they are from now on; collective under a pipeline."""
        gradients, trunk = self._run.parallel.gradients, self._run.parallel.trunk
        if trunk is not None and self._run.topology.pp.size > 1:
            self._stages = self._run.precision.stages = self._show_stages(gradients, trunk)
        places = weight_places(gradients, self._stages)
        self._parts = WeightParts(places, self._run.module)
        self._let_hooks_widen()
        if gradients.spread or self._run.steps.interleaves:
            self._late_hooks = LateHooks(gradients)
        by_hand = self._by_hand = self._gradients_by_hand(gradients)
        assigned = gradients.assignable if self._run.shows_gradients else ()
        self._divided = DividedGradients(gradients.hidden, assigned, by_hand)
        self._let_clear(gradients)
        if self._stages is not None:  # a stage may have no weights
            self._show_optimizers(self._stages)
        if places or by_hand is not None or self._stages is not None:
            for optimizer in optimizers_of_users(self._run):
                clear = _clearing(optimizer.zero_grad, gradients, self._stages, by_hand)
                vars(optimizer)["zero_grad"] = clear

    def _let_hooks_widen(self) -> None:
        """Have weights be wide in the hooks around epochs that ranks have; collective."""
        run = self._run
        if run.precision.types.parameters is None:
            return
        own = overridden(run.trainer, run.module)
        hooks = set[str]().union(*Peers(run.host_group).all_gather(own))
        if hooks:
            self._wide = WideWeights(run.trainer, hooks, self._widen)

    def _widen(self) -> None:
        self._is_wide = True
        self._run.parallel.data.widen()
        if self._stages is not None:
            self._stages.change_formats(at_rest=True)

    def narrow(self) -> None:
        """Let weights be as steps compute with them, after hooks that saw them at rest."""
        if not self._is_wide:
            return
        self._is_wide = False
        self._run.parallel.data.narrow()
        if self._stages is not None:
            self._stages.change_formats(at_rest=False)

    @contextmanager
    def making_optimizers(self) -> Iterator[None]:
        """Context in which optimizers are made of weights that know the whole."""
        places = weight_places(self._run.parallel.gradients)
        cut = [(weight, place) for weight, place in places if place.is_cut]
        parts = WeightParts(cut, self._run.module)
        try:
            yield
        finally:
            parts.end()
        for optimizer in self._run.optimizers:
            _settle_copies(optimizer)
            if steps_on_shards(optimizer):
                _cut_state(optimizer, self._run.parallel.gradients)

    def stop(self) -> None:
        """Undo `begin`."""
        stages, self._stages = self._stages, None
        self._run.precision.stages = None
        for optimizer in optimizers_of_users(self._run) if self._parts is not None else ():
            vars(optimizer).pop("zero_grad", None)
        if stages is not None:
            stages.sees_all = stages.alive = False
            for optimizer in self._run.optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [p for p in group["params"] if not isinstance(p, StageTensor)]
                optimizer.state = defaultdict(dict, optimizer.state)
            for item in self._run.module.modules():
                if isinstance(item, RemoteItem):
                    item.show(None)
                elif isinstance(item, PipelineSequential):
                    vars(item).pop("around_items", None)
        for watch in (self._by_hand, self._late_hooks, self._wide):
            if watch is not None:
                watch.close()
        self._by_hand = self._late_hooks = self._wide = None
        self._is_wide = False
        if self._divided is not None:
            vars(self._run.module).pop("zero_grad", None)
            self._divided.end()
            self._divided = None
        if self._parts is not None:
            self._parts.end()
            self._parts = None

    def _gradients_by_hand(self, gradients: GradientSet) -> GradientsByHand | None:
        """Watch over gradients that users make, where hooks or steps of theirs may do so."""
        run = self._run
        if not (run.shows_gradients and gradients.spread):
            return None
        return GradientsByHand(
            gradients,
            run.parallel.data,
            accumulates=lambda: run.steps.accumulating,
            check=self._check_by_hand,
            ended=self._call_hooks,
        )

    def _check_by_hand(self, what: str) -> None:
        """Refuse gradients that are not those of the loss that the strategy would differentiate.

        Args:
            what: code of the user's that makes them.
        """
        run, lacks = self._run, ""
        if run.precision.loss_factor != 1.0 and "backward" in what:
            lacks = "precision='16-mixed': the loss is not scaled"
        if run.steps.step.share.portion is not None:
            lacks = "batch_shares: gradients do not count by this rank's share of the samples"
        if lacks:
            raise ConfigError(
                f"{what}, {lacks}, which self.manual_backward sees to; nearest valid: "
                "self.manual_backward(loss)"
            )

    def know_new(self) -> None:
        """An optimizer has got further parameters."""
        if self._by_hand is not None and self._divided is not None:
            self._divided.add(self._run.parallel.gradients.assignable, self._by_hand)

    def begin_batch(self) -> None:
        """Learn of what is trained from now on."""
        if self._by_hand is not None:
            self._by_hand.watch()
        if self._late_hooks is not None:
            self._late_hooks.find()

    def own_backwards(self) -> AbstractContextManager[None]:
        """Context in which the steps see to the gradients of backwards, or nobody wants them."""
        return nullcontext() if self._by_hand is None else self._by_hand.paused()

    def end_backward(self) -> None:
        """A backward of the strategy's own has ended."""
        if self._by_hand is not None and self._run.steps.step.reduces_all:
            self._by_hand.forget()
        self._call_hooks()

    def _call_hooks(self) -> None:
        if self._late_hooks is not None:
            self._late_hooks.call(accumulates=self._run.steps.accumulating)

    def _let_clear(self, gradients: GradientSet) -> None:
        """Have ``zero_grad`` of the module look at no gradient: Lightning calls it to validate."""
        module = self._run.module
        if not gradients.hidden or type(module).zero_grad is not nn.Module.zero_grad:
            return

        def zero_grad(set_to_none: bool = True) -> None:
            if set_to_none:
                gradients.forget_rows()
            nn.Module.zero_grad(module, set_to_none)

        vars(module)["zero_grad"] = zero_grad

    def let_go(self) -> None:
        """Forget the weights of a layout, until `follow` knows another."""
        self._goes_on = self._parts is not None
        self.stop()

    def follow(self) -> None:
        """Let the weights of another layout know what they are; collective under a pipeline."""
        if self._goes_on:
            self._goes_on = False
            self.begin()

    def on_own_stage(self) -> AbstractContextManager[None]:
        """Context of steps and of this library: with the weights of the own stage, as they are."""
        stages, parts = self._stages, self._parts
        if stages is None or parts is None or not stages.sees_all:
            return nullcontext()
        return self._hidden(stages, parts)

    @contextmanager
    def _hidden(self, stages: StageWeights, parts: WeightParts) -> Iterator[None]:
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

        A hook may have made a list, with weights of other stages, on which this rank does not
        step.
        """
        stages = self._stages
        if stages is None:
            return
        with stages.within_stage():
            stages.forget_gradients()
            for group in optimizer.param_groups:
                if not isinstance(group["params"], GroupWeights):
                    group["params"] = GroupWeights(group["params"], stages)
            if not isinstance(optimizer.state, StageState):
                optimizer.state = StageState(dict, optimizer.state)

    def _show_optimizers(self, stages: StageWeights) -> None:
        """Let hooks see the groups of all stages; collective."""
        optimizers = self._run.optimizers
        options = [[_options(group) for group in o.param_groups] for o in optimizers]
        every = Peers.over(self._run.topology.pp).all_gather(options)
        for number, optimizer in enumerate(optimizers):
            is_known = all(of_rank[number] == options[number] for of_rank in every)
            for index, group in enumerate(optimizer.param_groups):
                shown = _of_all_stages(group["params"], stages, (number, index))
                group["params"] = GroupWeights(shown, stages, is_known=is_known)
            self.show_groups(optimizer)

    def _show_stages(self, gradients: GradientSet, trunk: PipelineSequential) -> StageWeights:
        topology = self._run.topology
        roles = {id(r.parameter): r for r in gradients.roles if not r.outside}
        groups = {
            id(p): (number, index)
            for number, optimizer in enumerate(self._run.optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        mine: dict[str, _Item] = {}
        for name, item in zip(trunk.item_names, trunk.items(), strict=True):
            if not isinstance(item, RemoteItem):
                mine[name] = self._describe(item, roles, groups)
        ranks: Sequence[Mapping[str, _Item]] = Peers.over(topology.pp).all_gather(mine)
        known: dict[str, StageWeight] = {}
        for items in ranks:  # a weight that several have belongs to the first
            for found in items.values():
                for weight in found.weights.values():
                    known.setdefault(weight.name, weight)
        every = {name: found for items in ranks for name, found in items.items()}
        order = [w.name for name in trunk.item_names for w in every[name].weights.values()]
        own = {role.name: role.parameter for role in roles.values()}
        stages = StageWeights(topology, own, [known[name] for name in dict.fromkeys(order)])
        for name, item in zip(trunk.item_names, trunk.items(), strict=True):
            if isinstance(item, RemoteItem):
                names = {local: weight.name for local, weight in every[name].weights.items()}
                stages.fill(item.show(stages), names, every[name].buffers)
        vars(trunk)["around_items"] = self.on_own_stage
        stages.sees_all = True
        return stages

    def _describe(
        self, item: nn.Module, roles: Mapping[int, ParameterRole], groups: Mapping[int, Any]
    ) -> "_Item":
        """Describe an item of this rank for the others."""
        topology, weights = self._run.topology, dict[str, StageWeight]()
        for name, p in item.named_parameters(remove_duplicate=False):
            role = roles.get(id(p))
            if role is not None:
                weights[_plain(name)] = StageWeight(
                    name=role.name,
                    owner=topology.pp.rank,
                    shape=tuple(place_of_role(role, topology).shape),
                    dtype=p.dtype,
                    at_rest=p.dtype if role.rows is None else role.rows.values.dtype,
                    requires_grad=p.requires_grad,
                    group=groups.get(id(p)),
                )
        buffers = [
            StageBuffer(
                name=_plain(name), owner=topology.pp.rank, shape=tuple(b.shape), dtype=b.dtype
            )
            for name, b in item.named_buffers(remove_duplicate=False)
        ]
        return _Item(weights, buffers)


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a group as text."""
    return {k: repr(v) for k, v in group.items() if k not in ("params", "param_names")}


def _of_all_stages(
    own: Sequence[Tensor], stages: StageWeights, group: tuple[int, int]
) -> list[Tensor]:
    """Return the parameters of a group on all stages, in the order of the network."""
    names = {place_of(p).name for p in own if stages.owner_of(p) is not None}
    names |= {name for name in stages.names if stages.known(name).group == group}
    inside = [stages.weight(name) for name in stages.names if name in names]
    at = next((at for at, p in enumerate(own) if stages.owner_of(p) is not None), len(own))
    return [*own[:at], *inside, *(p for p in own[at:] if stages.owner_of(p) is None)]


def _settle_copies(optimizer: Optimizer) -> None:
    """Make what an optimizer has computed of parts as large as what it will step on; collective."""
    held = HeldTensors(optimizer)
    parts = [x for x in held.tensors() if place_of(x) is not None or split_of(x) is not None]
    if steps_on_shards(optimizer):
        for x in parts:
            unmark(x)
    else:
        held.exchange({id(x): whole(whole_weight(x)).detach() for x in parts})


def _cut_state(optimizer: Optimizer, gradients: GradientSet) -> None:
    """Keep this rank's part of state that an optimizer has when it is made, as Adagrad has."""
    for role in gradients.roles:
        values = optimizer.state.get(role.parameter, {})
        spec, own = gradients.shard_specs[role.parameter], role.values
        for key, value in values.items():
            if isinstance(value, Tensor) and value.ndim and tuple(value.shape) in spec.shapes:
                values[key] = spec.own_part(value).to(own.device, own.dtype, copy=True)


def _clearing(
    zero_grad: Callable[..., Any],
    gradients: GradientSet,
    stages: StageWeights | None,
    by_hand: GradientsByHand | None,
) -> Callable[..., Any]:
    """Let ``zero_grad`` take the weights of this rank alone, and hooks ask what it left."""

    @on_memory
    def cleared(*args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        gradients.forget_rows()
        if by_hand is not None and not kwargs.get("set_to_none", (*args, True)[0]):
            by_hand.cleared()
        if stages is not None:
            stages.forget_gradients()

    return cleared


@dataclass(frozen=True)
class _Item:
    """Weights of an item by their names within it, and its buffers."""

    weights: dict[str, StageWeight]
    buffers: list[StageBuffer]


def _plain(name: str) -> str:
    """Return the name of a tensor without those of wrappers."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def weight_places(
    gradients: GradientSet, stages: StageWeights | None = None
) -> list[tuple[nn.Parameter, Place]]:
    """Return the parameters of which this rank has a part, or one of several copies, and where.

    Args:
        gradients: with the parameters.
        stages: weights of all stages of a pipeline; None without one.
    """
    found: list[tuple[nn.Parameter, Place]] = []
    for role in gradients.roles:
        place = place_of_role(role, gradients.topology)
        if stages is not None and not role.outside and role.name in stages.names:
            place = replace(place, stages=stages, owner=stages.known(role.name).owner)
        if place.is_cut or place.copies > 1 or place.stages is not None:
            found.append((role.parameter, place))
    return found


def place_of_role(role: ParameterRole, topology: Topology) -> Place:
    """Return the place of a parameter, but for its stage."""
    shard, layer = role.shard, role.axes(topology).layer
    cut = shard is not None and shard.dim is not None and layer.size > 1
    weight = role.parameter
    rows = weight if isinstance(weight, DTensor) else None
    learners = layer.group if cut and layer is topology.ep else None
    summed = shard is not None and shard.sum_gradients and topology.tp.size > 1
    return Place(
        name=role.name,
        topology=topology,
        shape=torch.Size(weight.shape if shard is None else shard.full_shape),
        shard=shard,
        axis=layer if cut else None,
        rows=rows,
        copies=topology.tp.size if summed else 1,
        learners=learners if rows is None else topology.loss.group,
    )
