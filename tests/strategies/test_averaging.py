"""Callbacks that average weights, where every rank holds all of them."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from tests.strategies.small import Small, loader, make_trainer, weights


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
