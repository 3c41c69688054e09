"""`adopt("directory")` reads what one process would read, and of it what a rank keeps."""

import json

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy, adopt, gather
from lightning_megatron.adoption.directory import StoredPart
from lightning_megatron.build.stored_tensor import StoredTensor
from lightning_megatron.errors import ConfigError
from tests.adoption.families import FAMILIES
from tests.adoption.harness import KeepDouble, Training, fit, largest_difference, reference

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "zero3": (2, {"zero": 3}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 zero3": (4, {"tp": 2, "zero": 3}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories of the unmodified models, in several files."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3", "gpt2", "phi3", "mixtral"):
        FAMILIES[family].build().save_pretrained(root / family, max_shard_size="30KB")
    return root


class InHook(Training):
    """Opens its directory in ``configure_model``."""

    def __init__(self, directory: str, copies: int) -> None:
        super().__init__(nn.Identity(), "causal", copies)
        self._directory = directory

    def configure_model(self) -> None:
        if isinstance(self.lm, nn.Identity):
            self.lm = adopt(self._directory).double()  # and its rotary table


def trained(directory: str, layout: dict[str, int], world: int, hook: bool) -> dict[str, Tensor]:
    """Weights after training the model of a directory on a layout."""
    copies = world // (layout.get("tp", 1) * layout.get("pp", 1))
    if hook:
        module = InHook(directory, copies)
    else:
        module = Training(adopt(directory).double(), "causal", copies)
    with KeepDouble():
        fit(module, MegatronStrategy(**layout), world)
    return gather(module)


@pytest.mark.parametrize(
    ("family", "layout", "hook"),
    [
        ("llama", "one", True),
        ("qwen3", "pp2", True),
        ("gpt2", "tp2", True),
        ("phi3", "zero3", False),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ("llama", "tp2", False),
                ("gpt2", "tp2 zero3", True),
                ("phi3", "tp2", False),
                ("qwen3", "tp2 pp2", True),
                ("llama", "pp2 zero3", True),
                ("qwen3", "pp2 zero3", False),
                ("phi3", "tp2 pp2", False),
                ("mixtral", "tp2", True),
            ]
        ),
    ],
)
def test_model_of_a_directory_trains_as_the_unmodified_one(pool, directories, family, layout, hook):
    world, options = LAYOUTS[layout]
    found = pool.run(world, trained, str(directories / family), options, world, hook)[0]
    assert largest_difference(found, reference(family)) < 1e-9


def test_parameters_are_those_of_from_pretrained(directories):
    path = directories / "qwen3"
    found, plain = adopt(path), transformers.Qwen3ForCausalLM.from_pretrained(path)
    assert type(found).__name__ == "Qwen3ForCausalLM"
    assert found.config.to_dict() == plain.config.to_dict()
    assert found.training == plain.training
    expected = dict(plain.named_parameters())
    for name, parameter in found.named_parameters():
        assert isinstance(parameter, StoredTensor)
        assert torch.equal(parameter.read(), expected.pop(name))
    assert not expected
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_dtype_and_attention_are_those_that_are_given(directories):
    found = adopt(directories / "llama", dtype=torch.bfloat16, attn_implementation="eager")
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert found.config._attn_implementation == "eager"


def test_class_may_be_an_auto_class(directories):
    kind = transformers.AutoModelForSequenceClassification
    found = adopt(directories / "llama", model_class=kind, num_labels=3)
    assert type(found).__name__ == "LlamaForSequenceClassification"
    assert found.score.weight.shape == (3, 32)
    assert not isinstance(found.score.weight, StoredTensor)  # new, so drawn


def test_expert_is_read_alone(directories, monkeypatch):
    found = adopt(directories / "mixtral")
    experts = found.model.layers[0].mlp.experts
    sizes = []
    read = StoredPart.read

    def counted(part, window):
        out = read(part, window)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(StoredPart, "read", counted)
    one = experts.gate_up_proj.detach()[1:2].read()
    assert sum(sizes) == one.numel() > 0
    plain = transformers.MixtralForCausalLM.from_pretrained(directories / "mixtral")
    assert torch.equal(one[0], plain.model.layers[0].mlp.experts.gate_up_proj[1])


def test_writing_to_a_weight_that_is_not_read_yet_is_refused(directories):
    found = adopt(directories / "llama")
    with torch.no_grad(), pytest.raises(ConfigError, match="from_pretrained"):
        found.lm_head.weight.mul_(2)


def test_model_that_no_strategy_has_divided_computes_as_from_pretrained(directories):
    found = adopt(directories / "llama")
    plain = transformers.LlamaForCausalLM.from_pretrained(directories / "llama")
    tokens = torch.arange(12).view(1, -1)
    assert torch.allclose(found(tokens).logits, plain(tokens).logits, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "model.safetensors.index.json").unlink(), "neither"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), "adapters"),
        (lambda d: _edit(d, quantization_config={"quant_method": "gptq"}), "gptq"),
        (lambda d: _edit(d, architectures=["Unheard"]), "Unheard"),
    ],
)
def test_directory_that_is_no_model_is_refused(tmp_path, change, words):
    FAMILIES["llama"].build().save_pretrained(tmp_path, max_shard_size="30KB")
    change(tmp_path)
    with pytest.raises(ConfigError, match=words):
        adopt(tmp_path)


def test_single_file_is_preferred_to_an_index_beside_it(tmp_path):
    FAMILIES["llama"].build().save_pretrained(tmp_path, max_shard_size="30KB")
    new = _doubled("llama")
    new.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(plain.lm_head.weight, new.lm_head.weight)
    assert torch.equal(adopt(tmp_path).lm_head.weight.read(), new.lm_head.weight)


def test_subfolder_holds_configuration_and_weights(tmp_path):
    FAMILIES["llama"].build().save_pretrained(tmp_path)
    inner = _doubled("llama")
    inner.save_pretrained(tmp_path / "inner")
    found = adopt(tmp_path, subfolder="inner")
    assert torch.equal(found.lm_head.weight.read(), inner.lm_head.weight)
    with pytest.raises(ConfigError, match="none"):
        adopt(tmp_path, subfolder="none")


@pytest.mark.parametrize(
    "option",
    [
        {"revision": "v2"},
        {"code_revision": "v2"},
        {"gguf_file": "model.gguf"},
        {"cache_dir": "elsewhere"},
        {"token": True},
        {"variant": "fp16"},
        {"_configuration_file": "other.json"},
    ],
)
def test_option_that_would_change_nothing_is_refused(directories, option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        adopt(directories / "llama", **option)


def _doubled(family):
    model = FAMILIES[family].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def _edit(directory, **values):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
