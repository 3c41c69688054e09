"""What ``configure_model`` makes besides parameters: metrics, and tensors nothing registers."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.small import Small, loader, make_trainer


class Late(Small):
    """Makes everything in ``configure_model``, metrics among it."""

    def configure_model(self):
        if hasattr(self, "mean"):
            return
        self.more = nn.Linear(4, 4)
        self.was_meta = self.more.weight.is_meta
        self.mean = MeanMetric()
        self.accuracy = MetricCollection([MulticlassAccuracy(num_classes=3)])

    def training_step(self, batch, batch_idx):
        self.mean(batch[0].new_tensor(2.0))
        self.accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 2, 0]))
        self.log_dict(self.accuracy)
        self.log("mean", self.mean)
        return self.loss(batch) + 0 * self.more.weight.sum()


class Weighted(Late):
    """Holds a tensor that is no buffer."""

    def configure_model(self):
        super().configure_model()
        self.factors = {"loss": torch.tensor(2.0)}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factors["loss"]


def test_metrics_keep_the_state_that_they_begin_with(recwarn):
    module = Late()
    make_trainer({}).fit(module, loader())
    found = module.trainer.callback_metrics
    assert module.was_meta
    assert found["mean"] == 2
    assert found["MulticlassAccuracy"] == pytest.approx(2.5 / 3)
    assert not [w for w in recwarn if "real weights" in str(w.message)]


def _fit_late(layout):
    module = Late()
    make_trainer(layout, 2).fit(module, loader(dp=1))
    return float(module.trainer.callback_metrics["mean"])


def test_metrics_of_a_stage(pool):
    assert pool.run(2, _fit_late, {"tp": 2}) == [2, 2]
    assert pool.run(2, _fit_late, {"pp": 2}) == [2, 2]


def test_tensors_that_nothing_registers_are_made_for_real(recwarn):
    module = Weighted()
    make_trainer({}).fit(module, loader())
    assert not module.factors["loss"].is_meta
    said = [str(w.message) for w in recwarn if "real weights" in str(w.message)]
    assert len(said) == 1
    assert "reset_parameters(): Weighted" in said[0]
