"""The loops of a Trainer: the end of a batch and of an epoch, progress, and what a restart does.

``trainer.fit_loop`` and its ``epoch_loop`` are public names of private classes, `_FitLoop` and
`_TrainingEpochLoop`. A hook exists for the end of a batch only before validation and logging, and
none at all at which a run may end as if it had not been interrupted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

_TRAINING = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
_COUNTS = ("ready", "started", "processed", "completed")


# The end of a batch, and of an epoch


def replace_end_of_batch(trainer: Trainer, ours: Callable[[Any], None]) -> None:
    """Have this Trainer call ``ours(fetcher)`` where Lightning would end a batch.

    Replaced: ``on_advance_end`` of this Trainer's `_TrainingEpochLoop`, which validates, logs and
    raises `SIGTERMException`. Needed because all ranks end a run at the same batch, after or before
    its validation. Unnecessary with a hook after a batch's validation.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop.on_advance_end = ours


def end_batch(trainer: Trainer, fetcher: Any) -> None:
    """Do what Lightning does at the end of a batch, whatever has replaced it."""
    loop = trainer.fit_loop.epoch_loop
    type(loop).on_advance_end(loop, fetcher)


def replace_end_of_epoch(trainer: Trainer, ours: Callable[[], None]) -> None:
    """Have this Trainer call ``ours()`` where Lightning would end an epoch.

    Replaced: ``on_advance_end`` of this Trainer's `_FitLoop`, which calls the hooks of the epoch's
    end. Needed for the same reason as `replace_end_of_batch`; and because Lightning iterates the
    training loader anew after an epoch of which only the validation was left to a resumed run.
    """
    loop: Any = trainer.fit_loop
    loop.on_advance_end = ours


def end_epoch(trainer: Trainer) -> None:
    """Do what Lightning does at the end of an epoch, whatever has replaced it."""
    loop = trainer.fit_loop
    type(loop).on_advance_end(loop)


def broadcast_no_signals(trainer: Trainer) -> None:
    """Leave out the broadcast by which rank 0 tells the others before every batch of a SIGTERM.

    Replaced: `_TrainingEpochLoop._broadcast_sigterm_tensor` of this Trainer. It makes the host wait
    for the device in every batch, and knows of signals to rank 0 alone. Unnecessary when Lightning
    does without it, or asks the strategy (Lightning #21487).
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = _nothing


def _nothing() -> None:
    """Does nothing."""


def replace_monitored_value(trainer: Trainer, ours: Callable[[str, Any], Any]) -> None:
    """Have this Trainer step a ReduceLROnPlateau with ``ours(key, value)`` instead of the value.

    Replaced: `_TrainingEpochLoop._get_monitor_value` of this Trainer. It takes the value that this
    rank has logged. Unnecessary when Lightning has one that is the same on all ranks.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._get_monitor_value = partial(_monitored_value, loop, ours)


def _monitored_value(loop: Any, ours: Callable[[str, Any], Any], key: str) -> Any:
    return ours(key, type(loop)._get_monitor_value(loop, key))


def validates_after_batch(trainer: Trainer, fetcher: Any) -> bool:
    """Whether a validation follows the batch that is ending.

    Private: `_TrainingEpochLoop._should_check_val_fx`. Needed to end a run before that validation.
    """
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def is_last_batch(trainer: Trainer) -> bool:
    """Whether the batch that is ending is the last one of its epoch.

    Private: `_TrainingEpochLoop._num_ready_batches_reached`.
    """
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def runs_last_batch(trainer: Trainer) -> bool:
    """Whether the batch that runs is the last one of its epoch, in training or an evaluation.

    Private: as in `is_last_batch` and `evaluation_loop`. An epoch may end earlier.
    """
    if trainer.training:
        return is_last_batch(trainer)
    loop: Any = trainer.predict_loop if trainer.predicting else evaluation_loop(trainer)
    return bool(loop.batch_progress.is_last_batch)


def evaluation_loop(trainer: Trainer) -> _EvaluationLoop:
    """The loop that validates or tests now.

    Private: `Trainer._evaluation_loop`. Needed for the number of its batches, as the loop of the
    validation within a fit is another one than ``trainer.validate_loop``.
    """
    return trainer._evaluation_loop


def avoid_inference_mode(trainer: Trainer, *, outside_training: bool) -> None:
    """Have batches be evaluated under ``torch.no_grad``.

    Changed: ``inference_mode`` of `_EvaluationLoop` and `_PredictionLoop`, which the Trainer sets
    from its argument, and for the validation within a fit by backend and strategy.

    Args:
        trainer: whose loops are changed.
        outside_training: also in ``validate``, ``test`` and ``predict``.
    """
    loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop]
    if outside_training:
        loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    for loop in loops:
        loop.inference_mode = False


# Progress


def batch_progress(progress: dict[str, Any]) -> dict[str, Any]:
    """The counts of training batches in a checkpoint: ``current`` of the epoch, and ``total``.

    Private: the format in which ``_BatchProgress`` is saved in the state of the fit loop, with
    ``ready``, ``started``, ``processed`` and ``completed`` in each, and ``is_last_batch``.

    Args:
        progress: ``state_dict`` of the fit loop.
    """
    batches: dict[str, Any] = progress[_TRAINING]
    return batches


def epoch_counts(progress: dict[str, Any]) -> dict[str, int]:
    """The counts of epochs in a checkpoint, by the same names; see `batch_progress`."""
    epochs: dict[str, int] = progress["epoch_progress"]["current"]
    return epochs


def take_batches_back(progress: dict[str, Any], done: int) -> None:
    """Change a checkpoint so that the run that goes on from it begins with an earlier batch.

    Changed: the counts of `batch_progress`. Needed because a checkpoint that is saved while
    gradients are accumulated does not contain them.

    Args:
        progress: ``state_dict`` of the fit loop, which is changed.
        done: batches of the present epoch that are to count as done.
    """
    batches = batch_progress(progress)
    for name in _COUNTS:
        batches["total"][name] -= batches["current"][name] - done
        batches["current"][name] = done


def take_epoch_back(progress: dict[str, Any]) -> None:
    """Change a checkpoint so that the run that goes on from it goes on with the begun epoch.

    Changed: the numbers of ``epoch_progress`` in the state of the fit loop. Lightning counts an
    epoch as done when training ends within it (``max_steps``, ``should_stop``), so that a resumed
    run would read on in the order of the next one, whose first samples it never reads. Unnecessary
    when only epochs that are over count as done.

    Args:
        progress: ``state_dict`` of the fit loop, which is changed.
    """
    current, total = (progress["epoch_progress"][name] for name in ("current", "total"))
    for name in ("processed", "completed"):
        early = max(current[name] - (current["started"] - 1), 0)
        current[name] -= early
        total[name] -= early


def shift_batch_counts(trainer: Trainer, by: int) -> None:
    """Count that many more batches of the present epoch as done.

    Changed: ``batch_progress`` of the epoch's loop. Needed where a resumed run has batches of
    another size, and the epoch is to end with its last sample.
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in _COUNTS:
        setattr(current, name, getattr(current, name) + by)


def say_validation_has_begun(progress: dict[str, Any]) -> None:
    """Change a checkpoint so that the run that goes on from it validates first, from the start.

    Changed: the numbers of ``epoch_loop.val_loop.batch_progress`` in the state of the fit loop.
    Lightning takes a validation for done unless one of its batches was begun and not evaluated
    (`_EvaluationLoop.restarted_mid_evaluation`). Unnecessary when a checkpoint can say that
    validation has yet to begin.

    Args:
        progress: ``state_dict`` of the fit loop, which is changed.
    """
    batches = progress[_VALIDATION]
    begun = batches["total"]["completed"] + 1
    batches["total"].update(ready=begun, started=begun, processed=begun - 1, completed=begun - 1)
    batches["current"].update(ready=0, started=0, processed=0, completed=0)
    batches["is_last_batch"] = False


def validates_first(trainer: Trainer) -> bool:
    """Whether a resumed run goes on with a validation."""
    return trainer.fit_loop.epoch_loop.val_loop.restarted_mid_evaluation


def begin_next_epoch(trainer: Trainer) -> None:
    """Have a resumed run begin an epoch, which Lightning takes for one to go on with.

    Changed: ``epoch_progress`` and `_restarting` of the fit loop; the setter of ``restarting``
    makes True of False where a Trainer has ``max_steps``, so it is set past it. Unnecessary when
    ``max_steps`` no longer means that an epoch is always gone on with.
    """
    fit = trainer.fit_loop
    if fit.restarted_on_epoch_end:
        fit.epoch_progress.increment_completed()
    fit.reset_restart_stage()
    fit._restarting = fit.epoch_loop.restarting = False


def count_batches_anew(trainer: Trainer) -> None:
    """Have a resumed run count the batches of a new epoch from 0.

    Changed: ``batch_progress`` of the epoch's loop, which goes on counting from the epoch before
    where the number of batches is not known. The run completes one more batch of the epoch that is
    over if the checkpoint was saved amid the end of it.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.reset_on_run()
    loop.batch_progress.current.completed = -1 if loop.restarted_on_train_batch_end else 0
