"""One Lightning step: microbatches, pipeline, loss, gradients, logs.

Lightning's closure calls ``training_step``, then ``zero_grad``, then ``backward``. When the step
runs on microbatches, forward and backward are interleaved inside ``training_step``; their gradients
are therefore kept aside until ``backward`` is called, so that ``zero_grad`` clears what it is meant
to clear and every hook fires in the ordinary order. A batch that is one microbatch on one pipeline
stage takes Lightning's ordinary path: `StepRunner.interleaved` says which it is.

A step that returns ``{"loss": sum, "num_tokens": n}`` gives the *sum* of its token losses: the loss
is then the global sum over the global number of tokens, which is the mean that a single process
would compute however unevenly the tokens are spread over microbatches and ranks. A loss that is a
mean over samples is weighed with the samples of the rank where `StepRunner.portion` says how many
of the global batch these are.

The file is long because a step has one order of events, which is to be read in one place: ordinary,
interleaved, accumulated, weighed, and on trial for memory.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_megatron.comm.objects import ObjectBroadcast
from lightning_megatron.data.shares import Portion
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.decisions import company
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.layers.splits import whole
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.fully_sharded import FullySharded
from lightning_megatron.parallel.gradients import HeldGradient
from lightning_megatron.pipeline.microbatch import (
    Microbatches,
    MicrobatchRule,
    SplitBatch,
    batch_size_of,
    merge,
    split,
    weighted_mean,
)
from lightning_megatron.pipeline.runner import Executor, NoPipeline, Pipeline, Reduction
from lightning_megatron.pipeline.scatter_gather import ScatterGatherChoice
from lightning_megatron.pipeline.sequence_lengths import SequenceLengths
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.schedules.schedule import Schedule
from lightning_megatron.strategy.code_inspection import functions_from, methods_of, names_in
from lightning_megatron.strategy.collectives import refuse_shards
from lightning_megatron.strategy.fitting_microbatch import (
    FittingMicrobatch,
    NoReduction,
    elements_of,
    forget_memory,
    is_out_of_memory,
    suggested_size,
)
from lightning_megatron.strategy.generation import generate_together
from lightning_megatron.strategy.left_behind import LeftBehind
from lightning_megatron.strategy.microbatch_logging import LogRecorder, LogReplay
from lightning_megatron.strategy.router_bias import RouterBias
from lightning_megatron.strategy.stage_state import unchanged
from lightning_megatron.topology.coordinates import experts_meet_samples
from lightning_megatron.topology.mesh import Topology

_NOTHING, _OBJECT = 0.0, 1.0
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
"""Names of the precision plugin's contexts."""
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Batch:
    """A training batch on its way through forward and backward."""

    microbatches: Microbatches
    recorder: LogRecorder
    older: list[HeldGradient]
    """Gradients of earlier batches of the accumulation, which are set aside meanwhile."""
    divisor: int
    """Batches per optimizer step; the loss of each counts so much less."""
    rows: int | None
    """Number of samples, as the batch's tensors have it."""


class StepRunner:
    """Runs the steps of one module on its layout, and keeps their gradients until ``backward``.

    Args:
        module: the user's.
        parallel: the module on its layout.
        precision: scales losses, and says in what context a forward runs.
        rule: how batches are cut.
        schedule: from a number of microbatches, the pipeline schedule for training.
        host_group: gloo group along pp, where the device's own backend is another.
        scatter_gather: whether pipeline stages send parts of activations; see `PipelineConfig`.
        fitting: finds the size of microbatches, in place of ``rule``.

    Attributes:
        last_rank: rank on pp of the last stage.
        router_bias: updates the biases of routers after optimizer steps.
        interleaved: whether forward and backward of a batch take place within the step.
        count: microbatches of the latest training batch.
        accumulating: whether the batch is one of several before an optimizer step, and not the
            last of them.
        loss_per_token: whether steps return sums over tokens; None until one has. It decides when
            gradients are reduced, so a resumed run must know it from the start.
        portion: part of this rank in the samples of the global batch; None where all ranks' batches
            count alike. Set before each batch.
    """

    def __init__(
        self,
        module: LightningModule,
        parallel: ParallelModule,
        precision: ShardedPrecision,
        rule: MicrobatchRule,
        schedule: Callable[[int], Schedule],
        host_group: dist.ProcessGroup | None = None,
        scatter_gather: ScatterGatherChoice = "auto",
        fitting: FittingMicrobatch | None = None,
    ) -> None:
        self._module = module
        self._fitting = fitting
        self._parallel = parallel
        self._precision = precision
        self._rule = rule
        self._topology = topology = parallel.topology
        self._seeds = topology.step_seeds
        self._lengths = SequenceLengths(topology)
        self._auxiliary = topology.auxiliary_seeds
        self.router_bias = RouterBias(parallel)
        self._experts_meet = experts_meet_samples(topology.degrees)
        self._balances_meet = _balances_over_samples(module, topology)
        self.executor: Executor = NoPipeline(self._lengths, self._auxiliary)
        last_rank = topology.pp.size - 1
        self._left_behind: LeftBehind | None = None
        if topology.pp.size > 1:
            assert parallel.trunk is not None
            stage_ranks = parallel.transforms.stage_ranks or range(topology.pp.size)
            self.executor = Pipeline(
                topology, parallel.trunk, schedule, stage_ranks, host_group, scatter_gather
            )
            last_rank = stage_ranks[-1]
        self.last_rank = last_rank
        if topology.pp.size * topology.cp.size > 1:
            trunks = [part for part in module.modules() if isinstance(part, PipelineSequential)]
            self._left_behind = LeftBehind(module, trunks, topology.pp.rank, topology.cp.size)
        self._share_output = ObjectBroadcast(
            topology.pp, topology.pp.ranks[last_rank], topology.device, host_group
        )
        self.interleaved = topology.pp.size > 1 or not rule.single
        wide = any(p.dtype == torch.float64 for p in module.parameters())
        self._dtype = torch.float64 if wide else torch.float32
        self._replay = LogReplay(
            module, topology.pp, last_rank, topology.device, self._dtype, host_group
        )
        self.count = 1
        self.accumulating = False
        self.loss_per_token: bool | None = None
        self.portion: Portion | None = None
        self._kept: list[HeldGradient] = []
        self._of_token: Tensor | None = None
        speaks = topology.loss.rank == topology.tp.rank == 0  # on each stage, which has its own
        self._coupling = SampleCoupling(module, speaks=speaks)
        self._in_step = False
        self._gathers = False
        self._generating: dict[str, bool] = {}
        by_step = topology.pp.size == 1 and isinstance(parallel.data, FullySharded)
        generate_together(module, topology, self.gathered if by_step else None)

    @cached_property
    def _outputs_are_used(self) -> bool:
        """Whether hooks of the user's are given what steps return."""
        callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        return any("on_train_batch_end" in methods_of(one) for one in (self._module, *callbacks))

    def gathers_samples(self) -> None:
        """Somebody gathers samples of several ranks: perhaps the step, those of a microbatch.

        Raises:
            ConfigError: it is the step, and ranks have different numbers of samples, or may have
                to give it up under ``microbatch_size="auto"``.
        """
        if self._in_step and self._fitting is not None:
            raise ConfigError(
                "microbatch_size='auto': training_step calls self.all_gather, in which a rank "
                "would wait for one that is out of memory; nearest valid: microbatch_size=<a "
                "number>"
            )
        if self._in_step and self.portion is not None:
            raise ConfigError(
                "batch_shares, self.all_gather in training_step: ranks have different numbers of "
                "samples, and what is gathered would count each rank alike; nearest valid: no "
                "batch_shares, or a loss that needs the samples of its own rank only"
            )
        if self._in_step and self.count > 1:
            self._coupling.warn("calls self.all_gather in its step", self.count)

    @property
    def first_of_accumulation(self) -> bool:
        """Whether the batch is the first before an optimizer step."""
        trainer = self._module.trainer
        return bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Within the block a batch runs after which no optimizer step follows."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    # Training ------------------------------------------------------------------------------------

    def train(self, args: Sequence[Any]) -> Any:
        """Forward of a training batch; where it is `interleaved`, backward as well.

        Args:
            args: of ``training_step``, the batch first.

        Returns:
            What ``training_step`` returned. From microbatches it is merged, with the loss detached,
            and the same on every rank of the pipeline.
        """
        if not self.interleaved:
            self._of_token = None
            self._in_step = True
            try:
                output = self._step_on_batch("training_step", args)
            finally:
                self._in_step = False
            output, self._of_token = mean_over_tokens(output, self._topology, self._counts)
            if self.portion is None:
                return output
            return self._with_global_loss(output, args[0], self.portion)
        data, on_trial = self._parallel.data, False
        if self._fitting is not None:
            on_trial = self._begin_fitting(args)
        if on_trial:
            batch, outputs = self._try(args)
            data.before_backward(last=True)  # which has been, without its reduction
        else:  # here and not in a method: what stands above a step is in every traceback of it
            with self._on_microbatches(args, data) as (batch, arguments):
                outputs = self.executor.train(*arguments)
        data.finish()
        return self._finish(batch, outputs[: batch.microbatches.counted])

    @contextmanager
    def _on_microbatches(
        self, args: Sequence[Any], reduction: Reduction
    ) -> Iterator[tuple[_Batch, tuple[Any, ...]]]:
        """Context in which a batch runs, and what the executor needs for it."""
        batch = self._begin(args[0], on_trial=isinstance(reduction, NoReduction))
        step = self._step("training_step", args, batch.microbatches, batch.recorder)
        self._in_step = True
        try:
            with batch.recorder.recording(), self._seeds.batch():
                yield batch, (step, self._loss_of(batch), len(batch.microbatches), reduction)
        finally:
            self._in_step = False

    def _try_once(self, args: Sequence[Any]) -> tuple[_Batch, list[Any]]:
        """Forward and backward of a batch, without communication, and what its steps returned."""
        with self._on_microbatches(args, NoReduction()) as (batch, arguments):
            return batch, self.executor.train(*arguments)

    def _begin_fitting(self, args: Sequence[Any]) -> bool:
        """Whether the batch is on trial, which finds out how large microbatches may be."""
        assert self._fitting is not None
        content = args[0]
        samples = batch_size_of(content)
        if samples is None:
            MicrobatchRule(size=1).count(None)  # says what to do
        return self._fitting.begin(
            samples or 1, elements_of(content), lambda: self._suggested(args, samples or 1)
        )

    def _try(self, args: Sequence[Any]) -> tuple[_Batch, list[Any]]:
        """Run a batch, in smaller and smaller microbatches until all ranks have memory for it."""
        fitting = self._fitting
        assert fitting is not None
        put_back = fitting.note()
        while True:
            ran: tuple[_Batch, list[Any]] | None = None
            try:
                ran = self._try_once(args)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            if not fitting.failed_anywhere(ran is None):
                assert ran is not None
                fitting.passed()
                return ran
            ran = None
            self._parallel.gradients.take_out()  # for the memory; `_begin` would drop them too
            put_back()
            forget_memory(self._topology.device)
            fitting.halve()

    def _suggested(self, args: Sequence[Any], samples: int) -> int:
        """Size of microbatches with which a GPU begins."""
        fitting = self._fitting
        assert fitting is not None
        put_back = fitting.note()

        def run(count: int) -> None:
            [first, *_] = split(args[0], MicrobatchRule(size=count), self._own_split).batches
            fitting.size = count
            try:
                self._try_once((first, *args[1:]))
            finally:
                self._parallel.gradients.take_out()
                put_back()

        assert fitting.memory is not None
        return suggested_size(run, samples, fitting.memory)

    def _begin(self, content: Any, *, on_trial: bool) -> _Batch:
        """Cut a batch, and set aside the gradients of earlier ones."""
        at_least = 1 if on_trial else self._common_count(content)
        microbatches = self._split(content, at_least=at_least)
        self.count = len(microbatches)
        if microbatches.counted > 1:
            self._coupling.check(microbatches.counted)
        data, gradients = self._parallel.data, self._parallel.gradients
        first, by_sample = self.first_of_accumulation, self.loss_per_token is False
        # Gradients of deferred batches stay in place, to be reduced with this batch's.
        together = data.accumulates_in_grad and by_sample and not first
        older = [] if together else gradients.take_out()
        gradients.begin()
        data.begin(blocked=self.accumulating and by_sample)
        divisor = self._module.trainer.accumulate_grad_batches
        factor = self._precision.loss_factor / divisor
        weights = [weight * self._weight for weight in microbatches.weights]
        counted = microbatches.counted if self._counts else 0
        self._auxiliary.begin(weights, counted, factor)
        recorder, older = LogRecorder(self._module), [] if first else older
        return _Batch(microbatches, recorder, older, divisor, batch_size_of(content))

    def _loss_of(self, batch: _Batch) -> Callable[[Any, int], Tensor | None]:
        """Function that gives what to differentiate of the output of a microbatch's step."""
        microbatches, scaled = batch.microbatches, self._precision.scale_loss

        def loss_of(output: Any, index: int) -> Tensor | None:
            loss, tokens = loss_and_tokens(output)
            self.loss_per_token = tokens is not None
            self._auxiliary.note(index, per_token=self.loss_per_token)
            counts = float(index < microbatches.counted and self._counts)
            by_sample = microbatches.weights[index] * self._weight
            weight = counts if self.loss_per_token else by_sample
            return scaled(loss * (weight / batch.divisor))

        return loss_of

    def _finish(self, batch: _Batch, outputs: Sequence[Any]) -> Any:
        """Share what the steps returned, and keep their gradients.

        Args:
            batch: that has run.
            outputs: of the last stage; elsewhere there are none.
        """
        gradients = self._parallel.gradients
        loss, tokens = self._share_loss(batch.recorder, outputs, batch.microbatches)
        self.loss_per_token = tokens is not None
        if tokens is None and self.portion is not None:
            check_rows(batch.rows, self.portion)
            loss = self._global_mean(loss, self._weight)
        if tokens is not None:
            gradients.scale(self._topology.loss.size / tokens)
        self._kept = gradients.take_out()
        gradients.add(batch.older)
        return self._training_output(outputs, batch.microbatches, loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, or, where the step already did, bring its gradients to light.

        Args:
            loss: of the batch.
            args: further ones of the precision plugin's ``backward``.
            kwargs: likewise.
        """
        gradients, data = self._parallel.gradients, self._parallel.data
        if self.interleaved:
            gradients.add(self._kept)
            self._kept = []
        else:
            gradients.begin(fresh=self.first_of_accumulation)
            data.begin(blocked=self.accumulating)
            data.before_backward()
            self._lengths.backward(0)
            by_sample = self._of_token is None and self.portion is not None
            scaled = self._precision.scale_loss(loss * self._weight if by_sample else loss)
            with self._auxiliary.backward(*self._auxiliary_weight()):
                self._precision.backward(scaled, self._module, *args, **kwargs)
            data.finish()
        if not self.accumulating:
            gradients.finish()

    def _auxiliary_weight(self) -> tuple[float | Tensor, bool]:
        """Factor of auxiliary losses of a batch that is whole, and whether it is one per token."""
        factor = self._precision.loss_factor / self._module.trainer.accumulate_grad_batches
        if self._of_token is None:
            return factor * self._weight, False
        return self._of_token * factor, True

    @property
    def _weight(self) -> float:
        """Factor of the loss of this rank's batch, where it is a mean over samples."""
        return 1.0 if self.portion is None else self.portion.weight

    @property
    def _counts(self) -> bool:
        """Whether this rank has samples of its own, and not only a repeated one."""
        return self.portion is None or self.portion.counts

    def _global_mean(self, loss: Tensor, weight: float) -> Tensor:
        """Mean over ranks of their losses times their weights; collective."""
        wide = loss.detach().to(torch.float64) * weight
        total = sum_over_samples(wide, self._topology) / self._topology.loss.size
        return total.to(loss.dtype)

    def _with_global_loss(self, output: Any, batch: Any, portion: Portion) -> Any:
        """Output whose loss has the value of the global batch's; its gradient is this rank's."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        weight = 1.0  # of tokens it has its weight
        if self._of_token is None:
            check_rows(batch_size_of(batch), portion)
            weight = portion.weight
        if not isinstance(loss, Tensor):  # without automatic optimization
            return output
        loss = _Valued.apply(loss, self._global_mean(loss, weight))  # type: ignore[no-untyped-call]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    # Evaluation ----------------------------------------------------------------------------------

    @property
    def evaluates_together(self) -> bool:
        """Whether the forward of a rank needs those of ranks that read different samples."""
        sharded = isinstance(self._parallel.data, FullySharded)
        return (sharded and self._topology.batch.size > 1) or self._experts_meet

    def evaluate(self, name: str, args: Sequence[Any]) -> Any:
        """Forward of a whole batch; the merged output of the step, on every rank."""
        if not isinstance(self.executor, Pipeline):
            return self._whole(self._step_on_batch(name, args))
        generates = self._generates(name)
        microbatches = (
            Microbatches((args[0],), (1.0,))
            if generates
            else self._split(args[0], at_least=self._common_count(args[0], training=False))
        )
        recorder = LogRecorder(self._module)
        step = self._step(name, args, microbatches, recorder)
        with recorder.recording(), self._seeds.batch():
            if generates:  # by all stages together: each call of the trunk goes along them
                last = self.executor.is_last
                outputs = [out] if (out := step(0, last)) is not None and last else []
            else:
                outputs = self.executor.evaluate(step, len(microbatches), microbatches.repeated)
        merged = merge(outputs, microbatches.weights[: microbatches.counted]) if outputs else None
        output = self._whole(merged)
        kind: float | Tensor = _NOTHING if output is None else _OBJECT
        if name != "predict_step":
            [kind] = self._replay.share(name, recorder, [kind])
        elif recorder.calls:
            raise RuntimeError("self.log cannot be called in predict_step")
        else:
            kind = _OBJECT
        return self._share_output(output) if kind == _OBJECT else None

    def _generates(self, name: str) -> bool:
        """Whether the code of a step generates text, and so calls the network by itself."""
        if name not in self._generating:
            functions = functions_from(methods_of(self._module), name)
            self._generating[name] = any("generate" in names_in(f) for f in functions)
        return self._generating[name]

    # Steps ---------------------------------------------------------------------------------------

    def _context(self, name: str) -> Context:
        """Context of the forward in a step (autocast)."""
        context: Context = getattr(self._precision, _CONTEXTS[name])
        return context

    def _watch(self, name: str) -> AbstractContextManager[None]:
        """Context of a step in which blocks must not leave losses behind."""
        if self._left_behind is None or name != "training_step":
            return nullcontext()
        return self._left_behind.watched()

    def _step_on_batch(self, name: str, args: Sequence[Any]) -> Any:
        """Run a step of the user's once, on the whole batch, in a process that has all stages."""
        kept: AbstractContextManager[None] = nullcontext()
        if name == "training_step" and not self._counts:
            kept = _without_trace(self._module, self._topology.device)
        with (
            self._seeds.batch(),
            self._context(name)(),
            kept,
            self._watch(name),
            self._gathering(),
        ):
            self._seeds.microbatch(0)
            self._lengths.forward(0)
            return self._parallel.step(name, *args)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Context of a call of the module whose parameters ZeRO 3 gathers."""
        before, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = before

    def gathered(self, call: Callable[[], Any]) -> Any:
        """Call what needs the parameters that are gathered for a step, wherever it is called."""
        if self._gathers:
            return call()
        with self._gathering():
            return self._parallel.step(call)

    def _whole(self, output: Any) -> Any:
        """Output as whole tensors, as it may be pickled, or used by one rank alone."""
        topology = self._topology
        return whole(output) if topology.tp.size * topology.cp.size > 1 else output

    def _split(self, batch: Any, at_least: int = 1) -> Microbatches:
        return split(batch, self._present_rule, self._own_split, at_least=at_least)

    @property
    def _own_split(self) -> SplitBatch | None:
        return getattr(self._module, "split_batch", None)

    @property
    def _present_rule(self) -> MicrobatchRule:
        return self._rule if self._fitting is None else self._fitting.rule

    def _common_count(self, batch: Any, *, training: bool = True) -> int:
        """The number of microbatches that every rank needs, where they have to be equal.

        ZeRO 2 and 3 communicate in every microbatch, and so do mixtures whose experts are spread
        over ranks with other samples, or in training balanced over them; ranks may have batches of
        different sizes (at the end of the data, or always, by a batch sampler that fills batches
        with tokens).
        """
        together = self._parallel.data.communicates_every_microbatch or self._experts_meet
        if not (together or (training and self._balances_meet)):
            return 1
        rule = self._present_rule
        if rule.size is None:
            return rule.count(None)
        count, group = rule.count(batch_size_of(batch)), self._topology.batch.group
        if group is None:
            return count
        highest = torch.tensor(count, device=self._topology.device)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        return int(highest)

    def _step(
        self, name: str, args: Sequence[Any], microbatches: Microbatches, recorder: LogRecorder
    ) -> Callable[[int, bool], Any]:
        # Under a pipeline the step may end by an exception, which ZeRO's hooks around the whole
        # step would not survive; there they surround the stage's items instead.
        pipelined = isinstance(self.executor, Pipeline)
        device, context = self._topology.device, self._context(name)

        def run(index: int, to_end: bool) -> Any:
            counts = index < microbatches.counted
            traced = counts and (self._counts or name != "training_step")
            # What a step logs before its trunk, the last stage logs too.
            recorder.begin_microbatch(microbatches.weights[index] if to_end and counts else None)
            self._seeds.microbatch(index)
            kept = nullcontext() if traced else _without_trace(self._module, device)
            with context(), kept, self._watch(name):
                if pipelined:
                    return getattr(self._module, name)(microbatches.batches[index], *args[1:])
                return self._parallel.step(name, microbatches.batches[index], *args[1:])

        return run

    def _share_loss(
        self, recorder: LogRecorder, outputs: Sequence[Any], microbatches: Microbatches
    ) -> tuple[Tensor, Tensor | None]:
        """Loss of the batch and, if the step counts tokens, their global number; on all stages.

        Without a pipeline no number leaves the device.
        """
        total: float | Tensor = 0.0
        tokens: float | Tensor = -1.0
        if outputs:
            found = [loss_and_tokens(output) for output in outputs]
            losses = [loss.to(torch.float64) for loss, _ in found]
            counts = [count.to(torch.float64) for _, count in found if count is not None]
            if counts:
                counted = float(self._counts)
                total = torch.stack(losses).sum() * counted
                tokens = torch.stack(counts).sum() * counted
            else:
                total = weighted_mean(losses, microbatches.weights[: len(losses)])
        total, tokens = self._replay.share("training_step", recorder, [total, tokens])
        device = self._topology.device
        loss, count = (
            torch.as_tensor(x, dtype=torch.float64, device=device) for x in (total, tokens)
        )
        if not isinstance(tokens, Tensor) and tokens < 0:
            return loss.to(self._dtype), None
        total_loss, total_tokens = sum_over_samples(torch.stack([loss, count]), self._topology)
        return (total_loss / total_tokens).to(self._dtype), total_tokens

    def _training_output(
        self, outputs: Sequence[Any], microbatches: Microbatches, loss: Tensor
    ) -> Any:
        merged = merge(outputs, microbatches.weights[: len(outputs)]) if outputs else None
        if isinstance(self.executor, Pipeline) and self._outputs_are_used:
            # Only what goes beside the loss travels: the loss is there.
            merged = self._share_output(self._whole(merged) if _has_more(merged) else None)
        return {**merged, "loss": loss} if isinstance(merged, Mapping) else loss


class SampleCoupling:
    """Warns, once, of losses that couple samples of a batch which is cut into microbatches.

    A contrastive loss has as many negatives, and a batch norm computes its statistics from as many
    samples, as are in a microbatch. No loss tells; what is looked for is ``self.all_gather``, batch
    norms in training mode, and what a module says of itself by an attribute ``couples_samples``.

    Args:
        module: the user's.
        speaks: whether this rank is one that warns.
    """

    def __init__(self, module: LightningModule, *, speaks: bool) -> None:
        self._module = module
        self._speaks = speaks
        self._told: bool | None = getattr(module, "couples_samples", None)
        self._checked = False
        self._done = self._told is False

    def check(self, count: int) -> None:
        """Look for what couples samples, before the first batch of ``count`` microbatches."""
        if self._checked or self._done:
            return
        self._checked = True
        if self._told:
            self.warn("has couples_samples = True", count)
        norms = [
            name
            for name, child in self._module.named_modules()
            if isinstance(child, _BATCH_NORMS) and child.training
        ]
        if norms:
            several = f" and {len(norms) - 1} more" if norms[1:] else ""
            self.warn(f"has batch norms in training mode ({norms[0]}{several})", count)

    def warn(self, what: str, count: int) -> None:
        """Say it, unless something of the kind has been said."""
        if self._done:
            return
        self._done = True
        if not self._speaks:
            return
        warnings.warn(
            f"{type(self._module).__name__} {what}, and its training_step runs on each of {count} "
            f"microbatches of a batch: every sample meets those of its microbatch only, so that "
            f"the weights are not those of a whole batch; num_microbatches=1 keeps batches whole, "
            f"and couples_samples = False in the module says that this is as it should be",
            stacklevel=2,
        )


def _has_more(output: Any) -> bool:
    """Whether a step has returned more than its loss."""
    return isinstance(output, Mapping) and bool(output.keys() - {"loss", "num_tokens"})


def _balances_over_samples(module: nn.Module, topology: Topology) -> bool:
    """Whether ranks that read different samples balance experts together; collective over pp."""
    if topology.batch.size == 1:
        return False
    balanced = any(
        isinstance(child, Router) and child.config.balance == "batch" for child in module.modules()
    )
    if topology.pp.size > 1:  # a stage without routers has as many microbatches as the others
        balanced = any(topology.pp.all_gather_object(balanced))
    return balanced


@contextmanager
def _without_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context of a microbatch that runs for the sake of its collectives only."""
    with company(), unchanged(module, device):
        yield


def loss_and_tokens(output: Any) -> tuple[Tensor, Tensor | None]:
    """The loss in a step's output, and the number of tokens it is the sum over, if given.

    Raises:
        RuntimeError: there is no loss.
        ConfigError: it was computed from shards.
    """
    if isinstance(output, Tensor):
        refuse_shards(output, "the loss")
        return output, None
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        tokens = output.get("num_tokens")
        refuse_shards(output["loss"], "the loss")
        if tokens is None:
            return output["loss"], None
        return output["loss"], torch.as_tensor(tokens, device=output["loss"].device)
    raise RuntimeError(
        f"training_step returned {type(output).__name__}; with several processes or microbatches "
        "it must return the loss as a tensor, or a dict with the key 'loss', for every batch"
    )


def mean_over_tokens(
    output: Any, topology: Topology, counts: bool = True
) -> tuple[Any, Tensor | None]:
    """Make of ``{"loss": sum, "num_tokens": n}`` a loss whose mean over ranks is per token.

    Args:
        output: of a step.
        topology: who computes the loss of other tokens.
        counts: whether the tokens of this rank count.

    Returns:
        The output, and by what its loss was multiplied; None for a loss that is a mean already.
    """
    if not isinstance(output, Mapping) or output.get("num_tokens") is None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            refuse_shards(loss, "the loss")
        return output, None
    loss, tokens = loss_and_tokens(output)
    assert tokens is not None
    wide = tokens.detach().to(torch.float64) * float(counts)
    factor = float(counts) * topology.loss.size / sum_over_samples(wide, topology)
    return {**output, "loss": loss * factor.to(loss.dtype)}, factor


def check_rows(rows: int | None, portion: Portion) -> None:
    """Raise `ConfigError` if a batch has another number of samples than were read for it."""
    if rows not in (None, portion.rows):
        raise ConfigError(
            f"batch_shares: this rank has read {portion.rows} samples, and the first dimension of "
            f"its batch is {rows}, so that a mean over samples cannot be weighed; nearest valid: "
            "batches whose first dimension is the sample, or a step that returns {'loss': sum, "
            "'num_tokens': n}"
        )


class _Valued(torch.autograd.Function):
    """A tensor with another value. Forward: that value. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def sum_over_samples(values: Tensor, topology: Topology) -> Tensor:
    """The sum of ``values`` over the ranks that computed the loss of other samples."""
    if topology.loss.group is None:
        return values
    total = values.clone()
    dist.all_reduce(total, group=topology.loss.group)
    return total


def transforms_batches(module: LightningModule) -> bool:
    """Whether hooks of the module or of its data change a batch before it is trained on."""
    sources = (module, getattr(module.trainer, "datamodule", None))
    return any(
        source is not None and is_overridden(hook, source)
        for source in sources
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
    )
