"""Callbacks that average weights, where every rank holds all of them."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from lightning_megatron.layers import MixtureOfExperts
from tests.strategy.refusals import refusal
from tests.strategy.small import Small, loader, make_trainer, weights


def _fit(layout, kind, devices=1):
    module = Small()
    callback = (
        EMAWeightAveraging(decay=0.5) if kind == "ema" else StochasticWeightAveraging(0.05, 1)
    )
    make_trainer(layout, devices, callbacks=[callback], max_epochs=3).fit(
        module, loader(dp=devices)
    )
    return weights(module)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_are_those_of_one_device(pool, kind):
    expected = _fit(None, kind)
    for found in pool.run(2, _fit, {"zero": 0}, kind, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=0)


class Mixed(Small):
    """Experts and nothing else."""

    def __init__(self):
        super().__init__()
        self.net = MixtureOfExperts(4, 3, 4)


def _fit_experts(kind):
    callback = EMAWeightAveraging() if kind == "ema" else StochasticWeightAveraging(0.05, 1)
    make_trainer({"ep": 2}, 2, callbacks=[callback]).fit(Mixed(), loader(dp=2))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_experts_that_are_spread_are_refused(kind):
    error = refusal(lambda: _fit_experts(kind), 2)
    assert re.search("spreads the weights over ranks.*ep=1 and pp=1", str(error))


class Decaying(Small):
    """Its own schedule is one that cannot read the state of another."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_averaging_goes_on_with_its_own_schedule(epoch, tmp_path):
    def fit(module, folder, **options):
        callbacks = [
            StochasticWeightAveraging(0.05, 2),
            ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}"),
        ]
        trainer = make_trainer({}, callbacks=callbacks, max_epochs=4, enable_checkpointing=True)
        trainer.fit(module, loader(), **options)
        return weights(module)

    expected = fit(Decaying(), tmp_path / "all")
    checkpoint = tmp_path / f"all/epoch={epoch}.ckpt"
    found = fit(Decaying(), tmp_path / "rest", ckpt_path=checkpoint)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=0)
