"""Runs a user's step through a pipeline, one microbatch and stage at a time.

The runner carries out this rank's list of actions (`schedule`). For a forward it calls the user's
whole step with a port in the trunk: the port hands in the activation received from the previous
stage and, unless this is the last stage, ends the step by raising `StageBoundary` with the stage's
output. For a backward it receives the gradient of that output, runs autograd from the output to the
received activation, and sends that activation's gradient back. Where the schedule splits the
backward, linear layers leave their weight gradients behind (`layers.delayed_wgrad`), to be computed
by the weight action.

Sends return at once; receives are posted ahead of time (`links`). After a send only the output's
*gradient edge* is kept, so the memory of an activation that the next stage holds anyway is freed
here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_flatten, tree_map
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.delayed_wgrad import WgradQueue, WgradTask, add_gradients, attach
from lightning_megatron.layers.inplace_inputs import as_results, works_in_place
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.pipeline.joined import joined
from lightning_megatron.pipeline.links import Links, MessagePlan
from lightning_megatron.pipeline.microbatch import detach
from lightning_megatron.pipeline.relay import StageRelay
from lightning_megatron.pipeline.scatter_gather import ScatterGatherChoice
from lightning_megatron.pipeline.sequence_lengths import SequenceLengths
from lightning_megatron.pipeline.timing import ActionClock, Bubble, ItemTimes, bubble, saved_bytes
from lightning_megatron.run_log.sections import BACKWARD, FORWARD, SectionClock
from lightning_megatron.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
)
from lightning_megatron.topology.auxiliary_seeds import AuxiliarySeeds
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import whole

Step = Callable[[int, bool], Any]
"""The user's step on a microbatch; the flag says whether it runs to its end."""
LossOf = Callable[[Any, int], Tensor | None]
"""Function of the step's output and the microbatch that gives the scalar to differentiate."""


class Reduction(Protocol):
    """Communication of parameters and gradients around the work on a stage."""

    def before_forward(self, stage: int) -> None:
        """This rank's ``stage``-th stage will run forward once its input has arrived."""
        ...

    def before_backward(self, stage: int, *, last: bool, split: bool) -> None:
        """A backward, or its input part (``split``), of this rank's ``stage``-th stage begins.

        ``last``: after it the stage's gradients are complete.
        """
        ...

    def after_weights(self, stage: int, *, last: bool) -> None:
        """A weight part has ended."""
        ...


class Executor(Protocol):
    """Runs the microbatches of a batch."""

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        ...

    def train(self, step: Step, loss_of: LossOf, count: int, reduction: Reduction) -> list[Any]:
        """Forward and backward of every microbatch.

        Args:
            step: the user's step.
            loss_of: what to differentiate.
            count: number of microbatches; all ranks of the pipeline must agree.
            reduction: told of every backward.

        Returns:
            On the last stage the detached outputs of the step by microbatch, elsewhere nothing.
        """
        ...

    def evaluate(self, step: Step, count: int, repeated: int = 0) -> list[Any]:
        """Forward of every microbatch; outputs of the step on the last stage, elsewhere nothing.

        Args:
            step: the user's step.
            count: number of microbatches.
            repeated: how many at the end only run through the trunk, and have no output.
        """
        ...

    def keep_for_repeat(self, keeps: Callable[[Any], bool] | None) -> None:
        """Say of which outputs of the step the next batch keeps what `repeat` needs."""
        ...

    def repeat(self, step: Callable[[], Any]) -> Any:
        """Call the step once more on all microbatches of the latest batch together.

        On the last stage only, and once.
        """
        ...


class NoPipeline(Executor):
    """Runs microbatches one after the other in a process that holds the whole network.

    Args:
        lengths: told of each forward and backward; None where no sequences are split.
        seeds: told of each backward; None where there are no auxiliary losses.
        sections: told of every change between forward and backward.
    """

    is_last = True

    def __init__(
        self,
        lengths: SequenceLengths | None = None,
        seeds: AuxiliarySeeds | None = None,
        sections: SectionClock | None = None,
    ) -> None:
        self._lengths = lengths
        self._seeds = AuxiliarySeeds() if seeds is None else seeds
        self._sections = SectionClock() if sections is None else sections

    @override
    def train(self, step: Step, loss_of: LossOf, count: int, reduction: Reduction) -> list[Any]:
        outputs = []
        for index in range(count):
            self._sections.enter(FORWARD)
            self._begin_forward(index)
            output = step(index, True)
            loss = loss_of(output, index)
            self._sections.enter(BACKWARD)
            if loss is not None:
                reduction.before_backward(0, last=index == count - 1, split=False)
                if self._lengths is not None:
                    self._lengths.backward(index)
                with self._seeds.microbatch(index):
                    loss.backward()  # type: ignore[no-untyped-call]
            outputs.append(detach(output))
            del output, loss
        return outputs

    @override
    def evaluate(self, step: Step, count: int, repeated: int = 0) -> list[Any]:
        outputs = []
        for index in range(count - repeated):
            self._begin_forward(index)
            outputs.append(step(index, True))
        return outputs

    @override
    def keep_for_repeat(self, keeps: Callable[[Any], bool] | None) -> None:
        pass  # the network runs again

    @override
    def repeat(self, step: Callable[[], Any]) -> Any:
        self._begin_forward(0)
        return step()

    def _begin_forward(self, index: int) -> None:
        if self._lengths is not None:
            self._lengths.forward(index)


class StageBoundary(BaseException):
    """Carries a stage's output out of the user's step.

    Not an `Exception`, so that a user's ``except Exception`` around the trunk does not stop it.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage ended inside the step; this is not an error")
        self.output = output


class _Port:
    """One passage of one microbatch through one stage of the trunk."""

    has_run = False

    def __init__(
        self,
        position: int,
        random: Callable[[], AbstractContextManager[None]],
        *,
        first: bool,
        last: bool,
        received: Any,
        examines: bool = False,
    ) -> None:
        self._examines = examines
        self.position = position
        self.random = random
        self._first = first
        self._last = last
        self._received = received
        self.calls = 0
        self.output: Any = None

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError(
                "The step called its PipelineSequential twice. With pp>1 it can be called once per "
                "step; put both uses into one call, for example by concatenating the inputs"
            )
        if self._examines:
            _refuse_inputs_that_learn(args)
        return args if self._first else (self._received,)

    def leave(self, output: Any) -> Any:
        if self._last:
            self.output = output
            return output
        raise StageBoundary(whole(output))

    def interrupt(self) -> None:
        raise ConfigError(
            "pp > 1: text is generated in a step that does not name it: the stages work on "
            "different microbatches, and cannot pass tokens along; nearest valid: .generate(...) "
            "in the code of validation_step, test_step or predict_step, or of a method that it "
            "calls, or in a hook, or pp=1"
        )


def _refuse_inputs_that_learn(args: Any) -> None:
    """Refuse inputs of a trunk by which a step may differentiate; on every stage alike.

    Raises:
        ConfigError: they come from a tensor that requires a gradient, and is no parameter.
    """
    to_see = [x.grad_fn for x in _tensors(args) if x.grad_fn is not None]
    leaves = [x for x in _tensors(args) if x.is_leaf and x.requires_grad]
    seen: set[Any] = set()
    while to_see:
        node: Any = to_see.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        to_see += [following for following, _ in node.next_functions]
    if not all(isinstance(leaf, nn.Parameter) for leaf in leaves):
        raise ConfigError(
            "pp > 1: the input of the PipelineSequential requires a gradient, and is no parameter; "
            "a step cannot differentiate the output by it (torch.autograd.grad), as the stages "
            "between are on other ranks; nearest valid: pp=1"
        )


class _Again(_Port):
    """Passage of the whole batch through a stage that has run on its microbatches.

    Args:
        position: of the stage.
        outputs: of the microbatches.
    """

    has_run = True

    def __init__(self, position: int, outputs: Sequence[Any]) -> None:
        super().__init__(position, nullcontext, first=True, last=True, received=None)
        self.output = joined(outputs)

    @override
    def leave(self, output: Any) -> Any:
        return self.output


@dataclass
class _Saved:
    """Tensors of a forward that its backward needs."""

    inputs: list[Tensor]
    roots: list[Any]
    """Tensors or gradient edges to start from."""


class Pipeline(Executor):
    """This rank's stages of a pipeline.

    Attributes:
        activation_bytes: if not None, filled with what autograd keeps of a microbatch, by stage.

    Args:
        topology: the layout; the group of its pp axis carries the messages.
        trunk: the module's `PipelineSequential`, reduced to this rank's stages.
        make: from a number of microbatches, the schedule for training.
        stage_ranks: pipeline rank of every stage.
        host_group: gloo group over the pp axis, where messages between stages are not on the host.
        scatter_gather: whether tp ranks send parts of what they hold alike.
        sections: told of every change between forward and backward.
    """

    def __init__(
        self,
        topology: Topology,
        trunk: PipelineSequential,
        make: Callable[[int], Schedule],
        stage_ranks: Sequence[int],
        host_group: dist.ProcessGroup | None = None,
        scatter_gather: ScatterGatherChoice = "auto",
        sections: SectionClock | None = None,
    ) -> None:
        self._trunk = trunk
        trunk.relay = StageRelay(topology, stage_ranks, host_group)
        self._rank = topology.pp.rank
        self._links = Links(topology, stage_ranks, host_group, scatter_gather)
        self._final = len(stage_ranks) - 1
        mine = (stage for stage, owner in enumerate(stage_ranks) if owner == self._rank)
        self._position = {stage: position for position, stage in enumerate(mine)}
        self._lengths = SequenceLengths(topology, len(self._position))
        self._seeds = topology.auxiliary_seeds
        self._works_in_place = [works_in_place(items) for items in trunk.stage_items]
        self._pp = topology.pp
        self._device = topology.device
        self._random = topology.rng.trunk
        self._clock: ActionClock | None = None
        self._measures = False
        self._profile: ItemTimes | None = None
        self._measured: Schedule | None = None
        self._deferral = WgradQueue()
        self._defers = False
        self._sections = SectionClock() if sections is None else sections
        self.activation_bytes: dict[int, int] | None = None
        self._keeps: Callable[[Any], bool] | None = None
        self._kept: dict[int, Any] = {}
        self._examined: set[tuple[int, bool]] = set()
        self.use(make)

        @lru_cache(maxsize=16)
        def evaluation(count: int) -> MessagePlan:
            return MessagePlan(forward_only(topology.pp.size, count, stage_ranks), self._rank)

        self._evaluation = evaluation

    def use(self, make: Callable[[int], Schedule]) -> None:
        """Train with other schedules from now on; the stages must lie on the same ranks."""

        @lru_cache(maxsize=16)
        def training(count: int) -> MessagePlan:
            return MessagePlan(make(count), self._rank)

        self._training = training

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._final in self._position

    def measure(self, on: bool) -> None:
        """Note the times of the coming steps, or stop it."""
        self._measures = on
        self._watch()

    def profile(self, on: bool) -> ItemTimes | None:
        """Note the times of the items in the coming steps, or stop it and return them."""
        found, self._profile = self._profile, None
        if found is not None:
            found.close()
        if on:
            self._profile = ItemTimes(self._trunk, list(self._position), self._final)
        self._watch()
        return found

    def _watch(self) -> None:
        wanted = self._measures or self._profile is not None
        self._clock = ActionClock(self._device) if wanted else None

    def bubble(self) -> Bubble | None:
        """Idle time of the latest step, None if it was not measured; collective over the ranks."""
        if self._clock is None or self._measured is None or not self._measures:
            return None
        return bubble(self._measured, Peers.over(self._pp).all_gather(self._clock.read()))

    @override
    def train(self, step: Step, loss_of: LossOf, count: int, reduction: Reduction) -> list[Any]:
        traffic = self._training(count)
        if traffic.schedule.splits_backward and not self._defers:
            for items in self._trunk.stage_items:
                attach(items, self._deferral)
            self._defers = True
        clock = self._clock
        if clock is not None:
            clock.begin()
            if self._profile is not None:
                self._profile.clock = clock
            self._measured = traffic.schedule
        self._links.begin(traffic)
        row = traffic.schedule.row(self._rank)
        lasts = _completing(row)
        saved: dict[tuple[int, int], _Saved] = {}
        deferred: dict[tuple[int, int], list[WgradTask]] = {}
        outputs: dict[int, Any] = {}
        for number, action in enumerate(row):
            kind, stage, microbatch = action
            key, last = (stage, microbatch), number in lasts
            self._sections.enter(FORWARD if kind is Kind.FORWARD else BACKWARD)
            self._deferral.enabled = traffic.schedule.is_split(stage, microbatch)
            if kind is Kind.FORWARD:
                reduction.before_forward(self._position[stage])
                saved[key] = self._pass_on(action, *self._run_step(step, action), loss_of, outputs)
            elif kind is Kind.BACKWARD_WEIGHT:
                self._started()
                add_gradients(deferred.pop(key))
                reduction.after_weights(self._position[stage], last=last)
            else:
                split = kind is Kind.BACKWARD_INPUT
                reduction.before_backward(self._position[stage], last=last, split=split)
                self._lengths.backward(microbatch, self._position[stage])
                self._deferral.collecting = split
                try:
                    self._backward(action, saved.pop(key))
                finally:
                    self._deferral.collecting = False
                if split:
                    deferred[key] = self._deferral.take()
            if clock is not None:
                clock.stop()
        self._links.end()
        if clock is not None:
            clock.end()
            if self._profile is not None:
                self._profile.add(traffic.schedule, self._rank)
        return [detach(outputs[i]) for i in range(count)] if self.is_last else []

    @override
    def evaluate(self, step: Step, count: int, repeated: int = 0) -> list[Any]:
        traffic = self._evaluation(count)
        clock, self._clock = self._clock, None  # training is what is measured
        self._links.begin(traffic)
        outputs = []
        for action in traffic.schedule.row(self._rank):
            counts = action.microbatch < count - repeated
            output, _ = self._run_step(step, action, to_end=counts)
            if action.stage != self._final:
                self._links.send(action, self._lengths.load(output))
            elif counts:
                outputs.append(output)
        self._links.end()
        self._clock = clock
        return outputs

    @override
    def keep_for_repeat(self, keeps: Callable[[Any], bool] | None) -> None:
        self._keeps, self._kept = keeps, {}

    @override
    def repeat(self, step: Callable[[], Any]) -> Any:
        kept, self._kept = self._kept, {}
        position = self._position[self._final]
        self._lengths.backward(0, position)  # whose sequences are those of all
        self._trunk.connect(_Again(position, [kept[index] for index in sorted(kept)]))
        try:
            return step()
        finally:
            self._trunk.connect(None)

    def _started(self) -> None:
        if self._clock is not None:
            self._clock.start()

    def _pass_on(
        self, action: Action, output: Any, received: Any, loss_of: LossOf, outputs: dict[int, Any]
    ) -> _Saved:
        """Send what a stage has computed, or take its loss; keep what the backward needs."""
        inputs = [t for t in _tensors(received) if t.requires_grad]
        if action.stage == self._final:
            loss = loss_of(output, action.microbatch)
            outputs[action.microbatch] = detach(output)
            return _Saved(inputs, [] if loss is None or not loss.requires_grad else [loss])
        self._links.send(action, self._lengths.load(output))
        return _Saved(inputs, [get_gradient_edge(t) for t in _tensors(output) if t.requires_grad])

    def _run_step(self, step: Step, action: Action, *, to_end: bool = True) -> tuple[Any, Any]:
        stage = action.stage
        first, position = stage == 0, self._position[stage]
        last = stage == self._final and to_end
        self._lengths.forward(action.microbatch, position)
        received = None if first else self._lengths.unload(self._links.receive(action))
        self._started()
        entering = as_results(received)
        if self._works_in_place[position]:
            entering = tree_map(_copied, entering)
        passage = stage, self._trunk.training
        port = _Port(
            position,
            self._random,
            first=first,
            last=last,
            received=entering,
            examines=passage not in self._examined,
        )
        self._examined.add(passage)
        self._trunk.connect(port)
        counting = nullcontext() if self.activation_bytes is None else self._counting(stage)
        try:
            with counting:
                output = step(action.microbatch, last)
        except StageBoundary as boundary:
            output = boundary.output
            boundary.output = None
            boundary.__traceback__ = None
        finally:
            self._trunk.connect(None)
        if port.calls == 0:
            raise RuntimeError(
                "The step returned without calling the module's PipelineSequential; with pp>1 "
                "every step must call it once, whatever the batch"
            )
        if last and self._keeps is not None and self._keeps(output):
            self._kept[action.microbatch] = detach(port.output)
        return output, received

    @contextmanager
    def _counting(self, stage: int) -> Iterator[None]:
        """Note what autograd keeps of a stage's forward within the block."""
        assert self.activation_bytes is not None
        with saved_bytes() as count:
            try:
                yield
            finally:
                known = self.activation_bytes.get(stage, 0)
                self.activation_bytes[stage] = max(known, count[0])

    def _backward(self, action: Action, saved: _Saved) -> None:
        if action.stage == self._final:
            self._started()
            if saved.roots:
                with self._seeds.microbatch(action.microbatch):
                    torch.autograd.backward(saved.roots)
        else:
            gradients = self._seeds.unload(action.microbatch, self._links.receive(action))
            self._started()
            pairs = [
                (root, gradient)
                for root, gradient in zip(saved.roots, gradients, strict=True)
                if gradient is not None
            ]
            if pairs:
                with self._seeds.microbatch(action.microbatch):
                    torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
        if action.stage:
            gradients = [t.grad for t in saved.inputs]
            self._links.send(action, self._seeds.load(action.microbatch, gradients))


def _completing(row: tuple[Action, ...]) -> frozenset[int]:
    """Places in a row of the actions after which a stage's gradients are complete."""
    ends: dict[int, int] = {}
    for number, action in enumerate(row):
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            ends[action.stage] = number
    return frozenset(ends.values())


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # saves most of the time, and is what most networks pass
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
