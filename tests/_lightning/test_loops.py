"""Lightning's loops do what `_lightning.loops` relies on."""

import inspect
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from typing_extensions import override

from lightning_megatron._lightning.loops import (
    avoid_inference_mode,
    batch_progress,
    begin_next_epoch,
    broadcast_no_signals,
    count_batches_anew,
    end_batch,
    end_epoch,
    epoch_counts,
    evaluation_loop,
    is_last_batch,
    replace_end_of_batch,
    replace_end_of_epoch,
    replace_monitored_value,
    runs_last_batch,
    say_validation_has_begun,
    shift_batch_counts,
    take_batches_back,
    take_epoch_back,
    validates_after_batch,
    validates_first,
)
from tests._lightning.running import Module, On, make_trainer


def test_replace_end_of_batch_and_end_batch() -> None:
    trainer, module = make_trainer(), Module()

    def ours(fetcher: Any) -> None:
        module.calls.append("end")
        end_batch(trainer, fetcher)

    replace_end_of_batch(trainer, ours)
    trainer.fit(module)
    steps = [call for call in module.calls if call in ("training_step", "validation_step", "end")]
    assert steps == ["training_step", "end", "training_step", "end", "validation_step"]


def test_replace_end_of_batch_leaves_validation_to_us() -> None:
    trainer, module = make_trainer(), Module()
    replace_end_of_batch(trainer, lambda fetcher: None)
    trainer.fit(module)
    assert "validation_step" not in module.calls


def test_validates_after_batch_and_is_last_batch() -> None:
    trainer = make_trainer()
    found = []

    def ours(fetcher: Any) -> None:
        found.append((validates_after_batch(trainer, fetcher), is_last_batch(trainer)))

    replace_end_of_batch(trainer, ours)
    trainer.fit(Module())
    assert found == [(False, False), (True, True)]


def test_runs_last_batch() -> None:
    found: list[bool] = []

    def note(trainer: pl.Trainer, *_: Any) -> None:
        found.append(runs_last_batch(trainer))

    trainer = make_trainer(On(on_train_batch_start=note), limit_val_batches=0)
    trainer.fit(Module())
    assert found == [False, True]
    for run in ("validate", "test", "predict"):
        found.clear()
        limit = {f"limit_{run.replace('validate', 'val')}_batches": 2}
        hook = f"on_{run.replace('validate', 'validation')}_batch_start"
        getattr(make_trainer(On(**{hook: note}), **limit), run)(Module())
        assert found == [False, True], run


def test_replace_end_of_epoch_and_end_epoch() -> None:
    trainer, module = make_trainer(), Module()

    def ours() -> None:
        module.calls.append("end")
        end_epoch(trainer)

    replace_end_of_epoch(trainer, ours)
    trainer.fit(module)
    assert module.calls[-2:] == ["end", "on_train_epoch_end"]


def test_broadcast_no_signals_is_needed() -> None:
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert "broadcast" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)
    trainer = make_trainer()
    broadcast_no_signals(trainer)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()


def test_replace_monitored_value_is_needed() -> None:
    source = inspect.getsource(_TrainingEpochLoop._update_learning_rates)
    assert "self._get_monitor_value(monitor_key)" in source
    trainer = make_trainer()
    asked: list[Any] = []
    replace_monitored_value(trainer, lambda *what: asked.append(what))
    trainer.fit_loop.epoch_loop._get_monitor_value("val")
    assert asked == [("val", None)]


def test_evaluation_loop() -> None:
    found: list[Any] = []

    def note(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loop = evaluation_loop(trainer)
        found.append((loop, list(loop.max_batches)))

    trainer = make_trainer(On(on_validation_start=note, on_test_start=note), limit_test_batches=3)
    trainer.fit(Module())
    trainer.validate(Module(), verbose=False)
    trainer.test(Module(), verbose=False)
    within = trainer.fit_loop.epoch_loop.val_loop
    assert found == [(within, [1]), (trainer.validate_loop, [1]), (trainer.test_loop, [3])]


@pytest.mark.parametrize("outside", [False, True])
def test_avoid_inference_mode(outside: bool) -> None:
    found: dict[str, bool] = {}

    class Asked(Module):
        @override
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            found["fit" if self.trainer.state.fn == "fit" else "alone"] = is_inference()

        @override
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            found["test"] = is_inference()

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            found["predict"] = is_inference()

    if torch.distributed.is_initialized():  # by a test before this one: Lightning looks at it
        torch.distributed.destroy_process_group()
    is_inference = torch.is_inference_mode_enabled
    trainer = make_trainer(limit_test_batches=1, limit_predict_batches=1)
    trainer.fit_loop.epoch_loop.val_loop.inference_mode = True
    avoid_inference_mode(trainer, outside_training=outside)
    trainer.fit(Asked())
    trainer.validate(Asked(), verbose=False)
    trainer.test(Asked(), verbose=False)
    trainer.predict(Asked(), return_predictions=False)
    assert found == {"fit": False, **dict.fromkeys(("alone", "test", "predict"), not outside)}


def progress_of(trainer: pl.Trainer) -> dict[str, Any]:
    return trainer.fit_loop.state_dict()


def resumed(progress: dict[str, Any]) -> pl.Trainer:
    trainer = make_trainer(max_epochs=2)
    trainer.fit_loop.load_state_dict(progress)
    trainer.fit_loop.epoch_loop.update_restart_stage()
    return trainer


def test_say_validation_has_begun_and_validates_first() -> None:
    saved: list[dict[str, Any]] = []
    trainer = make_trainer(
        On(on_validation_end=lambda trainer, _: saved.append(progress_of(trainer)))
    )
    trainer.fit(Module())
    [progress] = saved
    assert not validates_first(resumed(progress))
    say_validation_has_begun(progress)
    assert validates_first(resumed(progress))


def test_take_epoch_back() -> None:
    """What Lightning counts at the end of a run that stops within an epoch."""
    trainer = make_trainer(max_steps=1, max_epochs=-1)
    trainer.fit(Module())
    progress = progress_of(trainer)
    over = {"ready": 1, "started": 1, "processed": 1, "completed": 1}
    assert progress["epoch_progress"] == {"current": over, "total": over}
    take_epoch_back(progress)
    begun = {**over, "processed": 0, "completed": 0}
    assert progress["epoch_progress"] == {"current": begun, "total": begun}
    take_epoch_back(progress)
    assert epoch_counts(progress) == begun


def test_batch_progress_epoch_counts_and_take_batches_back() -> None:
    saved: list[dict[str, Any]] = []
    note = On(on_train_batch_end=lambda trainer, _: saved.append(deepcopy(progress_of(trainer))))
    make_trainer(note, max_epochs=2).fit(Module())
    progress = saved[3]  # the last batch of the second epoch
    counts = {"ready": 2, "started": 2, "processed": 2, "completed": 1}
    assert batch_progress(progress)["current"] == counts
    assert batch_progress(progress)["total"] == {name: n + 2 for name, n in counts.items()}
    assert batch_progress(progress)["is_last_batch"]
    assert not batch_progress(saved[2])["is_last_batch"]
    assert epoch_counts(progress) == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    take_batches_back(progress, 1)
    loop = resumed(progress).fit_loop.epoch_loop
    assert set(vars(loop.batch_progress.current).values()) == {1}
    assert set(vars(loop.batch_progress.total).values()) == {3}


def test_shift_batch_counts() -> None:
    trainer = make_trainer()
    trainer.fit(Module())
    shift_batch_counts(trainer, 3)
    assert set(vars(trainer.fit_loop.epoch_loop.batch_progress.current).values()) == {5}
    assert set(vars(trainer.fit_loop.epoch_loop.batch_progress.total).values()) == {2}


def test_begin_next_epoch() -> None:
    trainer = make_trainer(max_steps=10)
    loop = trainer.fit_loop
    loop.restarting = True
    loop.restarting = False
    assert loop.restarting, "begin_next_epoch need not set _restarting any more"
    begin_next_epoch(trainer)
    assert not loop.restarting
    assert not loop.epoch_loop.restarting


def test_begin_next_epoch_completes_the_one_that_is_over() -> None:
    saved: list[dict[str, Any]] = []
    note = On(on_train_epoch_end=lambda trainer, _: saved.append(progress_of(trainer)))
    make_trainer(note).fit(Module())
    trainer = make_trainer(max_steps=10)
    trainer.fit_loop.load_state_dict(saved[0])
    trainer.fit_loop.update_restart_stage()
    assert trainer.fit_loop.restarted_on_epoch_end
    begin_next_epoch(trainer)
    assert trainer.fit_loop.epoch_progress.current.completed == 1
    assert not trainer.fit_loop.restarted_on_epoch_end


def test_count_batches_anew() -> None:
    trainer = make_trainer()
    trainer.fit(Module())
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert (progress.current.ready, progress.total.ready) == (2, 2)
    count_batches_anew(trainer)
    assert (progress.current.ready, progress.current.completed, progress.total.ready) == (0, 0, 2)
