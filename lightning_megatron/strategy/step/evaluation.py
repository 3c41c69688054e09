"""Validation, test and prediction: the forward of a batch, with one output on every rank.

Under a pipeline a batch runs in microbatches, as in training. A step that generates text calls the
trunk once a token instead, so the whole batch goes along all stages together, each call by itself.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.comm.objects import ObjectBroadcast
from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.microbatch import Microbatches
from lightning_megatron.pipeline.runner import Executor, Pipeline
from lightning_megatron.strategy.code_inspection import functions_from, methods_of, names_in
from lightning_megatron.strategy.microbatch_logging import LogReplay
from lightning_megatron.strategy.step.cut import BatchCut
from lightning_megatron.strategy.step.forward import Forward
from lightning_megatron.strategy.step.outputs import BatchOutputs

_NOTHING, _OBJECT = 0.0, 1.0
"""Kinds of output, which the last stage tells the others beside what was logged."""


class Evaluation:
    """Runs the steps of a module that do not train it.

    Args:
        forward: calls the steps.
        executor: runs microbatches.
        cut: cuts batches.
        replay: brings what was logged to all stages.
        share_output: brings the output of the last stage to all stages.
        outputs: makes one output of those of microbatches.
    """

    def __init__(
        self,
        forward: Forward,
        executor: Executor,
        cut: BatchCut,
        replay: LogReplay,
        share_output: ObjectBroadcast,
        outputs: BatchOutputs,
    ) -> None:
        self._forward = forward
        self._executor = executor
        self._cut = cut
        self._replay = replay
        self._share_output = share_output
        self._outputs = outputs
        self._generating: dict[str, bool] = {}

    def run(self, name: str, args: Sequence[Any]) -> Any:
        """Forward of a batch; the output of the step, whole and on every rank.

        Args:
            name: of the user's step.
            args: of the step, the batch first.
        """
        forward, executor = self._forward, self._executor
        if not isinstance(executor, Pipeline):
            with forward.on_batch(name):
                output = forward.parallel.step(name, *args)
            return forward.as_whole(output)
        generates = self._generates(name)
        whole = Microbatches((args[0],), (1.0,))
        microbatches = whole if generates else self._cut.evaluate(args[0])
        self._outputs.begin(name)
        with forward.on_microbatches(name, args, microbatches) as (step, recorder):
            if generates:  # by all stages together: each call of the trunk goes along them
                last = executor.is_last
                outputs = [out] if (out := step(0, last)) is not None and last else []
            else:
                outputs = executor.evaluate(step, len(microbatches), microbatches.repeated)
        output = self._output(name, args, outputs, microbatches) if outputs else None
        kind: float | Tensor = _NOTHING if output is None else _OBJECT
        if name != "predict_step":
            [kind] = self._replay.share(name, recorder, [kind])
        elif recorder.calls:
            raise RuntimeError("self.log cannot be called in predict_step")
        else:
            kind = _OBJECT
        if kind != _OBJECT:
            return None
        output = self._share_output(output)
        if isinstance(output, ConfigError):
            raise output
        return output

    def _output(
        self, name: str, args: Sequence[Any], outputs: Sequence[Any], microbatches: Microbatches
    ) -> Any:
        """Output of a batch on the last stage, or the error that all stages are to raise."""
        if not self._outputs.are_used(name):
            return None
        try:
            found = self._outputs.of_batch(name, args, outputs, microbatches)
        except ConfigError as error:
            return error
        return self._forward.as_whole(found)

    def _generates(self, name: str) -> bool:
        """Whether the code of a step generates text, and so calls the network by itself."""
        if name not in self._generating:
            functions = functions_from(methods_of(self._forward.module), name)
            self._generating[name] = any("generate" in names_in(f) for f in functions)
        return self._generating[name]
