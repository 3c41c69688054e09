"""Runs a user's step through a pipeline, one microbatch and stage at a time.

The runner carries out this rank's list of actions (`schedule`). For a forward it calls the user's
whole step with a port in the trunk: the port hands in the activation received from the previous
stage and, unless this is the last stage, ends the step by raising `StageBoundary` with the stage's
output. For a backward it receives the gradient of that output, runs autograd from the output to the
received activation, and sends that activation's gradient back.

Sends return at once; receives are posted ahead of time (`comm.point_to_point`). After a send only
the output's *gradient edge* is kept, so the memory of an activation that the next stage holds
anyway is freed here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_megatron._torch import tree_flatten
from lightning_megatron.comm.point_to_point import Channel, DeviceChannel, InlineChannel
from lightning_megatron.pipeline.entering import as_results
from lightning_megatron.pipeline.microbatch import detach
from lightning_megatron.pipeline.schedule import Kind, Schedule, forward_only, make_schedule
from lightning_megatron.pipeline.sequential import PipelineSequential
from lightning_megatron.topology.mesh import Topology

_FORWARD_TAG, _BACKWARD_TAG = 1, 2


class StageBoundary(BaseException):
    """Carries a stage's output out of the user's step.

    Not an `Exception`, so that a user's ``except Exception`` around the trunk does not stop it.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage ended inside the step; this is not an error")
        self.output = output


class _Port:
    """One passage of one microbatch through the trunk."""

    def __init__(self, *, first: bool, last: bool, received: Any) -> None:
        self._first, self._last, self._received = first, last, received
        self.calls = 0

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError(
                "The step called its PipelineSequential twice. With pp>1 it can be called once per "
                "step; put both uses into one call, for example by concatenating the inputs"
            )
        return args if self._first else (self._received,)

    def leave(self, output: Any) -> Any:
        if self._last:
            return output
        raise StageBoundary(output)


@dataclass
class _Saved:
    """What a backward needs of its forward."""

    inputs: list[Tensor]
    roots: list[Any]
    """Tensors or gradient edges to start from."""


class NoPipeline:
    """Runs microbatches one after the other in a process that holds the whole network."""

    def train(
        self,
        step: Callable[[int], Any],
        loss_of: Callable[[Any, int], Tensor | None],
        count: int,
        before_backward: Callable[[bool], None],
    ) -> list[Any]:
        """Forward and backward of every microbatch; see `Pipeline.train`."""
        outputs = []
        for index in range(count):
            output = step(index)
            loss = loss_of(output, index)
            if loss is not None:
                before_backward(index == count - 1)
                loss.backward()  # type: ignore[no-untyped-call]
            outputs.append(detach(output))
            del output, loss
        return outputs

    def evaluate(self, step: Callable[[int], Any], count: int) -> list[Any]:
        """Forward of every microbatch."""
        return [step(index) for index in range(count)]


class Pipeline:
    """This rank's stage of a pipeline.

    Args:
        topology: the layout; the group of its pp axis carries the messages.
        trunk: the module's `PipelineSequential`, reduced to this rank's stage.
        schedule: name of the schedule for training.
        host_group: gloo group over the pp axis, where the device's own group is not gloo.
    """

    def __init__(
        self,
        topology: Topology,
        trunk: PipelineSequential,
        schedule: str,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._trunk, self._schedule_name = trunk, schedule
        self._rank, self._size = topology.pp.rank, topology.pp.size
        self._topology, self._host_group = topology, host_group
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        before, after = self._rank - 1, self._rank + 1
        self._from_previous = self._channel(before, _FORWARD_TAG)
        self._to_next = self._channel(after, _FORWARD_TAG)
        self._from_next = self._channel(after, _BACKWARD_TAG)
        self._to_previous = self._channel(before, _BACKWARD_TAG)

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the first stage."""
        return self._rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._rank == self._size - 1

    def train(
        self,
        step: Callable[[int], Any],
        loss_of: Callable[[Any, int], Tensor | None],
        count: int,
        before_backward: Callable[[bool], None],
    ) -> list[Any]:
        """Forward and backward of every microbatch.

        Args:
            step: the user's step on the given microbatch.
            loss_of: from the step's output and the microbatch, the scalar to differentiate.
            count: number of microbatches; all ranks of the pipeline must agree.
            before_backward: called before each backward with whether it is the last one.

        Returns:
            On the last stage the detached outputs of the step by microbatch, elsewhere nothing.
        """
        schedule = self._schedule(count, training=True)
        self._expect(count, (self._from_previous, self._from_next))
        self._start(count, (self._to_next, self._to_previous))
        saved: dict[int, _Saved] = {}
        outputs: dict[int, Any] = {}
        backwards = 0
        for action in schedule.actions[self._rank]:
            index = action.microbatch
            if action.kind is Kind.FORWARD:
                outputs[index], saved[index] = self._forward(step, loss_of, index)
            else:
                backwards += 1
                before_backward(backwards == count)
                self._backward(saved.pop(index))
        self._flush()
        return [detach(outputs[i]) for i in range(count)] if self.is_last else []

    def evaluate(self, step: Callable[[int], Any], count: int) -> list[Any]:
        """Forward of every microbatch; outputs of the step on the last stage, elsewhere nothing."""
        self._expect(count, (self._from_previous,))
        self._start(count, (self._to_next,))
        outputs = []
        for action in self._schedule(count, training=False).actions[self._rank]:
            output, _ = self._run_step(step, action.microbatch)
            if self.is_last:
                outputs.append(output)
            else:
                _present(self._to_next).send(output)
        self._flush()
        return outputs

    def _forward(
        self, step: Callable[[int], Any], loss_of: Callable[[Any, int], Tensor | None], index: int
    ) -> tuple[Any, _Saved]:
        output, received = self._run_step(step, index)
        inputs = [t for t in _tensors(received) if t.requires_grad]
        if self.is_last:
            loss = loss_of(output, index)
            roots: list[Any] = [] if loss is None or not loss.requires_grad else [loss]
            return detach(output), _Saved(inputs, roots)
        _present(self._to_next).send(output)
        edges = [get_gradient_edge(t) for t in _tensors(output) if t.requires_grad]
        return None, _Saved(inputs, edges)

    def _run_step(self, step: Callable[[int], Any], index: int) -> tuple[Any, Any]:
        received = None if self.is_first else _present(self._from_previous).receive()
        entering = as_results(received)
        port = _Port(first=self.is_first, last=self.is_last, received=entering)
        self._trunk.connect(port)
        try:
            output = step(index)
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
        return output, received

    def _backward(self, saved: _Saved) -> None:
        if self.is_last:
            if saved.roots:
                torch.autograd.backward(saved.roots)
        else:
            gradients = _present(self._from_next).receive()
            pairs = [
                (root, gradient)
                for root, gradient in zip(saved.roots, gradients, strict=True)
                if gradient is not None
            ]
            if pairs:
                torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
        if not self.is_first:
            _present(self._to_previous).send([t.grad for t in saved.inputs])

    def _schedule(self, count: int, *, training: bool) -> Schedule:
        key = (training, count)
        if key not in self._schedules:
            self._schedules[key] = (
                make_schedule(self._schedule_name, self._size, count)
                if training
                else forward_only(self._size, count)
            )
        return self._schedules[key]

    def _channel(self, peer: int, tag: int) -> Channel | None:
        if not 0 <= peer < self._size:
            return None
        pp = self._topology.pp
        group, rank = pp.group, pp.ranks[peer]
        if group is None:
            raise RuntimeError("a pipeline needs a pp axis of at least two ranks")
        if self._host_group is None:
            return InlineChannel(rank, group, tag)
        host = InlineChannel(rank, self._host_group, tag)
        return DeviceChannel(rank, group, host, self._topology.device)

    def _expect(self, count: int, channels: Sequence[Channel | None]) -> None:
        for channel in channels:
            if channel is not None:
                channel.expect(count)
                channel.prepost()

    def _start(self, count: int, channels: Sequence[Channel | None]) -> None:
        for channel in channels:
            if channel is not None:
                channel.expect(count)

    def _flush(self) -> None:
        for channel in (self._to_next, self._to_previous):
            if channel is not None:
                channel.flush()


def _present(channel: Channel | None) -> Channel:
    if channel is None:
        raise RuntimeError("a pipeline stage has no neighbour on this side")
    return channel


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
