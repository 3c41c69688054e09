"""What steps return beside their loss, as one process returns it for the whole batch.

``on_train_batch_end(outputs)`` and its like get what a step has returned. On microbatches a step
returns several times, and of a number nothing tells whether it is a sum, a mean, or the length of
the batch. So where a hook gets more than the loss, it gets:

* a tensor or list with an item for each sample: those of the microbatches, one behind the other.
  That it is such a one is known from two batches of unlike size;
* anything else: what the step returns for the whole batch. It runs once more, without gradients;
  nothing else of that counts. Under a pipeline the last stage does it with what the trunk has
  returned for the microbatches, which it keeps until then; without one the network runs again.

Cost: nothing where no hook takes outputs, or steps return their loss alone; nothing after the first
batch where all outputs have an item for each sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_megatron._torch.graphs import tree_flatten, tree_unflatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.joined import OF_NUMBER, UnknownNumber
from lightning_megatron.pipeline.microbatch import Microbatches, batch_size_of, is_plain_list
from lightning_megatron.pipeline.runner import Executor
from lightning_megatron.strategy.attribute_changes import Look, changes
from lightning_megatron.strategy.attributes import (
    attributes_of,
    dotted,
    modules_beside_trunk,
    value_of,
)
from lightning_megatron.strategy.code_inspection import is_of_library, methods_of
from lightning_megatron.strategy.step.forward import Forward

_TAKERS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
}
"""Hooks that get what steps return; predictions are returned to whoever asks for them."""
_REMEDY = (
    "nearest valid: return tensors with an item for each sample (reduction='none'), "
    "self.log(...), or num_microbatches=1"
)


class BatchOutputs:
    """Outputs of batches that run in microbatches.

    Args:
        forward: calls the steps.
        executor: runs microbatches.
    """

    def __init__(self, forward: Forward, executor: Executor) -> None:
        self._forward = forward
        self._executor = executor
        self._used: dict[str, bool] = {}
        self._known: dict[str, tuple[Any, list[bool]]] = {}

    def are_used(self, name: str) -> bool:
        """Whether hooks of the user's are given what a step returns."""
        if name not in self._used:
            module: Any = self._forward.module
            observers = (module, *module.trainer.callbacks)
            taker = _TAKERS.get(name)
            self._used[name] = taker is None or any(_takes(one, taker) for one in observers)
        return self._used[name]

    def begin(self, name: str) -> None:
        """Have the executor keep what it needs to run a step of this batch once more."""
        keeps = partial(self._is_open, name) if self.are_used(name) else None
        self._executor.keep_for_repeat(keeps)

    def of_batch(
        self, name: str, args: Sequence[Any], outputs: Sequence[Any], microbatches: Microbatches
    ) -> Any:
        """Output of the whole batch.

        Args:
            name: of the step.
            args: of the step, the batch first.
            outputs: of the microbatches that count.
            microbatches: pieces of the batch.

        Raises:
            ConfigError: the step cannot run on the whole batch.
        """
        if len(microbatches) == 1 or not self.are_used(name) or not has_more(name, outputs[0]):
            return outputs[0]
        # Before parts of sequences are joined as if they were wholes.
        outputs = [self._forward.as_whole(output) for output in outputs]
        flat = [tree_flatten(output, is_leaf=is_plain_list) for output in outputs]
        specs = [spec for _, spec in flat]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=False))
        if not self._is_open(name, outputs[0]) and all(spec == specs[0] for spec in specs):
            return tree_unflatten([_joined(column) for column in columns], specs[0])
        whole = self._forward.as_whole(self._again(name, args, microbatches))
        if name == "training_step":
            whole = {**whole, "loss": outputs[0]["loss"]}  # in whose place comes that of the batch
        leaves, spec = tree_flatten(whole, is_leaf=is_plain_list)
        if any(isinstance(leaf, UnknownNumber) for leaf in leaves):
            raise ConfigError(f"{name}, more than its loss for a hook: {OF_NUMBER}; {_REMEDY}")
        if any(spec != other for other in specs):
            return whole
        sizes = [batch_size_of(piece) for piece in microbatches.batches[: microbatches.counted]]
        follows = [_follows(*pair, sizes) for pair in zip(columns, leaves, strict=True)]
        if microbatches.counted > 1:
            self._known[name] = spec, follows
        pairs = zip(columns, leaves, follows, strict=True)
        return tree_unflatten([_joined(c) if of_each else x for c, x, of_each in pairs], spec)

    def _is_open(self, name: str, output: Any) -> bool:
        """Whether the output of a microbatch does not tell that of the batch."""
        if not has_more(name, output):
            return False
        spec, follows = self._known.get(name, (None, [False]))
        return not all(follows) or tree_flatten(output, is_leaf=is_plain_list)[1] != spec

    def _again(self, name: str, args: Sequence[Any], microbatches: Microbatches) -> Any:
        first = name not in self._known
        opaque = dict(self._opaque()) if first else {}
        run = partial(self._forward.once_more, name, args)
        try:
            found = self._executor.repeat(run)
        except Exception as error:  # whatever a step raises
            raise ConfigError(
                f"{name} returns more than its loss to a hook; to know that of the whole batch, it "
                f"ran once more on its {len(microbatches)} microbatches together, which ended in "
                f"{type(error).__name__}: {error}; {_REMEDY}"
            ) from error
        for key, (look, content) in opaque.items():
            if list(changes(look.mark, Look().at(content).mark, content)):
                raise ConfigError(
                    f"self.{key}: {name} changes it, and returns more than its loss to a hook, for "
                    "which it runs once more on the whole batch; this change cannot be undone; "
                    "nearest valid: numbers, tensors and lists of these there, or "
                    "num_microbatches=1"
                )
        return found

    def _opaque(self) -> Iterator[tuple[str, tuple[Look, Any]]]:
        """Attributes that cannot be brought back to what they were."""
        device = self._forward.parallel.topology.device
        for path, module in modules_beside_trunk(self._forward.module):
            for name, content in attributes_of(module):
                if value_of(content, device) is None:
                    yield dotted(path, name), (Look().at(content), content)


def _takes(observer: Any, hook: str) -> bool:
    """Whether a module or callback of the user's has a hook of its own."""
    base = Callback if isinstance(observer, Callback) else LightningModule
    own = getattr(type(observer), hook) is not getattr(base, hook)
    return hook in methods_of(observer) or (own and not is_of_library(type(observer)))


def has_more(name: str, output: Any) -> bool:
    """Whether a step has returned more than its loss."""
    if name != "training_step":
        return output is not None
    return isinstance(output, Mapping) and bool(output.keys() - {"loss", "num_tokens"})


def _follows(column: Sequence[Any], whole: Any, sizes: Sequence[int | None]) -> bool:
    """Whether a leaf has an item for each sample, of each microbatch and of the whole batch."""
    total = sum(size or 0 for size in sizes)
    pairs = [*zip(column, sizes, strict=True), (whole, total)]
    if isinstance(whole, Tensor):
        rest = whole.shape[1:]
        return whole.ndim > 0 and all(
            isinstance(leaf, Tensor) and leaf.shape == (size, *rest) for leaf, size in pairs
        )
    return all(isinstance(leaf, list) and len(leaf) == size for leaf, size in pairs)


def _joined(column: Sequence[Any]) -> Any:
    if isinstance(column[0], list):
        return [item for leaf in column for item in leaf]
    return torch.cat(list(column))
