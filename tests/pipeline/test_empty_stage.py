"""A stage without anything to train: its placeholder is no part of weights or checkpoints."""

from pathlib import Path
from typing import Any

import torch

import lightning_megatron
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, loader, make_trainer


class Frozen(Small):
    """Trains its second half only."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers[:2]:
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], eps=1e-4)


def fit(layout: dict[str, Any] | None, devices: int, steps: int, path: Path, *, go_on: bool) -> Any:
    module = Frozen()
    trainer = make_trainer(layout, devices, max_steps=steps, max_epochs=-1)
    trainer.fit(module, loader(), ckpt_path=path if go_on else None)
    if not go_on:
        trainer.save_checkpoint(path)
    return module.state_dict() if layout is None else lightning_megatron.gather(module)


def test_frozen_stage_is_saved_and_gathered_without_its_placeholder(
    pool: WorkerPool, tmp_path: Path
) -> None:
    plain = fit(None, 1, 4, tmp_path / "plain.ckpt", go_on=False)
    path = tmp_path / "pp.ckpt"
    half = pool.run(2, fit, {"pp": 2}, 2, 2, path, go_on=False)
    assert all(found.keys() == plain.keys() for found in half)
    for devices, layout in ((1, {}), (2, {"pp": 2})):
        for found in pool.run(devices, fit, layout, devices, 4, path, go_on=True):
            assert found.keys() == plain.keys()
            for name, value in plain.items():
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
