"""What is logged is kept as `_lightning.results` takes it to be."""

import inspect
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import mlflow, wandb
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lightning_megatron._lightning.results import (
    EVERYBODY,
    UPDATE_COUNT,
    AmongRanks,
    count_first_update,
    count_update,
    forget_computed,
    initial_states,
    replaced_log,
    set_value_on_batch,
    synchronize_metrics,
    training_sums,
    uploads_checkpoints,
    value_on_batch,
)
from tests._lightning.running import Module, On, make_trainer


class Logging(Module):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("both", 2.0 + batch_idx, on_step=True, on_epoch=True, batch_size=3)
        self.log("step", 5.0, on_step=True, on_epoch=False)
        self.metric.update(4.0)
        set_value_on_batch(self.metric, torch.tensor(7.0))
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_replaced_log() -> None:
    module, calls = Module(), []
    with replaced_log(module, lambda name, value, **options: calls.append((name, value))):
        module.log("a", 1.0)
        module.log_dict({"b": 2.0})
    assert calls == [("a", 1.0), ("b", 2.0)]
    assert "log" not in vars(module)


def test_training_sums_and_initial_states() -> None:
    found: list[dict[str, Any]] = []

    def note(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        found.append(
            {
                key: {name: float(getattr(metric, name)) for name in initial_states(metric)}
                for key, metric in training_sums(trainer).items()
            }
        )

    def undo(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for metric in training_sums(trainer).values():
            for name, value in initial_states(metric).items():
                setattr(metric, name, torch.full_like(getattr(metric, name), float(value)))

    trainer = make_trainer(On(on_train_batch_end=note, on_train_epoch_end=undo))
    trainer.fit(Logging())
    first = {"training_step.both": {"value": 6.0, "cumulated_batch_size": 3.0}}
    second = {"training_step.both": {"value": 15.0, "cumulated_batch_size": 6.0}}
    assert found == [first, second]
    assert torch.isnan(trainer.callback_metrics["both_epoch"])  # nothing is left of 0 samples


def test_value_on_batch_and_set_value_on_batch() -> None:
    metric = MeanMetric()
    metric(3.0)
    metric(5.0)
    assert value_on_batch(metric) == 5.0
    trainer = make_trainer()
    trainer.fit(Logging())
    assert trainer.callback_metrics["metric_step"] == 7.0
    assert trainer.callback_metrics["metric_epoch"] == 4.0


def test_count_update_and_count_first_update() -> None:
    metric = MeanMetric()
    with pytest.warns(UserWarning, match="before the ``update``"):
        metric.compute()
    forget_computed(metric)
    count_first_update(metric)
    count_first_update(metric)
    assert metric.update_count == getattr(metric, UPDATE_COUNT) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.compute()
    count_update(metric)
    assert metric.update_count == 2


def test_forget_computed() -> None:
    metric = MeanMetric()
    metric.update(3.0)
    assert metric.compute() == 3.0
    metric.mean_value.fill_(4.0)
    assert metric.compute() == 3.0, "forget_computed is not needed any more"
    forget_computed(metric)
    assert metric.compute() == 4.0


@pytest.mark.parametrize("kind", [wandb.WandbLogger, mlflow.MLFlowLogger])
def test_uploads_checkpoints(kind: type) -> None:
    assert "self._log_model = log_model" in inspect.getsource(kind)
    logger: Any = kind.__new__(kind)
    for given, uploads in (("all", True), (True, True), (False, False)):
        logger._log_model = given
        assert uploads_checkpoints(logger) is uploads
    assert not uploads_checkpoints(object())


def test_the_ranks_of_a_metric_are_asked_for_when_it_is_synchronised() -> None:
    original, asked, metric = Metric.sync, list[Metric](), MeanMetric()
    metric.update(2.0)

    def among(one: Metric) -> AmongRanks:
        asked.append(one)
        return None if len(asked) == 1 else EVERYBODY

    def gather(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
        assert group is None
        return [value, value + 4]

    synchronize_metrics(among)
    try:
        options = {"dist_sync_fn": gather, "distributed_available": lambda: True}
        metric.sync(**options)
        assert not metric._is_synced, "no other rank"
        metric.sync(**options)
        assert metric._is_synced
        metric.unsync()
        assert all(one is metric for one in asked)
        assert len(asked) == 2
    finally:
        synchronize_metrics(None)
    assert Metric.sync is original
