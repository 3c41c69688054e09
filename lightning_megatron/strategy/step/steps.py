"""Training steps: what lives for one batch, and what lives as long as the module's layout.

Lightning's closure calls ``training_step``, then ``zero_grad``, then ``backward``. The strategy
makes a `Step` in the first and asks the same one in the last::

    step = steps.begin(portion)
    output = step.run(args)          # ``training_step`` of the user
    ...
    step.backward(loss)              # afterwards ``.grad`` is complete

There are two kinds. A batch that is one microbatch on one pipeline stage is a `WholeStep`: forward
in ``run``, backward in ``backward``, as Lightning does. Every other is an `InterleavedStep`: the
schedule mixes forwards and backwards of the microbatches, all of them in ``run``, and their
gradients are held aside (`step.gradients`) until ``backward``, so that ``zero_grad`` clears what it
is meant to clear and every hook fires in the ordinary order.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_megatron.adoption.generation import generate_together
from lightning_megatron.comm.objects import ObjectBroadcast
from lightning_megatron.comm.peers import Peers
from lightning_megatron.data.reading.shares import Portion
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.pipeline.microbatch import Microbatches, batch_size_of
from lightning_megatron.pipeline.runner import Executor, LossOf, NoPipeline, Pipeline
from lightning_megatron.pipeline.runner import Step as UserStep
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.strategy.microbatch_logging import LogRecorder, LogReplay
from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.strategy.router_bias import RouterBias
from lightning_megatron.strategy.step.cut import BatchCut
from lightning_megatron.strategy.step.evaluation import Evaluation
from lightning_megatron.strategy.step.forward import Forward
from lightning_megatron.strategy.step.gradients import BatchGradients
from lightning_megatron.strategy.step.loss import LossShare, SampleCoupling, loss_and_tokens
from lightning_megatron.strategy.step.outputs import BatchOutputs, has_more
from lightning_megatron.tuning.fit_memory import FittingMicrobatch, NoReduction
from lightning_megatron.zero.fully_sharded import FullySharded


class Steps:
    """Steps of one module on its layout.

    Args:
        module: the user's.
        parallel: the module on its layout.
        precision: scales losses, and says in what context a forward runs.
        options: how batches are cut, and the pipeline.
        clock: told of every change between forward and backward.
        host_group: gloo group along pp, where the device's own backend is another.
        fitting: finds the size of microbatches, in place of ``options``.

    Attributes:
        module: see above.
        parallel: see above.
        precision: see above.
        fitting: see above.
        forward: calls the user's steps.
        cut: cuts batches into microbatches.
        executor: runs microbatches.
        last_rank: rank on pp of the last stage.
        dtype: of losses and logged values.
        replay: brings what was logged to all stages.
        share_output: brings the output of the last stage to all stages.
        outputs: makes one output of those of microbatches.
        coupling: warns of losses that couple samples of several microbatches.
        evaluation: runs the steps that do not train.
        router_bias: updates the biases of routers after optimizer steps.
        accumulating: whether the batch is one of several before an optimizer step, and not the
            last of them.
        loss_per_token: whether steps return sums over tokens; None until one has. It decides when
            gradients are reduced, so a resumed run must know it from the start.
        step: of the present training batch, or of the latest.
    """

    def __init__(
        self,
        module: LightningModule,
        parallel: ParallelModule,
        precision: ShardedPrecision,
        *,
        options: LayoutOptions,
        clock: SectionClock,
        host_group: dist.ProcessGroup | None = None,
        fitting: FittingMicrobatch | None = None,
    ) -> None:
        self.module = module
        self.parallel = parallel
        self.precision = precision
        self.fitting = fitting
        topology, rule = parallel.topology, options.microbatches()
        pp, device = topology.pp, topology.device
        stage_ranks = parallel.transforms.stage_ranks or range(pp.size)
        self.last_rank = stage_ranks[-1]
        wide = any(p.dtype == torch.float64 for p in module.parameters())
        if pp.size > 1:  # a stage may have no weights
            wide = any(Peers.over(pp).all_gather(wide))
        self.dtype = torch.float64 if wide else torch.float32
        self.router_bias = RouterBias(parallel)
        self.forward = Forward(module, parallel, precision)
        self.cut = BatchCut(module, parallel, rule, fitting)
        self.executor: Executor
        if pp.size > 1:
            assert parallel.trunk is not None
            self.executor = Pipeline(
                topology,
                parallel.trunk,
                options.make_schedule,
                stage_ranks,
                host_group,
                options.pp.scatter_gather,
                sections=clock,
            )
        else:
            seeds = topology.auxiliary_seeds
            self.executor = NoPipeline(self.forward.lengths, seeds, sections=clock)
        self.share_output = ObjectBroadcast(pp, pp.ranks[self.last_rank], device, host_group)
        self.replay = LogReplay(module, pp, self.last_rank, device, self.dtype, host_group)
        self.outputs = BatchOutputs(self.forward, self.executor)
        self.evaluation = Evaluation(
            self.forward, self.executor, self.cut, self.replay, self.share_output, self.outputs
        )
        speaks = topology.loss.rank == topology.tp.rank == 0  # on each stage, which has its own
        self.coupling = SampleCoupling(module, speaks=speaks)
        self.accumulating = False
        self.loss_per_token: bool | None = None
        self._kind: type[Step] = WholeStep if pp.size == 1 and rule.single else InterleavedStep
        self.step: Step = self._kind(self, None)
        by_step = pp.size == 1 and isinstance(parallel.data, FullySharded)
        generate_together(module, topology, self.forward.gathered if by_step else None)

    def begin(self, portion: Portion | None) -> "Step":
        """Begin a training batch.

        Args:
            portion: part of this rank in the samples of the global batch; None where all ranks'
                batches count alike.
        """
        self.step = self._kind(self, portion)
        return self.step

    @property
    def first_of_accumulation(self) -> bool:
        """Whether the batch is the first before an optimizer step."""
        trainer = self.module.trainer
        return bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0)

    def before_zero_grad(self) -> None:
        """Let go of gradients in rows that ``zero_grad``, which comes next, would make whole.

        Lightning calls it behind the step of the first batch of an accumulation. Users' hooks
        between, which might look, override one after which gradients are whole from the start.
        """
        if self.module.automatic_optimization and self.first_of_accumulation:
            self.parallel.gradients.forget_rows()

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Within the block a batch runs after which no optimizer step follows."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    @property
    def evaluates_together(self) -> bool:
        """Whether the forward of a rank needs those of ranks that read different samples."""
        sharded = isinstance(self.parallel.data, FullySharded)
        several = self.parallel.topology.batch.size > 1
        return (sharded and several) or self.cut.experts_meet

    @property
    def interleaves(self) -> bool:
        """Whether a batch may run in several backwards."""
        return self._kind is InterleavedStep

    @cached_property
    def keeps_gradients(self) -> bool:
        """Whether the module says itself which gradients are cleared."""
        return is_overridden("optimizer_zero_grad", self.module)

    def gathers_samples(self) -> None:
        """Somebody gathers samples of several ranks: perhaps the step, those of a microbatch.

        Raises:
            ConfigError: it is the step, and ranks have different numbers of samples, or may have
                to give it up under ``microbatch_size="auto"``.
        """
        if not self.step.inside:
            return
        if self.fitting is not None:
            raise ConfigError(
                "microbatch_size='auto': training_step calls self.all_gather, in which a rank "
                "would wait for one that is out of memory; nearest valid: microbatch_size=<a "
                "number>"
            )
        if self.step.share.portion is not None:
            raise ConfigError(
                "batch_shares, self.all_gather in training_step: ranks have different numbers of "
                "samples, and what is gathered would count each rank alike; nearest valid: no "
                "batch_shares, or a loss that needs the samples of its own rank only"
            )
        if self.step.count > 1:
            self.coupling.warn("calls self.all_gather in its step", self.step.count)


class Step(ABC):
    """A training batch, from ``training_step`` to the end of its backward.

    Args:
        steps: those of the layout.
        portion: part of this rank in the samples of the global batch; None where all ranks'
            batches count alike.

    Attributes:
        share: this rank's in the loss of the global batch.
        count: number of microbatches.
        inside: whether the user's step is being run.
    """

    def __init__(self, steps: Steps, portion: Portion | None) -> None:
        self._steps = steps
        self.share = LossShare(steps.parallel.topology, portion)
        self.count = 1
        self.inside = False

    @abstractmethod
    def run(self, args: Sequence[Any]) -> Any:
        """Run ``training_step``; where microbatches are interleaved, the backwards as well.

        Args:
            args: of ``training_step``, the batch first.

        Returns:
            What ``training_step`` returned. From microbatches it is merged, with the loss detached,
            and the same on every rank of the pipeline.
        """

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Bring the gradients of the batch to those that are there.

        Args:
            loss: of the batch.
            args: further ones of the precision plugin's ``backward``.
            kwargs: likewise.
        """
        self._add_gradients(loss, *args, **kwargs)
        if not self._steps.accumulating:
            self._steps.parallel.gradients.finish()

    @property
    def reduces_all(self) -> bool:
        """Whether the latest `backward` has reduced all that was in ``.grad``."""
        return False

    @abstractmethod
    def _add_gradients(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, or, where `run` already did, bring its gradients to light."""

    @property
    def _divisor(self) -> int:
        """Batches per optimizer step; the loss of each counts so much less."""
        return self._steps.module.trainer.accumulate_grad_batches

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Context of the user's step."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


class WholeStep(Step):
    """A batch that is one microbatch on one stage: Lightning's ordinary path.

    Under manual optimization `backward` is called in `run`, perhaps several times.
    """

    _of_token: Tensor | None = None
    """Factor of the loss of a token, where the step returned a sum over tokens."""

    @property
    @override
    def reduces_all(self) -> bool:
        return not self._steps.accumulating

    @override
    def run(self, args: Sequence[Any]) -> Any:
        steps, share = self._steps, self.share
        with self._within(), steps.forward.on_batch("training_step", counts=share.counts):
            output = steps.parallel.step("training_step", *args)
        output, self._of_token = share.per_token(output)
        per_token = self._of_token is not None
        return share.with_global_value(output, args[0], per_token=per_token)

    @override
    def _add_gradients(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        steps, precision = self._steps, self._steps.precision
        parallel, topology = steps.parallel, steps.parallel.topology
        parallel.gradients.begin()
        parallel.data.begin(blocked=steps.accumulating)
        parallel.data.before_backward()
        steps.forward.lengths.backward(0)
        by_sample = self._of_token is None and self.share.portion is not None
        scaled = precision.scale_loss(loss * self.share.weight if by_sample else loss)
        with topology.auxiliary_seeds.backward(*self._auxiliary_weight()):
            precision.backward(scaled, steps.module, *args, **kwargs)
        parallel.data.finish()

    def _auxiliary_weight(self) -> tuple[float | Tensor, bool]:
        """Factor of auxiliary losses, and whether it is one per token."""
        factor = self._steps.precision.loss_factor / self._divisor
        if self._of_token is None:
            return factor * self.share.weight, False
        return self._of_token * factor, True


@dataclass(frozen=True)
class _InMicrobatches:
    """A batch on its way through the executor."""

    microbatches: Microbatches
    recorder: LogRecorder
    call: UserStep
    loss_of: LossOf
    rows: int | None
    """Number of samples, as the batch's tensors have it."""


class InterleavedStep(Step):
    """A batch on a pipeline, or in several microbatches: `run` runs the backwards, too."""

    def __init__(self, steps: Steps, portion: Portion | None) -> None:
        super().__init__(steps, portion)
        self._gradients = BatchGradients(steps.parallel.gradients)

    @override
    def run(self, args: Sequence[Any]) -> Any:
        steps, fitting, data = self._steps, self._steps.fitting, self._steps.parallel.data
        if fitting is not None and fitting.begin(args, self, steps.cut.own):
            batch, outputs = fitting.run(args, self)
            data.before_backward(last=True)  # which has been, without its reduction
        else:  # here and not in a method: what stands above a step is in every traceback of it
            with self._in_microbatches(args) as batch:
                count = len(batch.microbatches)
                outputs = steps.executor.train(batch.call, batch.loss_of, count, data)
        data.finish()
        return self._finish(batch, args, outputs[: batch.microbatches.counted])

    def attempt(self, args: Sequence[Any]) -> tuple[_InMicrobatches, list[Any]]:
        """Forward and backward of a batch on trial, without communication."""
        with self._in_microbatches(args, alone=True) as batch:
            count, executor = len(batch.microbatches), self._steps.executor
            return batch, executor.train(batch.call, batch.loss_of, count, NoReduction())

    def discard(self) -> None:
        """Drop the gradients of an attempt."""
        self._gradients.discard()

    @override
    def _add_gradients(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._gradients.show()

    @contextmanager
    def _in_microbatches(
        self, args: Sequence[Any], *, alone: bool = False
    ) -> Iterator[_InMicrobatches]:
        """Context in which a batch runs, and what the executor needs for it.

        Args:
            args: of ``training_step``, the batch first.
            alone: whether ranks do not communicate.
        """
        steps, share = self._steps, self.share
        microbatches = steps.cut.alone(args[0]) if alone else steps.cut.train(args[0])
        self.count = len(microbatches)
        if microbatches.counted > 1:
            steps.coupling.check(microbatches.counted)
        self._begin_backwards(microbatches)
        forward = steps.forward.on_microbatches(
            "training_step", args, microbatches, counts=share.counts
        )
        steps.outputs.begin("training_step")
        with self._within(), forward as (call, recorder):
            loss_of, rows = self._loss_of(microbatches), batch_size_of(args[0])
            yield _InMicrobatches(microbatches, recorder, call, loss_of, rows)

    def _begin_backwards(self, microbatches: Microbatches) -> None:
        """Set aside the gradients of earlier batches, and say how much microbatches weigh."""
        steps, share, data = self._steps, self.share, self._steps.parallel.data
        first, by_sample = steps.first_of_accumulation, steps.loss_per_token is False
        deferred = data.accumulates_in_grad and by_sample and not first
        self._gradients.begin(cleared=first and not steps.keeps_gradients, deferred=deferred)
        data.begin(blocked=steps.accumulating and by_sample)
        weights = [weight * share.weight for weight in microbatches.weights]
        counted = microbatches.counted if share.counts else 0
        factor = steps.precision.loss_factor / self._divisor
        steps.parallel.topology.auxiliary_seeds.begin(weights, counted, factor)

    def _loss_of(self, microbatches: Microbatches) -> LossOf:
        """Function that gives what to differentiate of the output of a microbatch's step."""
        steps, share, divisor = self._steps, self.share, self._divisor
        scaled, seeds = steps.precision.scale_loss, steps.parallel.topology.auxiliary_seeds

        def loss_of(output: Any, index: int) -> Tensor | None:
            loss, tokens = loss_and_tokens(output)
            per_token = steps.loss_per_token = tokens is not None
            seeds.note(index, per_token=per_token)
            return scaled(loss * (share.factor(index, microbatches, per_token=per_token) / divisor))

        return loss_of

    def _finish(self, batch: _InMicrobatches, args: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Share what the steps returned, and keep their gradients.

        Args:
            batch: that has run.
            args: of ``training_step``.
            outputs: of the last stage; elsewhere there are none.
        """
        steps, parallel = self._steps, self._steps.parallel
        sums = self.share.sums(outputs, batch.microbatches)
        total, count = steps.replay.share("training_step", batch.recorder, sums)
        loss, tokens = self.share.of_global_batch(total, count, batch.rows, steps.dtype)
        steps.loss_per_token = tokens is not None
        if tokens is not None:
            parallel.gradients.scale(parallel.topology.loss.size / tokens)
        self._gradients.keep()
        return self._output(args, outputs, batch.microbatches, loss)

    def _output(
        self, args: Sequence[Any], outputs: Sequence[Any], microbatches: Microbatches, loss: Tensor
    ) -> Any:
        """Output of the batch, on every stage."""
        steps, more = self._steps, None
        if outputs and steps.outputs.are_used("training_step"):
            more = self._beside_loss(args, outputs, microbatches)
        if isinstance(steps.executor, Pipeline) and steps.outputs.are_used("training_step"):
            # Only what goes beside the loss travels: the loss is there.
            more = steps.share_output(steps.forward.as_whole(more))
        if isinstance(more, ConfigError):
            raise more
        return loss if more is None else {**more, "loss": loss}

    def _beside_loss(
        self, args: Sequence[Any], outputs: Sequence[Any], microbatches: Microbatches
    ) -> Any:
        """What a hook gets beside the loss, or the error that all stages are to raise."""
        if not has_more("training_step", outputs[0]):
            _, tokens = loss_and_tokens(outputs[0])
            return None if tokens is None else {"num_tokens": sum(x["num_tokens"] for x in outputs)}
        try:
            return self._steps.outputs.of_batch("training_step", args, outputs, microbatches)
        except ConfigError as error:
            return error
