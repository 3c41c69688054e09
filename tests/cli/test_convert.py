"""`lightning-megatron convert` takes a checkpoint directory elsewhere, and back."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron import LanguageModel, MegatronStrategy
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.cli import main
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

CONFIG = TransformerConfig(hidden_size=32, num_layers=2, num_heads=4, tied_embeddings=True)


def _save(path: str) -> None:
    tokens = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(pp=2, num_microbatches=2),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(CONFIG), torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(path)


def test_all_ways_out_of_a_pipelined_checkpoint_agree(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model.ckpt"
    pool.run(2, _save, str(directory))
    assert main(["convert", str(directory), str(tmp_path / "out.safetensors")]) == 0
    assert main(["convert", str(directory), str(tmp_path / "out.ckpt")]) == 0
    for way, source, target in (
        (["--to", "hf"], "model.ckpt", "hub"),
        (["--from-hf"], "hub", "again.ckpt"),
        (["--to", "from-hf", "--pad-vocab-to-multiple", "7"], "hub", "padded.ckpt"),
        (["--to", "hf", "--dtype", "bfloat16", "--like", f"{tmp_path}/hub"], "padded.ckpt", "low"),
    ):
        paths = [str(tmp_path / source), str(tmp_path / target)]
        assert main(["convert", *way, *paths]) == 0, capsys.readouterr().err
    direct = LanguageModel.load_from_checkpoint(directory)
    assert direct.config == CONFIG
    weights = direct.state_dict()
    exported = load_file(tmp_path / "out.safetensors")
    from_file = LanguageModel.load_from_checkpoint(tmp_path / "out.ckpt").state_dict()
    assert weights.keys() == exported.keys() == from_file.keys()
    again = load_full_state_dict(tmp_path / "again.ckpt")
    low = load_file(tmp_path / "low/model-00001-of-00001.safetensors")
    assert again.keys() == weights.keys()
    assert low["model.embed_tokens.weight"].shape == (256, 32)
    assert low["model.norm.weight"].dtype == torch.bfloat16
    assert LanguageModel(str(tmp_path / "padded.ckpt")).config.vocab_padding == 3
    for name, value in weights.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, exported[name])
        assert torch.equal(value, from_file[name])


def test_mistakes_end_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "x.bin")]) == 2
    assert main(["convert", str(tmp_path / "none.ckpt"), str(tmp_path / "x.ckpt")]) == 2
    shown = capsys.readouterr().err
    assert ".safetensors" in shown
    assert "none.ckpt" in shown
    assert main(["convert", "--like", "a", "--overwrite", "a.ckpt", "b.safetensors"]) == 2
    assert "--overwrite, --like: not used for a single file" in capsys.readouterr().err
    assert main(["convert", "--from-hf", str(tmp_path), str(tmp_path / "b.ckpt")]) == 2
    assert "has no config.json" in capsys.readouterr().err
