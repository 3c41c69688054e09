"""Losses of microbatches and ranks as parts of the loss of the global batch.

A step that returns ``{"loss": sum, "num_tokens": n}`` gives the *sum* of its token losses. The loss
is then the global sum over the global number of tokens, which is the mean that a single process
would compute however unevenly the tokens are spread over microbatches and ranks. Any other loss is
taken for a mean over samples: a microbatch counts with its share of the samples of the batch, and
all ranks alike. Under ``batch_shares`` ranks have different numbers of samples; `LossShare` weighs
each rank's loss by them.

*Losses that couple samples*, where batches are cut into microbatches. A contrastive loss has as
many negatives, and a batch norm computes its statistics from as many samples, as are in a
microbatch. No loss tells; what is looked for is ``self.all_gather``, batch norms in training mode,
and what a module says of itself by an attribute ``couples_samples``.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron._torch.devices import scalar_on
from lightning_megatron.data.reading.shares import Portion
from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.microbatch import Microbatches, batch_size_of, weighted_mean
from lightning_megatron.strategy.collectives import refuse_shards
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.memory import weights_in_parts

_OF_SAMPLES = -1.0
"""Stands for a number of tokens where losses are means over samples."""


class LossShare:
    """Share of this rank's batch in the loss of the global batch.

    Args:
        topology: which ranks compute the loss of other samples.
        portion: part of this rank in the samples of the global batch; None where all ranks'
            batches count alike.

    Attributes:
        portion: see above.
        weight: factor of a loss that is a mean over samples of this rank.
        counts: whether this rank has samples of its own, and not only a repeated one.
    """

    def __init__(self, topology: Topology, portion: Portion | None) -> None:
        self._topology = topology
        self.portion = portion
        self.weight = 1.0 if portion is None else portion.weight
        self.counts = portion is None or portion.counts

    # Of a batch that is whole ---------------------------------------------------------------------

    def per_token(self, output: Any) -> tuple[Any, Tensor | None]:
        """Make of ``{"loss": sum, "num_tokens": n}`` a loss whose mean over ranks is per token.

        Returns:
            The step's output, and by what its loss was multiplied; None for a loss that is a mean
            already.
        """
        if not isinstance(output, Mapping) or output.get("num_tokens") is None:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                refuse_shards(loss, "the loss")
            return output, None
        loss, tokens = loss_and_tokens(output)
        assert tokens is not None
        wide = tokens.detach().to(torch.float64) * float(self.counts)
        total = sum_over_samples(wide, self._topology)
        factor = float(self.counts) * self._topology.loss.size / total
        return {**output, "loss": loss * factor.to(loss.dtype)}, factor

    def with_global_value(self, output: Any, batch: Any, *, per_token: bool) -> Any:
        """Output whose loss has the value of the global batch's; its gradient is this rank's.

        Args:
            output: of the step.
            batch: on which it ran.
            per_token: whether `per_token` has weighed the loss.
        """
        if self.portion is None:
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not per_token:
            self._check_rows(batch_size_of(batch))
        if not isinstance(loss, Tensor):  # without automatic optimization
            return output
        value = self._mean(loss, 1.0 if per_token else self.weight)
        loss = _Valued.apply(loss, value)  # type: ignore[no-untyped-call]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    # Of a batch in microbatches -------------------------------------------------------------------

    def factor(self, index: int, microbatches: Microbatches, *, per_token: bool) -> float:
        """Factor of the loss of a microbatch in that of the batch."""
        if per_token:
            return float(index < microbatches.counted and self.counts)
        return microbatches.weights[index] * self.weight

    def sums(
        self, outputs: Sequence[Any], microbatches: Microbatches
    ) -> tuple[float | Tensor, float | Tensor]:
        """Loss and number of tokens of this rank's batch, as `of_global_batch` takes them."""
        if not outputs:
            return 0.0, _OF_SAMPLES
        found = [loss_and_tokens(output) for output in outputs]
        losses = [loss.to(torch.float64) for loss, _ in found]
        counts = [count.to(torch.float64) for _, count in found if count is not None]
        if not counts:
            return weighted_mean(losses, microbatches.weights[: len(losses)]), _OF_SAMPLES
        counted = float(self.counts)
        return torch.stack(losses).sum() * counted, torch.stack(counts).sum() * counted

    def of_global_batch(
        self, loss: float | Tensor, tokens: float | Tensor, rows: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Loss of the global batch and, if steps count tokens, their number; collective.

        Without a pipeline no number leaves the device.

        Args:
            loss: of this rank's batch.
            tokens: likewise; negative for a loss that is a mean over samples.
            rows: number of samples, as the batch's tensors have it.
            dtype: of the result.
        """
        device = self._topology.device
        total, count = (scalar_on(device, x, torch.float64) for x in (loss, tokens))
        if not isinstance(tokens, Tensor) and tokens < 0:
            mean = total.to(dtype)
            if self.portion is not None:
                self._check_rows(rows)
                mean = self._mean(mean, self.weight)
            return mean, None
        total_loss, total_tokens = sum_over_samples(torch.stack([total, count]), self._topology)
        return (total_loss / total_tokens).to(dtype), total_tokens

    def _mean(self, loss: Tensor, weight: float) -> Tensor:
        """Mean over ranks of their losses times their weights; collective."""
        wide = loss.detach().to(torch.float64) * weight
        total = sum_over_samples(wide, self._topology) / self._topology.loss.size
        return total.to(loss.dtype)

    def _check_rows(self, rows: int | None) -> None:
        """Raise `ConfigError` if a batch has another number of samples than were read for it."""
        assert self.portion is not None
        if rows not in (None, self.portion.rows):
            raise ConfigError(
                f"batch_shares: this rank has read {self.portion.rows} samples, and the first "
                f"dimension of its batch is {rows}, so that a mean over samples cannot be weighed; "
                "nearest valid: batches whose first dimension is the sample, or a step that "
                "returns {'loss': sum, 'num_tokens': n}"
            )


class _Valued(torch.autograd.Function):
    """A tensor with another value. Forward: that value. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


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


def sum_over_samples(values: Tensor, topology: Topology) -> Tensor:
    """The sum of ``values`` over the ranks that computed the loss of other samples."""
    if topology.loss.group is None:
        return values
    total = values.clone()
    dist.all_reduce(total, group=topology.loss.group)
    return total


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SampleCoupling:
    """Warns, once, of losses that couple samples of a batch which is cut into microbatches.

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
        with weights_in_parts():  # without those of other stages, which say so themselves
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
