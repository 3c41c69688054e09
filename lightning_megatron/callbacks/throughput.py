"""Tokens per second of the whole job, as a user's clock sees it.

The rate is `tokens of the global batches / wall time` over the last `window` batches. Wall time is
all time between the ends of two batches: waiting for data, communication and the optimizer step
included, since that is what a training run pays for. Validation and checkpoints during fit are
left out where Lightning brackets them with hooks (validation), else they count.

The global batch is this rank's batch times the number of data-parallel ranks: tensor and pipeline
peers work on the same batch and must not be counted again. That number is what the strategy tells
the distributed sampler (`distributed_sampler_kwargs["num_replicas"]`), so the callback is right
under any strategy, Lightning's own included. Nothing is communicated and no device is synchronised:
on an asynchronous device the queue keeps a constant depth, over which the window averages.
"""

import time
from collections import deque
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch import tree_flatten
from lightning_megatron.errors import ConfigError


def count_tokens(batch: Any) -> int:
    """Return the number of tokens in a batch.

    The tokens are the elements of the batch's first integer tensor; a batch without one counts the
    samples of its first tensor.
    """
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim]
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.numel()
    return tensors[0].shape[0] if tensors else 0


class TokenThroughput(pl.Callback):
    """Logs `perf/tokens_per_s` of the job to the progress bar and the loggers.

    The first batch is not measured, as it pays for everything that happens once.

    Args:
        window: number of batches to average over.

    Raises:
        ConfigError: the window is smaller than one batch.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ConfigError(f"window={window}: must be at least 1; nearest valid: 1")
        self._marks: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self._clock = time.perf_counter
        self._left_out = 0.0
        self._paused_at = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The current rate; None until two batches are done."""
        if len(self._marks) < 2:
            return None
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(end - start, 1e-9)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._marks.clear()
        self._left_out = 0.0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        done = self._marks[-1][1] if self._marks else 0
        tokens = count_tokens(batch) * _data_parallel_size(trainer)
        self._marks.append((self._clock() - self._left_out, done + tokens))
        rate = self.tokens_per_s
        if rate is not None:
            pl_module.log("perf/tokens_per_s", rate, prog_bar=True, batch_size=1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused_at = self._clock()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left_out += self._clock() - self._paused_at


def _data_parallel_size(trainer: pl.Trainer) -> int:
    """Return how many ranks work on different batches."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", trainer.world_size))
