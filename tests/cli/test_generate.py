"""`lightning-megatron generate` continues a text."""

import pytest
import torch

from lightning_megatron import LanguageModel
from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.cli import main
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.generation import generate


@pytest.fixture
def saved(tmp_path):
    def save(**fields):
        torch.manual_seed(0)
        config = TransformerConfig(
            hidden_size=32, num_layers=1, num_heads=4, init_std=0.5, tied_embeddings=True, **fields
        )
        module = LanguageModel(config)
        module.configure_model()
        state = {"hyper_parameters": dict(module.hparams)}
        save_directory(tmp_path / "a.ckpt", model_chunks(module), state)
        return str(tmp_path / "a.ckpt"), module

    return save


def test_bytes(saved, capsys):
    path, module = saved()
    assert main(["generate", path, "--prompt", "Zoë", "--max-new-tokens", "9"]) == 0
    expected = generate(module, torch.tensor([list("Zoë".encode())]), 9)[0].tolist()
    assert capsys.readouterr().out == bytes(expected).decode(errors="replace") + "\n"
    drawn = []
    for seed in ("1", "1", "2"):
        options = ["--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", seed]
        assert main(["generate", path, "--prompt", "a", *options]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_tokenizer(saved, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    path, _ = saved(vocab_padding=253)
    words = {"<end>": 0, "one": 1, "two": 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    fast.save_pretrained(tmp_path / "hub")
    command = ["generate", path, "--prompt", "one two", "--max-new-tokens", "4"]
    assert main([*command, "--tokenizer", str(tmp_path / "hub")]) == 0
    found = capsys.readouterr().out.split()
    assert found[:2] == ["one", "two"]
    assert set(found) <= {"one", "two"}
    assert main(command) == 2
    assert "3 tokens, which are not bytes; nearest valid: --tokenizer" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(tmp_path / "none")]) == 2


def test_mistakes_end_with_a_message(saved, tmp_path, capsys):
    path, _ = saved()
    assert main(["generate", str(tmp_path / "b.ckpt"), "--prompt", "a"]) == 2
    assert "no such checkpoint" in capsys.readouterr().err
    assert main(["generate", path, "--prompt", ""]) == 2
    assert main(["generate", path, "--prompt", "a", "--top-p", "0.5"]) == 2
    assert "nothing is drawn" in capsys.readouterr().err
