"""How a step of the user's is called, in training and evaluation: on a batch, or on a microbatch.

Around each call stand its number format (autocast), the random numbers that belong to the batch and
the microbatch (`topology.rng`), the lengths of split sequences, and in training the watch for
losses that blocks leave behind (`strategy.left_behind`). They are contexts and no functions, as
every function between Lightning and the user's step is in each traceback of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.decisions import company
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.pipeline.microbatch import Microbatches
from lightning_megatron.pipeline.runner import Step
from lightning_megatron.pipeline.sequence_lengths import SequenceLengths
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.strategy.attributes import unchanged
from lightning_megatron.strategy.left_behind import LeftBehind
from lightning_megatron.strategy.microbatch_logging import LogRecorder
from lightning_megatron.whole.splits import whole

_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
"""Names of the precision plugin's contexts."""


class Forward:
    """Calls the steps of a module on its layout.

    Args:
        module: the user's.
        parallel: the module on its layout.
        precision: says in what context a forward runs.

    Attributes:
        module: see above.
        parallel: see above.
        lengths: of the sequences of microbatches, where no pipeline notes them.
    """

    def __init__(
        self, module: LightningModule, parallel: ParallelModule, precision: ShardedPrecision
    ) -> None:
        self.module = module
        self.parallel = parallel
        self._precision = precision
        self._topology = topology = parallel.topology
        self._seeds = topology.step_seeds
        self.lengths = SequenceLengths(topology)
        self._left_behind: LeftBehind | None = None
        if topology.pp.size * topology.cp.size > 1:
            trunks = [part for part in module.modules() if isinstance(part, PipelineSequential)]
            self._left_behind = LeftBehind(module, trunks, topology.pp.rank, topology.cp.size)
        self._gathers = False

    @contextmanager
    def on_batch(self, name: str, *, counts: bool = True) -> Iterator[None]:
        """Context of ``parallel.step(name, *args)`` with a whole batch, in one call on one stage.

        Args:
            name: of the user's step.
            counts: whether the samples count; else what they change is undone.
        """
        with (
            self._seeds.batch(),
            self._context(name),
            self._trace(kept=counts),
            self._watch(name),
            self._gathering(),
        ):
            self._seeds.microbatch(0)
            self.lengths.forward(0)
            yield

    @contextmanager
    def on_microbatches(
        self, name: str, args: Sequence[Any], microbatches: Microbatches, *, counts: bool = True
    ) -> Iterator[tuple[Step, LogRecorder]]:
        """Context of a batch in microbatches: what an executor calls, and what the calls log.

        Args:
            name: of the user's step.
            args: of the step; microbatches stand in for the first of them.
            microbatches: pieces of the batch.
            counts: whether the samples count; else what they change is undone.
        """
        # Under a pipeline the step may end by an exception, which ZeRO's hooks around the whole
        # step would not survive; there they surround the stage's items instead.
        pipelined = self._topology.pp.size > 1
        recorder = LogRecorder(self.module)

        def on_microbatch(index: int, to_end: bool) -> Any:
            fills = index >= microbatches.counted
            # What a step logs before its trunk, the last stage logs too.
            logs = to_end and not fills
            recorder.begin_microbatch(microbatches.weights[index] if logs else None)
            self._seeds.microbatch(index)
            kept = counts and not fills
            with (
                self._context(name),
                self._trace(kept=kept),
                self._watch(name),
                self._without_gradients(name),
            ):
                if pipelined:
                    return getattr(self.module, name)(microbatches.batches[index], *args[1:])
                return self.parallel.step(name, microbatches.batches[index], *args[1:])

        with recorder.recording(), self._seeds.batch():
            yield on_microbatch, recorder

    @contextmanager
    def _without_gradients(self, name: str) -> Iterator[None]:
        """Refuse gradients that a step makes itself, among those of the batch's microbatches.

        One process clears them behind the step, before the backward of its loss.
        """
        gradients = self.parallel.gradients if name == "training_step" else None
        before = None if gradients is None else gradients.stamps()
        yield
        if gradients is not None and gradients.stamps() != before:
            raise ConfigError(
                f"{type(self.module).__name__}.training_step makes or clears gradients itself "
                "(loss.backward(), zero_grad()), while those of earlier microbatches are there; "
                "nearest valid: torch.autograd.grad(loss, x) for the gradient of an input, or "
                "num_microbatches=1"
            )

    def once_more(self, name: str, args: Sequence[Any]) -> Any:
        """Call a step on the whole batch, which has run in microbatches; only its output counts."""
        recorder = LogRecorder(self.module)
        recorder.begin_microbatch(None)
        with (
            recorder.recording(),
            self._seeds.again(),
            self._context(name),
            self._trace(kept=False),
            torch.no_grad(),
        ):
            if self._topology.pp.size > 1:
                return getattr(self.module, name)(*args)
            return self.parallel.step(name, *args)

    def gathered(self, call: Callable[[], Any]) -> Any:
        """Call what needs the parameters that are gathered for a step, wherever it is called."""
        if self._gathers:
            return call()
        with self._gathering():
            return self.parallel.step(call)

    def as_whole(self, output: Any) -> Any:
        """Output as whole tensors, as it may be pickled, or used by one rank alone."""
        topology = self._topology
        return whole(output) if topology.tp.size * topology.cp.size > 1 else output

    def _context(self, name: str) -> AbstractContextManager[Any]:
        """Context of the forward in a step (autocast)."""
        context: AbstractContextManager[Any] = getattr(self._precision, _CONTEXTS[name])()
        return context

    def _trace(self, *, kept: bool) -> AbstractContextManager[None]:
        """Context of a call; unless what it changes is kept, it runs for its collectives only."""
        return nullcontext() if kept else _without_trace(self.module, self._topology.device)

    def _watch(self, name: str) -> AbstractContextManager[None]:
        """Context of a step in which blocks must not leave losses behind."""
        if self._left_behind is None or name != "training_step":
            return nullcontext()
        return self._left_behind.watched()

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Context of a call of the module whose parameters ZeRO 3 gathers."""
        before, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = before


@contextmanager
def _without_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context of a call that runs for the sake of its collectives only."""
    with company(), unchanged(module, device):
        yield
