"""Checkpoints of adopted models go on under other layouts, and become directories."""

import filecmp
import os

import lightning as L
import pytest
import torch

from lightning_megatron import MegatronStrategy, adopt, gather
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.cli.convert import convert
from tests.adoption.families import FAMILIES
from tests.adoption.harness import KeepDouble, Training, fit, largest_difference


def trained(family: str, directory: str) -> dict[str, torch.Tensor]:
    """Train under tp, save a checkpoint and a directory, and return the weights."""
    module = Training(adopt(FAMILIES[family].build()), "causal", 2)
    trainer = fit(module, MegatronStrategy(tp=2, zero=3), 4, limit_train_batches=1)
    trainer.save_checkpoint(f"{directory}/run.ckpt")
    module.lm.save_pretrained(f"{directory}/saved")
    return gather(module)


def resumed(family: str, checkpoint: str) -> dict[str, torch.Tensor]:
    """Load a checkpoint under another layout."""
    module = Training(adopt(FAMILIES[family].build()), "causal")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    with KeepDouble():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=MegatronStrategy(pp=2),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, ckpt_path=checkpoint)
    return gather(module)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_checkpoint_goes_everywhere(pool, tmp_path, family):
    weights = pool.run(4, trained, family, str(tmp_path))[0]
    checkpoint = tmp_path / "run.ckpt"
    assert largest_difference(pool.run(2, resumed, family, str(checkpoint))[0], weights) == 0
    plain = Training(FAMILIES[family].build(), "causal")
    plain.load_state_dict(load_full_state_dict(checkpoint))
    assert largest_difference(plain.state_dict(), weights) == 0
    FAMILIES[family].build().save_pretrained(tmp_path / "base")
    convert(
        [str(checkpoint), str(tmp_path / "out"), "--to", "hf", "--like", str(tmp_path / "base")]
    )
    files = sorted(os.listdir(tmp_path / "saved"))
    assert sorted(os.listdir(tmp_path / "out")) == files
    _, *others = filecmp.cmpfiles(tmp_path / "saved", tmp_path / "out", files, shallow=False)
    assert others == [[], []]
