"""Progress of Lightning's fit loop, which a checkpoint holds and a resumed run goes on from.

Lightning counts a batch once its hooks have run. A checkpoint counts it once its gradients have
been used, so the progress that is saved is taken back to the last optimizer step.
"""

from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron._lightning.loops import (
    batch_progress,
    begin_next_epoch,
    count_batches_anew,
    epoch_counts,
    take_batches_back,
    take_epoch_back,
    validates_first,
)


def is_over(progress: dict[str, Any], trainer: Trainer) -> bool:
    """Whether every batch of the epoch is done."""
    batches = batch_progress(progress)
    now = batches["current"]
    done: int = now["processed"]
    whole = done >= trainer.num_training_batches or batches["is_last_batch"]
    return bool(done and done == now["ready"] and whole)


def rewind(progress: dict[str, Any], trainer: Trainer) -> tuple[int, int]:
    """Take the progress of the fit loop back to the last optimizer step.

    Returns:
        The epoch, and the number of its first batch that no step has used.
    """
    epochs, batches = epoch_counts(progress), batch_progress(progress)
    now, every = batches["current"], trainer.accumulate_grad_batches
    done = now["processed"]
    if is_over(progress, trainer):
        return max(epochs["started"], epochs["processed"]), 0
    if done:
        take_epoch_back(progress)
    used = done - done % every
    if used < done or now["ready"] > done:
        take_batches_back(progress, used)
    return epochs["processed"], used


def begin_epoch(trainer: Trainer) -> None:
    """Finish what Lightning leaves open when a run goes on with the first batch of an epoch."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    ended = loop.batch_progress.is_last_batch and not validates_first(trainer)
    epochs: Any = fit.epoch_progress.total
    if ended and trainer.max_steps != -1 and epochs.processed == epochs.started:
        # With max_steps it takes the epoch that is over for one to go on with.
        begin_next_epoch(trainer)
    elif trainer.num_training_batches == float("inf") and ended:
        # It would go on counting from the epoch before, as it knows no last batch.
        count_batches_anew(trainer)
