"""Cases of `self.log`: names, steps and epochs, reductions, metrics, and what loggers get."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.lightning.loops import TwoValLoaders, Uneven
from tests.lightning.record import Base, Case, Run, samples


class Book(Logger):
    """Keeps every line that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def name(self) -> str:
        return "book"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append(
            ("metrics", step, {k: float(f"{float(v):.6g}") for k, v in metrics.items()})
        )

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.lines.append(("hyperparams", dict(params)))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.lines.append(("graph",))

    def save(self) -> None:
        self.lines.append(("save",))

    def finalize(self, status: str) -> None:
        self.lines.append(("finalize", status))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.lines.append(("checkpoint", Path(checkpoint_callback.last_model_path).name))


def with_book(_: Path) -> dict[str, Any]:
    return {"logger": Book()}


def with_two_books(_: Path) -> dict[str, Any]:
    return {"logger": [Book(), Book()]}


def read_books(run: Run) -> None:
    """Fit, validate and test, and note what the loggers got on rank 0."""
    trainer, module = run.trainer(), run.module()
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    books = [logger.lines for logger in trainer.loggers if isinstance(logger, Book)]
    run.record.first["books"] = books
    run.finish(trainer, module)


def read_csv(run: Run) -> None:
    trainer, module = run.trainer(logger=CSVLogger(run.directory, name="csv")), run.module()
    trainer.fit(module)
    if trainer.is_global_zero:
        lines = (run.directory / "csv/version_0/metrics.csv").read_text().splitlines()
        names, *rows = (line.split(",") for line in lines)
        run.record.first["lines"] = [
            {n: float(f"{float(v):.6g}") for n, v in zip(names, row, strict=True) if v}
            for row in rows
        ]
    run.finish(trainer, module)


class Kinds(Base):
    """Every combination of on_step and on_epoch, in every step."""

    def both(self, name: str, batch: Any) -> Any:
        loss = self.loss(batch)
        options: dict[str, Any] = {"sync_dist": True}
        self.log(f"{name}_default", loss, **options)
        self.log(f"{name}_on_step", loss, on_step=True, on_epoch=False, **options)
        self.log(f"{name}_on_epoch", loss, on_step=False, on_epoch=True, **options)
        self.log(f"{name}_both", loss, on_step=True, on_epoch=True, prog_bar=True, **options)
        self.log(f"{name}_unlogged", loss, logger=False, prog_bar=True, **options)
        self.log_dict({f"{name}_a": loss, f"{name}_b": -loss}, on_epoch=True, **options)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.both("train", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.both("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.both("test", batch)


class Reductions(Uneven):
    """Values of single samples in batches of two sizes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = batch[0][:, 0]
        loss = self.loss(batch)
        options: dict[str, Any] = {"on_epoch": True, "sync_dist": True}
        self.log("mean", first.mean(), **options)
        self.log("largest", first.max(), reduce_fx="max", **options)
        self.log("smallest", first.min(), reduce_fx=torch.min, **options)
        self.log("total", first.sum(), reduce_fx="sum", **options)
        self.log("sized", first.mean(), batch_size=len(first), **options)
        self.log("constant", 3, on_epoch=True)
        self.log("flag", True, on_epoch=True)
        return loss


class Nothing(Base):
    """Logs nothing at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.loss(batch)


class Sometimes(Base):
    """Keys that not every batch has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 2:
            self.log("odd", loss, sync_dist=True, on_epoch=True)
        else:
            self.log("even", loss, sync_dist=True, on_epoch=True)
        return loss


_WHERE = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_test_start", "on_test_epoch_start", "on_test_batch_start"),
    *("on_test_batch_end", "on_test_epoch_end"),
)
_REFUSED = (
    *("on_fit_start", "on_train_end", "on_validation_end", "on_test_end", "on_predict_start"),
    *("configure_optimizers", "setup"),
)


def _logging(name: str, base: type) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(base, name)(self, *args, **kwargs)
        self.log(f"in_{name}", float(self.trainer.global_step + 1))
        return found

    return hook


def _everywhere(base: type, *names: str) -> Any:
    methods = {name: _logging(name, base) for name in names}
    return type(f"LogsIn{base.__name__}", (base,), methods)


LOGGED = tuple(name for name in _WHERE if name != "on_validation_end")
LogsInHooks = _everywhere(Base, *LOGGED)


class LogsInCallback(_everywhere(pl.Callback, *LOGGED)):  # type: ignore[misc]
    """The same from a callback."""


class Metrics(Uneven):
    """Metrics that are logged, and one that is computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.largest, self.total = MeanMetric(), MaxMetric(), SumMetric()
        self.many = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="many_")
        self.val_mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean(batch[1].mean(), weight=float(len(batch[1])))
        self.largest.update(batch[1].max())
        self.total.update(batch[1].sum())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.many.update(batch[1].sum(1))
        self.val_mean.update(batch[1].sum(1))
        self.log("val_mean", self.val_mean)
        self.log_dict(self.many)
        return loss


class ByHand(Uneven):
    """A metric that is computed and reset at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.update(batch[1].sum(1))
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.mean.compute())
        self.mean.reset()


class Parameters(Base):
    """Hyper-parameters for the logger."""

    def __init__(self, width: int = 3, name: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()


class Graph(Base):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = samples().tensors[0][:2]

    def forward(self, x: Any) -> Any:
        return self.net(x)


class LogsTwice(Base):
    """The same key with other options in one hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("twice", loss.detach(), on_step=True)
        self.log("twice", loss.detach(), on_epoch=True)
        return loss


class LogsText(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("text", "a word")  # type: ignore[arg-type]
        return loss


class LogsVector(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("vector", torch.zeros(2))
        return loss


class LogsIndex(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("a/dataloader_idx_0", loss.detach())
        return loss


class LogsWrongReduction(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.detach(), reduce_fx=torch.argmax)
        return loss


class LogsInPrediction(Base):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("a", 1.0)


def predict(run: Run) -> None:
    trainer, module = run.trainer(), run.module()
    trainer.predict(module)


BOOK: dict[str, Any] = {"made_options": with_book, "script": read_books}
SINGLE: dict[str, Any] = {"rounding": 1e-6, "reason": "MeanMetric casts its values to float32"}
# A stage that fails ends its process, not its peers': none of these under a pipeline.

CASES = {
    "every kind": Case(
        module=Kinds, trainer={"log_every_n_steps": 2}, **BOOK, layouts=(), others=("dp", "pp")
    ),
    "every step": Case(
        module=Kinds, trainer={"log_every_n_steps": 1}, layouts=(), others=("one",), **BOOK
    ),
    "seldom": Case(trainer={"log_every_n_steps": 10}, layouts=(), **BOOK),
    "accumulation": Case(
        module=Kinds, trainer={"log_every_n_steps": 1, "accumulate_grad_batches": 2}, **BOOK
    ),
    "two loggers": Case(made_options=with_two_books, script=read_books, layouts=()),
    "two loaders": Case(module=TwoValLoaders, layouts=(), others=("pp",), **BOOK),
    "reductions": Case(
        module=Reductions, trainer={"log_every_n_steps": 1}, **BOOK, layouts=("pp",), others=("dp",)
    ),
    "nothing": Case(module=Nothing, **BOOK, layouts=()),
    "sometimes": Case(
        module=Sometimes, trainer={"log_every_n_steps": 1}, **BOOK, layouts=(), others=("pp",)
    ),
    "in hooks": Case(module=LogsInHooks, trainer={"log_every_n_steps": 1}, **BOOK, layouts=("pp",)),
    "in callbacks": Case(
        callbacks=lambda _: [LogsInCallback()], trainer={"log_every_n_steps": 1}, **BOOK, layouts=()
    ),
    "metrics": Case(module=Metrics, **BOOK, **SINGLE, layouts=("pp",), others=("dp",)),
    "metric by hand": Case(module=ByHand, layouts=("dp",), others=("one",), **BOOK, **SINGLE),
    "hyper-parameters": Case(module=Parameters, layouts=(), **BOOK),
    "graph": Case(module=Graph, layouts=(), **BOOK),
    "csv": Case(
        module=Kinds, trainer={"log_every_n_steps": 1}, script=read_csv, layouts=(), others=("pp",)
    ),
    "key twice": Case(module=LogsTwice, layouts=()),
    "text": Case(module=LogsText, layouts=("tp",)),
    "vector": Case(module=LogsVector, layouts=()),
    "name of an index": Case(module=LogsIndex, layouts=()),
    "unknown reduction": Case(module=LogsWrongReduction, layouts=()),
    "in predict_step": Case(module=LogsInPrediction, script=predict, layouts=()),
    **{f"refused in {n}": Case(module=_everywhere(Base, n), layouts=()) for n in _REFUSED},
}
