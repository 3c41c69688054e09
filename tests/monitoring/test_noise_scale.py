"""The noise scale of gradients is found, and is the same under every layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import GradientNoiseScale
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, samples
from tests.strategy.test_clipping import Everything


def estimated(layout: Mapping[str, Any], devices: int) -> tuple[dict[str, float], Any]:
    scale = GradientNoiseScale(every=2)
    trainer = make_trainer(layout, devices, callbacks=[scale])
    trainer.fit(Everything(), loader(samples(64), dp=dp_of(devices, layout)))
    assert scale.noise_scale == pytest.approx(float(trainer.callback_metrics["optim/noise_scale"]))
    return scale.state_dict(), scale.noise_scale


@pytest.fixture(scope="module")
def of_one_process(pool: WorkerPool) -> Any:
    return pool.run(1, estimated, {}, 1)[0]


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (2, {"tp": 2}),
        (2, {"zero": 3, "microbatch_size": 2}),
        (2, {"pp": 2}),
        pytest.param(4, {"pp": 2, "zero": 1}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_every_layout_finds_the_same(
    pool: WorkerPool, devices: int, layout: dict[str, Any], of_one_process: Any
) -> None:
    alone, scale = of_one_process
    assert scale > 0
    for found, ratio in pool.run(devices, estimated, layout, devices):
        assert found == pytest.approx(alone, rel=1e-9)
        assert ratio == pytest.approx(scale, rel=1e-9)


class Fixed(Small):
    """A gradient per sample that is the sample: mean and variance are those of the data."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.net = nn.Identity()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        return (self.weight * batch[0]).sum(1).mean()


def test_finds_signal_and_noise_of_known_gradients() -> None:
    data = samples(6400, seed=5)
    values = data.tensors[0] + torch.tensor([0.5, 0, 0, 0], dtype=torch.float64)
    module, scale = Fixed(), GradientNoiseScale(every=2, window=10**6)
    trainer = make_trainer({}, callbacks=[scale], accumulate_grad_batches=2)
    trainer.fit(module, loader(torch.utils.data.TensorDataset(values, values)))
    noise = float(values.var(0).sum())
    # 200 pairs of batches of 16: the estimates scatter by about 5 and 10 %.
    assert scale.state_dict()["weight"] == pytest.approx(199, rel=1e-3)
    assert scale.state_dict()["noise"] == pytest.approx(noise, rel=0.15)
    assert scale.state_dict()["signal"] == pytest.approx(0.25, rel=0.25)
    resumed = GradientNoiseScale()
    resumed.load_state_dict(scale.state_dict())
    assert resumed.noise_scale == scale.noise_scale


def uneven() -> dict[str, float]:
    scale = GradientNoiseScale(every=3)
    make_trainer({}, 2, callbacks=[scale]).fit(Everything(), loader(samples(31), dp=2))
    return scale.state_dict()


def test_a_last_batch_that_ranks_share_unevenly(pool: WorkerPool) -> None:
    # The second step of the pair has 7 samples, 4 and 3 of them on the ranks.
    for state in pool.run(2, uneven):
        assert state["weight"] == 0


class SavesAfter(pl.Callback):
    """Saves in the midst of the epoch."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_takes_the_same_pairs(tmp_path: Path) -> None:
    def run(**resume: Any) -> dict[str, float]:
        scale = GradientNoiseScale(every=4)
        callbacks = [scale, SavesAfter(7, tmp_path / "saved")]
        make_trainer({}, callbacks=callbacks).fit(Everything(), loader(samples(120)), **resume)
        return scale.state_dict()

    whole = run()
    assert run(ckpt_path=tmp_path / "saved") == whole


def test_overflow_is_left_out_and_options_are_checked() -> None:
    scale = GradientNoiseScale()
    scale._add(float("inf"), 1.0, 8)
    scale._add(float("nan"), 1.0, 8)
    assert scale.noise_scale is None
    with pytest.raises(ConfigError, match=r"every=1[\s\S]*window=0"):
        GradientNoiseScale(every=1, window=0)
    with pytest.raises(ConfigError, match="under SingleDeviceStrategy"):
        make_trainer(None, callbacks=[GradientNoiseScale()]).fit(Small(), loader())
