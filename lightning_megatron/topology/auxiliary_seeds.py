"""Factors with which auxiliary losses of layers enter the gradient, read when backward runs.

A layer adds an auxiliary loss to the gradient without a line in ``training_step``: its backward
starts the gradient of the loss with a *seed*, which is the factor that the main loss of the same
microbatch has. Only the runner of the step knows it, and tells it here, microbatch by microbatch::

    main loss                          factor of an auxiliary loss ``l_b`` of a sequence
    mean over samples                  w / b                 w: weight of the microbatch
    sum over n tokens, divided by n    w * tokens_b / n      b: sequences of the microbatch

Each is multiplied by the loss scale and by 1 / accumulated batches, as the main loss is. So the
gradient is that of the mean of ``l_b`` over the sequences of the global batch (per token: weighed
with their tokens), whatever the layout, the schedule or the number of microbatches.

Where a stage's output goes to another rank of the pipeline, that rank alone learns what the step
returned. The answer (mean, or sum over tokens) comes back with the gradient of the output
(`AuxiliarySeeds.load`), as a part of the message's description, which is sent only where it
changes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class AuxiliarySeeds:
    """Seeds of the auxiliary losses of one run.

    Outside of a backward that the run knows, and in a process alone, auxiliary losses count as
    their mean over sequences.

    Attributes:
        uneven: whether ranks that read different samples read different numbers of them.
    """

    def __init__(self) -> None:
        self._weight: float | Tensor = 1.0
        self._per_token = False
        self._weights: Sequence[float] = ()
        self._counted = 0
        self._factor = 1.0
        self._sums: set[int] = set()
        self.uneven = False

    @property
    def counted(self) -> int:
        """Number of microbatches of the latest batch that was cut; 0 where batches stay whole."""
        return self._counted

    def begin(self, weights: Sequence[float], counted: int, factor: float) -> None:
        """Begin a batch of several microbatches.

        Args:
            weights: share of the samples in each microbatch.
            counted: number of microbatches that count; those after them fill up.
            factor: loss scale / accumulated batches.
        """
        self._weights, self._counted, self._factor = weights, counted, factor
        self._sums.clear()

    def note(self, microbatch: int, *, per_token: bool) -> None:
        """Note whether the loss of a microbatch is a sum over tokens."""
        (self._sums.add if per_token else self._sums.discard)(microbatch)

    def load(self, microbatch: int, gradients: list[Tensor | None]) -> Any:
        """Return a message to the stage before: gradients of its output, and what its loss is."""
        return microbatch in self._sums, gradients

    def unload(self, microbatch: int, message: Any) -> Any:
        """Note what a message says of the loss; return the gradients."""
        per_token, gradients = message
        self.note(microbatch, per_token=per_token)
        return gradients

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Within the block the backward of a microbatch of the batch runs."""
        if not self._weights:  # no batch has begun: a runner by itself
            yield
            return
        per_token = index in self._sums
        weight = float(index < self._counted) if per_token else self._weights[index]
        with self.backward(weight * self._factor, per_token=per_token):
            yield

    @contextmanager
    def backward(self, weight: float | Tensor, per_token: bool) -> Iterator[None]:
        """Within the block a backward runs.

        Args:
            weight: factor of a loss that is a mean over sequences; of the loss of each token, if
                the main loss is a sum over tokens.
            per_token: whether it is.
        """
        before = self._weight, self._per_token
        self._weight, self._per_token = weight, per_token
        try:
            yield
        finally:
            self._weight, self._per_token = before

    def factors(self, tokens_b: Tensor, parts: int) -> Tensor:
        """Return the factor of the loss of each sequence of the microbatch whose backward runs.

        Args:
            tokens_b: number of tokens of each sequence that count, ``[b]``, of whole sequences.
            parts: number of cp parts into which the layer's sequences are split; each has a part
                of the gradient, and they are averaged.

        Returns:
            ``[b]``, in the format of ``tokens_b``.
        """
        if self._per_token:
            return tokens_b * (self._weight * parts)
        even = tokens_b.new_full(tokens_b.shape, parts / max(len(tokens_b), 1))
        return even * self._weight
