"""Cases of Lightning's callbacks, and of callbacks with a state."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch.optim import SGD

from tests.lightning.logs import BOOK, Book
from tests.lightning.loops import TwoValLoaders
from tests.lightning.optimizers import EachStep, Groups, Scheduled, TwoSchedulers
from tests.lightning.record import Base, Case, Run


class Logged(Base):
    """Validation values from a list."""

    values = (3.0, 1.0, 2.0, 2.5, 0.5, 0.4)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.loss(batch)
        self.log("val", self.values[self.current_epoch], sync_dist=True)


class ValidatesOften(Base):
    """The value falls by one with each optimizer step."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.loss(batch)
        self.log("val", -float(self.trainer.global_step), sync_dist=True)


class Diverges(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", float("inf") if self.trainer.global_step == 4 else 1.0)
        return loss


class Fails(Base):
    """Raises an error in the middle, on all ranks."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            raise ValueError("the user's own error")


class Interrupted(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            raise KeyboardInterrupt


class Counts(pl.Callback):
    """Has a state of its own."""

    def __init__(self, name: str = "a") -> None:
        self.name, self.batches = name, 0

    @property
    def state_key(self) -> str:
        return f"Counts[{self.name}]"

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Own(Base):
    """Brings its callbacks."""

    def configure_callbacks(self) -> Any:
        return [Counts("own"), EarlyStopping("loss", patience=0, min_delta=9.0)]


class Writer(BasePredictionWriter):
    """Notes which samples each prediction belongs to."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *position: Any
    ) -> None:
        self.written.append((tuple(prediction.shape), indices, position[1:]))

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        self.written.append((len(predictions), batch_indices))


class Finetunes(Base):
    """Its first block thaws in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(4, 4)

    def loss(self, batch: Any) -> Any:
        return super().loss((self.backbone(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def keep_books(run: Run) -> None:
    """Fit, and note what callbacks and logger hold."""
    trainer, module = run.trainer(), run.module()
    try:
        trainer.fit(module)
    finally:
        _note_callbacks(run, trainer)
        run.finish(trainer, module)


def _note_callbacks(run: Run, trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping):
            run.note(stopped=callback.stopped_epoch, waited=callback.wait_count)
            run.record.values["best_score"] = float(callback.best_score)
        if isinstance(callback, ModelCheckpoint):
            best, last = (
                Path(p).name for p in (callback.best_model_path, callback.last_model_path)
            )
            saved = sorted(Path(p).name for p in callback.best_k_models)
            run.note(**{f"checkpoints {callback.state_key}": (best, last, saved)})
            if callback.best_model_score is not None:
                run.record.values["best_model_score"] = float(callback.best_model_score)
        if isinstance(callback, Counts):
            run.note(**{callback.state_key: callback.batches})
        if isinstance(callback, Writer):
            run.record.own["written"] = callback.written
    kinds = [type(c).__name__ for c in trainer.callbacks]  # type: ignore[attr-defined]
    run.note(callbacks=kinds)
    books = [logger.lines for logger in trainer.loggers if isinstance(logger, Book)]
    run.record.first["books"] = books


def interrupt(run: Run) -> None:
    """Lightning 2.6 ends the process, or returns, after its own clean-up."""
    try:
        keep_books(run)
    except SystemExit as error:
        run.note(exit=error.code)


def predict(run: Run) -> None:
    trainer, module = run.trainer(), run.module()
    trainer.predict(module, return_predictions=False)
    _note_callbacks(run, trainer)


def calls(_: Path) -> list[pl.Callback]:
    """Callbacks that change the run from outside."""

    def slower(trainer: pl.Trainer, *_: Any) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    return [LambdaCallback(on_train_epoch_end=slower)]


def saves(**options: Any) -> dict[str, Any]:
    """A case with a ModelCheckpoint."""
    trainer = {"enable_checkpointing": True, "max_epochs": 3}
    return {
        "trainer": trainer | options.pop("trainer", {}),
        "callbacks": lambda place: [ModelCheckpoint(place / "saved", **options)],
        "script": keep_books,
    }


def stops(*args: Any, **options: Any) -> dict[str, Any]:
    """A case with an EarlyStopping."""
    return {
        "trainer": {"max_epochs": 4} | options.pop("trainer", {}),
        "callbacks": lambda _: [EarlyStopping(*args, **options)],
        "script": keep_books,
    }


SAVED = {
    "each epoch": Case(Base, **saves(), layouts=()),
    "all": Case(Base, **saves(save_top_k=-1), layouts=(), others=("one",)),
    "none": Case(Base, **saves(save_top_k=0), layouts=()),
    "best": Case(Logged, **saves(monitor="val", filename="{epoch}-{val:.2f}"), layouts=()),
    "two best": Case(Logged, **saves(monitor="val", save_top_k=2, mode="max"), layouts=()),
    "best and last": Case(
        Logged, **saves(monitor="val", save_last=True), layouts=(), others=("pp",)
    ),
    "linked last": Case(Logged, **saves(monitor="val", save_last="link"), layouts=()),
    "names": Case(
        Logged,
        **saves(monitor="val", filename="a{epoch}_{val:.1f}", auto_insert_metric_name=False),
        layouts=(),
    ),
    "same name": Case(Base, **saves(filename="one", save_top_k=-1), layouts=()),
    "each second step": Case(
        Base, **saves(every_n_train_steps=2, save_top_k=-1), layouts=(), others=("dp",)
    ),
    "by steps and score": Case(
        ValidatesOften,
        **saves(monitor="val", every_n_train_steps=2, save_top_k=2),
        layouts=("pp",),
    ),
    "each second epoch": Case(
        Base, **saves(every_n_epochs=2, save_top_k=-1, trainer={"max_epochs": 4}), layouts=()
    ),
    "each validation": Case(
        ValidatesOften,
        **saves(monitor="val", save_top_k=2, trainer={"val_check_interval": 1, "max_epochs": 2}),
        layouts=(),
    ),
    "each training epoch": Case(
        Base, **saves(monitor="loss", save_on_train_epoch_end=True), layouts=()
    ),
    "by time": Case(
        Base, **saves(train_time_interval=timedelta(seconds=0), save_top_k=-1), layouts=()
    ),
    "weights only": Case(Base, **saves(save_weights_only=True), layouts=(), others=("dp",)),
    "unknown monitor": Case(Base, **saves(monitor="nothing"), layouts=()),
    "on an error": Case(Fails, **saves(save_on_exception=True, every_n_epochs=9), layouts=()),
}

STOPPED = {
    "patience": Case(Logged, **stops("val", patience=1), layouts=("pp",)),
    "largest": Case(Logged, **stops("val", mode="max", patience=2), layouts=()),
    "threshold": Case(Logged, **stops("val", stopping_threshold=1.5), layouts=("dp",)),
    "divergence": Case(Logged, **stops("val", divergence_threshold=2.9), layouts=()),
    "infinite": Case(
        Diverges, **stops("loss", patience=9, check_on_train_epoch_end=True), layouts=()
    ),
    "unknown": Case(Base, **stops("nothing"), layouts=()),
    "unknown is allowed": Case(Base, **stops("nothing", strict=False), layouts=()),
    "of training": Case(
        Base, **stops("loss", min_delta=9.0, patience=1), layouts=(), others=("pp",)
    ),
}

OTHERS = {
    "learning rates by step": Case(
        TwoSchedulers,
        **BOOK,
        callbacks=lambda _: [LearningRateMonitor("step")],
        trainer={"log_every_n_steps": 1},
        layouts=("pp",),
    ),
    "learning rates by epoch": Case(
        Scheduled, **BOOK, callbacks=lambda _: [LearningRateMonitor("epoch")], layouts=()
    ),
    "learning rates of groups": Case(
        Groups,
        **BOOK,
        callbacks=lambda _: [LearningRateMonitor(log_momentum=True, log_weight_decay=True)],
        layouts=(),
    ),
    "accumulation changes": Case(
        EachStep,
        callbacks=lambda _: [GradientAccumulationScheduler({0: 1, 1: 2})],
    ),
    "stochastic weight averaging": Case(
        callbacks=lambda _: [
            StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
        ],
        trainer={"max_epochs": 3},
        layouts=("dp",),
    ),
    "exponential average": Case(
        callbacks=lambda _: [EMAWeightAveraging(decay=0.5)], layouts=("dp",)
    ),
    "timer": Case(callbacks=lambda _: [Timer(timedelta(seconds=0), interval="epoch")]),
    "finetuning": Case(
        Finetunes,
        callbacks=lambda _: [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01)],
        trainer={"max_epochs": 3},
        layouts=("dp",),
        script=keep_books,
    ),
    "lambda": Case(callbacks=calls, layouts=()),
    "states": Case(
        callbacks=lambda _: [Counts("a"), Counts("b")],
        script=keep_books,
        layouts=(),
        others=("dp",),
    ),
    "from the module": Case(
        Own, script=keep_books, trainer={"max_epochs": 4}, layouts=(), others=("pp",)
    ),
    "predictions by batch": Case(
        TwoValLoaders, callbacks=lambda _: [Writer("batch")], script=predict, layouts=("dp",)
    ),
    "predictions by epoch": Case(callbacks=lambda _: [Writer("epoch")], script=predict),
    "predictions by both": Case(
        callbacks=lambda _: [Writer("batch_and_epoch")], script=predict, layouts=()
    ),
    "an error of the user's": Case(Fails, script=keep_books, layouts=("tp",)),
    "an interrupt": Case(Interrupted, script=interrupt, layouts=()),
    "saved on an error": Case(
        Fails, script=keep_books, callbacks=lambda place: [OnExceptionCheckpoint(place)], layouts=()
    ),
}

CASES = {
    **{f"saved: {name}": case for name, case in SAVED.items()},
    **{f"stopped: {name}": case for name, case in STOPPED.items()},
    **OTHERS,
}
