"""One callback switches on everything that keeps a run alive, and changes no number."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import FaultTolerance, Monitor, NumberGuard
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, weights


def trained(
    layout: Mapping[str, Any], devices: int, folder: str | None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    callbacks = [] if folder is None else [FaultTolerance(folder), Monitor(folder, every=2)]
    module = Small()
    trainer = make_trainer(layout, devices, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(dp=dp_of(devices, layout)))  # and once more with the same objects
    return weights(module), {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (1, {}),
        pytest.param(2, {"zero": 3}, marks=pytest.mark.thorough),
        (2, {"pp": 2}),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"pp": 2, "zero": 1}, marks=pytest.mark.thorough),
    ],
    ids=["one process", "zero 3", "pp=2", "tp=2", "pp=2 x dp=2"],
)
def test_a_run_without_faults_is_the_same_to_the_bit(
    pool: WorkerPool, tmp_path: Path, devices: int, layout: dict[str, Any]
) -> None:
    without = pool.run(devices, trained, layout, devices, None)
    guarded = pool.run(devices, trained, layout, devices, str(tmp_path))
    for (expected, _), (found, metrics) in zip(without, guarded, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert metrics["ft/goodput"] > 0


class Broken(Small):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (torch.nan if self.trainer.global_step == 2 else 1)


def test_the_defaults_keep_bad_numbers_out(tmp_path: Path) -> None:
    module = Broken()
    with pytest.raises(Exception, match="nan"):
        make_trainer({}, callbacks=[FaultTolerance(str(tmp_path))]).fit(module, loader())
    assert all(p.isfinite().all() for p in module.parameters())


def test_members_are_chosen(tmp_path: Path) -> None:
    own = NumberGuard(nonfinite="skip")
    group = FaultTolerance(str(tmp_path), numbers=own, hang=False, replicas=True)
    assert group.member(NumberGuard) is own
    assert "HangDetector" not in {type(member).__name__ for member in group.members}
    module = Broken()
    make_trainer({}, callbacks=[group]).fit(module, loader())
    assert all(p.isfinite().all() for p in module.parameters())
    with pytest.raises(ConfigError, match=r"hang='yes'[\s\S]*numbers=3"):
        FaultTolerance(hang="yes", numbers=3)  # type: ignore[arg-type]
