"""Model directories of the Hugging Face library, into checkpoints and out of them again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_megatron import (
    LanguageModel,
    MegatronStrategy,
    ShardingConfig,
    export_hugging_face,
    import_hugging_face,
)
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.offline.huggingface import export_model as hf_export
from lightning_megatron.checkpoint.offline.huggingface.directory import HuggingFaceDirectory
from lightning_megatron.checkpoint.offline.huggingface.safetensors_file import (
    TensorInfo,
    write_safetensors,
)
from lightning_megatron.checkpoint.offline.huggingface.transformer import (
    load_transformer,
    stored_config,
)
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.generation import generate
from lightning_megatron.models.hf_config import config_to_hugging_face
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.models.weights import weights_of
from tests.models.hub_models import (
    MODELS,
    VOCABULARY,
    hub_model,
    logits_of,
    some_tokens,
    use_full_precision,
)
from tests.parity.jobs import quiet_trainer

transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path):
    """Saves one of the models as the library does, in several files."""

    def save(name):
        hub_model(name).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
        return tmp_path / "theirs"

    return save


def shards(directory):
    """The files with the weights."""
    return sorted(directory.glob("*.safetensors"))


def stored_tensors(directory):
    """All tensors of a model directory."""
    return {n: value for file in shards(directory) for n, value in load_file(file).items()}


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
    logits = logits_of(use_full_precision(again.eval()), some_tokens())
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3, tied"])
def test_an_export_writes_the_same_text_as_the_library(name, saved, tmp_path):
    import_hugging_face(saved(name), tmp_path / "a.ckpt", pad_vocab_to_multiple=8)
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", model_type=None)
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float64, local_files_only=True
    )
    prompt = some_tokens()[:, :5]
    theirs = exported.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(load_transformer(tmp_path / "a.ckpt"), prompt, 20), theirs)


def test_like_takes_over_tokenizer_and_special_tokens(saved, tmp_path):
    theirs = saved("mistral")
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "pytorch_model.bin").write_text("no")
    config = json.loads((theirs / "config.json").read_text()) | {"eos_token_id": 7}
    (theirs / "config.json").write_text(json.dumps(config))
    import_hugging_face(theirs, tmp_path / "a.ckpt")
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "plain")
    assert json.loads((tmp_path / "plain/config.json").read_text())["model_type"] == "llama"
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", like=theirs)
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert (back["model_type"], back["eos_token_id"]) == ("mistral", 7)
    assert (tmp_path / "back/tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "back/pytorch_model.bin").exists()


def test_modules_that_predict_a_second_token_are_left_out(saved, tmp_path, caplog):
    theirs = saved("deepseek_v3")
    state = stored_tensors(theirs)
    further = {
        name.replace("layers.1.", "layers.2."): value
        for name, value in state.items()
        if "layers.1." in name
    }
    rewrite(theirs, lambda state: state.update(further))
    edit_json(theirs / "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    config = import_hugging_face(theirs, tmp_path / "a.ckpt")
    assert config.num_layers == 2
    assert f"{len(further)} tensors of model.layers.2 are left out" in caplog.text
    edit_json(theirs / "config.json", lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(ConfigError, match="model.layers.2.*: not the name of a weight"):
        import_hugging_face(theirs, tmp_path / "b.ckpt")


def test_a_bias_of_the_choice_keeps_its_format(saved, tmp_path):
    import_hugging_face(saved("deepseek_v3"), tmp_path / "a.ckpt", dtype=torch.bfloat16)
    state = load_full_state_dict(tmp_path / "a.ckpt")
    bias = state.pop("trunk.layers.1.mlp.router.bias")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert bias.dtype == torch.float64  # that of the file
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", dtype=torch.float16)
    back = stored_tensors(tmp_path / "back")
    assert back["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float64
    assert back["model.layers.1.mlp.gate.weight"].dtype == torch.float16


def edit_json(file, change):
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def rewrite(directory, change):
    """Replace the weights by one file of changed ones."""
    state = stored_tensors(directory)
    change(state)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(state, directory / "model.safetensors")


def only_pickles(directory):
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    (directory / "pytorch_model-00001-of-00001.bin").write_bytes(b"cos\nsystem\n")


INDEX = "model.safetensors.index.json"
FAULTS = {
    "family": (lambda d: edit_json(d / "config.json", lambda c: c.update(model_type="x")), "=x"),
    "pickle": (only_pickles, "never read; nearest valid: .*save_pretrained"),
    "outside": (
        lambda d: edit_json(
            d / INDEX, lambda i: i["weight_map"].update({"lm_head.weight": "../../x.safetensors"})
        ),
        "'../../x.safetensors' is not the name",
    ),
    "no pickle by the index": (
        lambda d: edit_json(d / INDEX, lambda i: i["weight_map"].update({"lm_head.weight": "x"})),
        "'x' is not the name",
    ),
    "lost file": (lambda d: shards(d)[1].unlink(), "model-00002-of.* cannot be read"),
    "wrong place": (
        lambda d: edit_json(
            d / INDEX,
            lambda i: i["weight_map"].update(
                {"lm_head.weight": i["weight_map"]["model.embed_tokens.weight"]}
            ),
        ),
        "lm_head.weight: .* says that it is in model-00001",
    ),
    "no index": (lambda d: edit_json(d / INDEX, lambda i: i.pop("weight_map")), "no weight_map"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "torn file": (
        lambda d: shards(d)[0].write_bytes(b"\xff" * 64),
        "not a safetensors file",
    ),
    "quantised": (
        lambda d: rewrite(
            d, lambda s: s.update({"lm_head.weight": s["lm_head.weight"].to(torch.int8)})
        ),
        "lm_head.weight: torch.int8: quantised",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_imported_is_refused(name, saved, tmp_path):
    theirs = saved("llama")
    assert len(shards(theirs)) > 4
    spoil, words = FAULTS[name]
    spoil(theirs)
    with pytest.raises(ConfigError, match=words):
        import_hugging_face(theirs, tmp_path / "a.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]


def test_everything_wrong_with_the_weights_is_named_at_once(saved, tmp_path):
    theirs = saved("llama")

    def change(state):
        del state["model.norm.weight"]
        state["lm_head.weight"] = torch.ones(2, 3)
        state["model.layers.0.router.weight"] = torch.ones(1)

    rewrite(theirs, change)
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(ConfigError) as error:
        import_hugging_face(theirs, tmp_path / "a.ckpt")
    assert [p.split(":")[0].split(" exists")[0] for p in error.value.problems] == [
        str(tmp_path / "a.ckpt"),
        "model.norm.weight",
        "model.layers.0.router.weight",
        "lm_head.weight",
    ]
    with pytest.raises(ConfigError, match="hf download org/name --local-dir DIR"):
        import_hugging_face("org/name", tmp_path / "b.ckpt")


def test_nothing_is_replaced_unasked(saved, tmp_path):
    theirs = saved("llama")
    checkpoint, back = tmp_path / "a.ckpt", tmp_path / "back"
    for _ in range(2):
        import_hugging_face(theirs, checkpoint, overwrite=True)
        export_hugging_face(checkpoint, back, overwrite=True)
    with pytest.raises(ConfigError, match=r"a\.ckpt exists; .*overwrite=True"):
        import_hugging_face(theirs, checkpoint, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"back exists; .*overwrite=True"):
        export_hugging_face(checkpoint, back)
    with pytest.raises(ConfigError, match="is no checkpoint: it is not overwritten"):
        import_hugging_face(theirs, theirs, overwrite=True)
    with pytest.raises(ConfigError, match="is no model directory: it is not overwritten"):
        export_hugging_face(checkpoint, checkpoint, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "back", "theirs"]


def import_in_a_run(theirs, path, dtype=None):
    """What a training script does in every process, and when the checkpoint was written."""
    import_hugging_face(theirs, path, dtype=dtype, overwrite=dtype is not None)
    trainer = quiet_trainer(MegatronStrategy(), max_steps=0, precision="32-true")
    model = LanguageModel(path)
    trainer.fit(model, DataLoader(torch.zeros(2, 4, dtype=torch.int64)), ckpt_path=path)
    return (Path(path) / "manifest.json").stat().st_mtime_ns


def test_a_script_imports_once_however_many_processes_run_it(saved, tmp_path, pool):
    theirs, path = saved("llama"), tmp_path / "runs/a.ckpt"
    ((first, other), (again, _)) = (
        pool.run(2, import_in_a_run, str(theirs), str(path)) for _ in range(2)
    )
    assert first == other == again
    assert pool.run(2, import_in_a_run, str(theirs), str(path), torch.bfloat16)[0] > first
    shard = shards(theirs)[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ConfigError, match="exists"):
        import_hugging_face(theirs, path, dtype=torch.bfloat16)


def test_an_import_that_another_process_is_about_to_publish_is_not_there_yet(saved, tmp_path):
    """Complete, but under its hidden name: whoever opens the path would find nothing."""
    theirs, path = saved("llama"), tmp_path / "a.ckpt"
    import_hugging_face(theirs, path)
    path.rename(tmp_path / ".a.ckpt.tmp-0123456789ab")
    import_hugging_face(theirs, path)
    assert (path / "manifest.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "theirs"]


@pytest.mark.parametrize("failing", ["write_safetensors", "write_durably"])
def test_an_export_that_fails_leaves_nothing(failing, saved, tmp_path, monkeypatch):
    import_hugging_face(saved("llama"), tmp_path / "a.ckpt")
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return whole(*args)

    whole = getattr(hf_export, failing)
    monkeypatch.setattr(hf_export, failing, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", max_shard_bytes=20_000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "theirs"]


def test_an_import_that_is_interrupted_leaves_nothing(saved, tmp_path, monkeypatch):
    theirs = saved("llama")
    reads = []

    def interrupt(self, name):
        reads.append(name)
        if len(reads) == 9:
            raise KeyboardInterrupt
        return read(self, name)

    read = HuggingFaceDirectory.read
    monkeypatch.setattr(HuggingFaceDirectory, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        import_hugging_face(theirs, tmp_path / "a.ckpt", max_shard_bytes=20_000)
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]


def test_another_checkpoint_than_the_sizes_say(saved, tmp_path):
    import_hugging_face(saved("llama"), tmp_path / "a.ckpt")
    other = TransformerConfig(
        vocab_size=36, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, mlp_size=48
    )
    with pytest.raises(ConfigError) as error:
        export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", config=other)
    assert any("the checkpoint does not have" in p for p in error.value.problems)
    assert any("shape (37, 32) in the checkpoint" in p for p in error.value.problems)
    assert not (tmp_path / "back").exists()


def peak_memory():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_model_is_never_in_memory_as_a_whole(tmp_path):
    """160 MiB of weights, of which the largest has 2 MiB, in both directions."""
    shape = TransformerConfig(
        vocab_size=64, hidden_size=512, num_layers=16, num_heads=8, mlp_size=1024
    )
    weights = weights_of(shape, "llama")
    infos = {w.name: TensorInfo(dtype=torch.float32, shape=w.shape) for w in weights}
    total = sum(info.size for info in infos.values())
    assert total > 150 << 20
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_safetensors(theirs / "model.safetensors", infos, lambda n: torch.randn(infos[n].shape))
    (theirs / "config.json").write_text(json.dumps(config_to_hugging_face(shape, "llama")))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    import_hugging_face(theirs, tmp_path / "a.ckpt", max_shard_bytes=8 << 20)
    export_hugging_face(tmp_path / "a.ckpt", tmp_path / "back", max_shard_bytes=32 << 20)
    assert peak_memory() - before < 40 << 20
    found = stored_tensors(tmp_path / "back")
    assert all(torch.equal(v, found[n]) for n, v in load_file(theirs / "model.safetensors").items())


def _train_from(path, labels, ep, layouts):
    """Two steps from the imported weights under two layouts; first losses and weights."""
    found = []
    for options in layouts:
        module = LanguageModel(str(path), lr=1e-2)
        losses = []
        texts = []

        def look(batch, batch_idx, module=module, texts=texts):
            texts.append(generate(module, batch[0][:, :3], 6))

        module.validation_step = look
        module.on_train_batch_end = lambda out, *_, losses=losses: losses.append(out["loss"].item())
        strategy = MegatronStrategy(**options, ep=ep)
        trainer = quiet_trainer(
            strategy,
            max_steps=2,
            max_epochs=None,
            val_check_interval=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
        )
        data = DataLoader([(labels, labels.roll(1, 0))] * 4, batch_size=None)
        looked_at = data if "zero" in options else None
        trainer.fit(module, data, looked_at, ckpt_path=str(path))
        trainer.save_checkpoint(f"{path.parent}/{len(found)}.ckpt")
        found.append((losses, trainer.global_step, texts))
    return found


PP = {"pp": 2, "num_microbatches": 2}
ZERO = {"zero": ShardingConfig(stage=3, min_numel=1)}
OF_FOUR = [{"tp": 2, **PP}, {"zero": ShardingConfig(stage=3, min_numel=1, dp_replicate=2)}]


@pytest.mark.parametrize(
    ("name", "ranks", "ep", "layouts"),
    [
        ("qwen3, tied", 2, 1, [PP, ZERO]),
        ("deepseek_v3", 2, 2, [{"tp": 2}, ZERO]),
        pytest.param("qwen3, tied", 4, 1, OF_FOUR, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", 4, 2, OF_FOUR, marks=pytest.mark.thorough),
    ],
)
def test_training_starts_from_the_weights_under_any_layout(
    pool, saved, tmp_path, name, ranks, ep, layouts
):
    path = tmp_path / "a.ckpt"
    import_hugging_face(saved(name), path, pad_vocab_to_multiple=8)
    tokens = some_tokens()
    logits = logits_of(hub_model(name), tokens)
    expected = cross_entropy(logits.flatten(0, 1), tokens.roll(1, 0).flatten()).item()
    for by_layout in pool.run(ranks, _train_from, path, tokens, ep, layouts):
        (first, steps, _), (second, again, texts) = by_layout
        assert first[0] == pytest.approx(expected, rel=1e-10)
        assert first == pytest.approx(second, rel=1e-10)
        assert first[1] < first[0]
        assert steps == again == 2
        trained = load_transformer(tmp_path / "1.ckpt")
        assert torch.equal(texts[1], generate(trained, tokens[:, :3], 6))
    assert stored_config(tmp_path / "0.ckpt").vocab_padding == 3
    kind = hub_model(name).config.model_type
    export_hugging_face(tmp_path / "0.ckpt", tmp_path / "split", model_type=kind)
    export_hugging_face(tmp_path / "1.ckpt", tmp_path / "zero", model_type=kind)
    one, other = stored_tensors(tmp_path / "split"), stored_tensors(tmp_path / "zero")
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert one["model.embed_tokens.weight"].shape[0] == VOCABULARY
