"""`lightning-megatron adopt --show`: the plan of a model, and what each rank holds."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from lightning_megatron import MegatronStrategy, adopt
from lightning_megatron.adoption.propose import propose
from lightning_megatron.cli import main
from tests.adoption import plain_models
from tests.adoption.harness import fit
from tests.adoption.test_plain import Training

OWN = "tests.adoption.plain_models:Own"
EXAMPLE = ("--example", "tests.adoption.plain_models:example")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["adopt", "--show", *args])
    out, err = capsys.readouterr()
    return code, out, err


def llama(folder: Path) -> str:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder)


def test_plan_of_a_directory_of_transformers(capsys, tmp_path):
    code, out, _ = run(capsys, llama(tmp_path), "--tp", "1", "2", "3")
    assert code == 0
    assert out.splitlines()[0] == "LlamaForCausalLM: plan of transformers for llama"
    assert re.search(r"^model\.layers\.\*\.self_attn\.q_proj +colwise +32x32 +4$", out, re.M)
    assert "items of a pipeline: model.embed_tokens, model.layers.*, model.norm, lm_head" in out
    assert re.search(r"^tp=3 +- +-", out, re.M)
    assert "tp=3: model." in out


def test_plan_that_was_found_by_a_run_can_be_given_back(capsys):
    code, out, _ = run(capsys, OWN, *EXAMPLE)
    assert code == 0
    assert out.startswith("Own: proposed by a run on an example\n")
    assert re.search(
        r"^blocks\.\*\.attention\.back +rowwise .* pairs with blocks\.\*\.attention\.ky, .*"
        r" up to tp=4$",
        out,
        re.M,
    )
    assert re.search(r"^blocks\.\*\.mixer +4,224 +its output is read across features$", out, re.M)
    code_of_it = "adopt(" + out.partition("  adopt(")[2]
    model = eval(code_of_it, {"adopt": adopt, "model": plain_models.build("own")})
    plan = propose(plain_models.build("own"), plain_models.example()).plan
    assert list(model.item_names) == list(plan.items)
    split = {name for name, m in model.named_modules() if hasattr(m, "shard_dims")}
    assert split == set(plan.styles)


def test_without_an_example_the_structure_decides(capsys):
    _, out, _ = run(capsys, OWN)
    assert out.startswith("Own: proposed by structure\n")
    assert "attention.qry " not in out.partition("whole on every tp rank")[0]


def held(layout: dict[str, int]) -> int:
    """Number of numbers in the parameters that this rank holds of a model that was traced."""
    model = plain_models.build("own")
    model.example_input_array = plain_models.example()
    module = Training(adopt(model))
    fit(module, MegatronStrategy(**layout, gather_at_end=False), layout["tp"] * layout["pp"])
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("tp", "pp"),
    [(2, 1), (1, 2), *(pytest.param(*d, marks=pytest.mark.thorough) for d in ((1, 1), (2, 2)))],
)
def test_bytes_are_those_that_a_rank_holds(pool, capsys, tp, pp):
    layout = {"tp": tp, "pp": pp}
    ranks = pool.run(tp * pp, held, layout)
    _, out, _ = run(capsys, OWN, *EXAMPLE, "--tp", str(tp), "--pp", str(pp))
    said = re.search(rf"^tp={tp} +(\S+) (\S+)$", out, re.M)
    assert said is not None
    # The class is built in float32.
    counted = 4 * max(ranks) / {"B": 1, "KiB": 1024}[said[2]]
    assert float(said[1]) == pytest.approx(counted, rel=5e-3)


def test_arguments_of_the_class(capsys):
    _, small, _ = run(capsys, "tests.adoption.plain_models:Encoder")
    _, large, _ = run(
        capsys, "tests.adoption.plain_models:Encoder", "--init", "activation=gelu", "bias=False"
    )
    assert "self_attn  multihead_attention" in small
    assert "96x32 96 32x32 32" in small
    assert "96x32 32x32" in large


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["tests.adoption.plain_models:Onw"], "there is no such name"),
        (["nowhere.at_all:Model"], "there is no such name"),
        (["tests.adoption.plain_models:example"], "makes a tuple"),
        (["torch.nn:Linear"], "nearest valid: --init NAME=VALUE"),
        ([OWN, "--init", "7"], "must be NAME=VALUE"),
        (["."], "has no config.json"),
    ],
)
def test_mistakes_are_one_sentence(capsys, args, said):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert said in err


def test_nothing_is_built_of_a_directory(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda x, *_, **__: made.append(x.is_meta))
    run(capsys, llama(tmp_path))
    assert all(made)
