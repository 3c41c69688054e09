"""Model directories of the Hugging Face library, into checkpoints and out of them again."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron import export_hugging_face, import_hugging_face
from lightning_megatron.checkpoint.export import load_full_state_dict
from lightning_megatron.checkpoint.transformer import stored_config
from lightning_megatron.models.transformer import Transformer
from tests.models.hub_models import (
    MODELS,
    VOCABULARY,
    hub_model,
    logits_of,
    some_tokens,
    use_norms_in_full_precision,
)

transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path):
    """Saves one of the models as the library does, in several files."""

    def save(name):
        hub_model(name).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
        return tmp_path / "theirs"

    return save


def stored_tensors(directory):
    """All tensors of a model directory."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, saved, tmp_path):
    theirs = saved(name)
    config = import_hugging_face(
        theirs, tmp_path / "a.ckpt", pad_vocab_to_multiple=4, max_shard_bytes=10_000
    )
    assert stored_config(tmp_path / "a.ckpt") == config
    ours = Transformer(config).double().eval()
    ours.load_state_dict(load_full_state_dict(tmp_path / "a.ckpt"))
    expected = logits_of(hub_model(name), some_tokens())
    with torch.no_grad():
        found = ours(some_tokens())[..., :VOCABULARY]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", like=theirs, max_shard_bytes=20_000)
    before, after = stored_tensors(theirs), stored_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[n]) for n, value in before.items())
    sizes = [file.stat().st_size for file in (tmp_path / "back").glob("*.safetensors")]
    assert len(sizes) > 4
    assert max(sizes) < 35_000  # a tensor of GPT-2 is larger than the limit
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float64, local_files_only=True
    )
    assert type(again) is type(hub_model(name))
    logits = logits_of(use_norms_in_full_precision(again.eval()), some_tokens())
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_files_are_those_of_the_library(saved, tmp_path):
    theirs = saved("llama")
    import_hugging_face(theirs, tmp_path / "a.ckpt", dtype=torch.bfloat16)
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back")
    (file,) = (tmp_path / "back").glob("*.safetensors")
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    state = load_file(file)
    assert index["weight_map"] == dict.fromkeys(state, file.name)
    assert index["metadata"]["total_size"] == sum(2 * v.numel() for v in state.values())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["torch_dtype"], config["eos_token_id"]) == ("bfloat16", None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "back", "theirs"]
