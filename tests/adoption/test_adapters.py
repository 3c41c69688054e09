"""LoRA on adopted models against LoRA on the unmodified ones in one process."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_megatron import CheckpointConfig, MegatronStrategy, gather
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from tests.adoption.families import FAMILIES
from tests.adoption.harness import KeepDouble, Training, fit, largest_difference

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

LORA: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION},
    "all linear": {"target_modules": "all-linear"},
    "scaled": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "bias": "all"},
    "head": {
        "target_modules": ["k_proj", "lm_head", "embed_tokens"],
        "rank_pattern": {"k_proj": 4},
    },
    "lora bias": {"target_modules": ["v_proj", "gate_proj", "down_proj"], "lora_bias": True},
    "saved": {"target_modules": ["o_proj"], "modules_to_save": ["v_proj", "lm_head", "norm"]},
    "fused": {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    "fused dora": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "use_dora": True},
    "conv dora": {
        "target_modules": ["c_attn", "c_proj"],
        "fan_in_fan_out": True,
        "use_dora": True,
    },
    "two": {"target_modules": ATTENTION, "second": {"target_modules": ["q_proj", "up_proj"]}},
    "dora": {"target_modules": [*ATTENTION, "up_proj", "down_proj"], "use_dora": True},
}

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
    "tp4": (4, {"tp": 4}),
    "cp2": (2, {"cp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
}


def with_lora(model: nn.Module, options: dict[str, Any]) -> peft.PeftModel:
    """Put adapters with random weights on a model."""
    given = {"r": 8, "init_lora_weights": False, **options}
    second = given.pop("second", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**given))
        if second is not None:
            adapted.add_adapter("second", peft.LoraConfig(**{**given, **second}))
            adapted.base_model.set_adapter(["default", "second"])
    return adapted.double()


@functools.cache
def reference(family: str, lora: str) -> dict[str, Tensor]:
    kind = FAMILIES[family]
    module = Training(with_lora(kind.build(), LORA[lora]), kind.batch)
    with KeepDouble():
        fit(module, "auto", 1)
    return module.state_dict()


def job(family: str, lora: str, layout: dict[str, Any], world: int, when: str) -> Any:
    kind = FAMILIES[family]
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    if when == "before":
        model = adopt(with_lora(kind.build(), LORA[lora]))
    else:
        model = with_lora(adopt(kind.build()), LORA[lora])
    module = Training(model, kind.batch, world // others)
    with KeepDouble():
        trainer = fit(module, MegatronStrategy(**layout), world)
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


CASES = [
    ("llama", "all linear", "tp2", "before"),
    ("qwen3", "scaled", "tp2", "after"),
    ("llama", "dora", "tp2 sp", "before"),
    ("llama", "two", "tp2", "after"),
]
"""Beside those that are trained, and saved or merged, below."""
THOROUGH = [
    ("llama", "all linear", "tp2 pp2", "before"),
    ("llama", "attention", "tp2", "before"),
    ("llama", "all linear", "pp2 zero3", "after"),
    ("qwen3", "scaled", "tp4", "after"),
    ("llama", "head", "tp2 pp2", "before"),
    ("llama", "saved", "tp2 pp2", "before"),
    ("gpt2", "fused", "tp2 pp2", "before"),
    ("llama", "attention", "tp2", "after"),
    ("llama", "attention", "pp2", "after"),
    ("qwen3", "all linear", "tp4", "before"),
    ("llama", "head", "tp2", "after"),
    ("llama", "lora bias", "tp2", "after"),
    ("llama", "saved", "tp2", "after"),
    ("llama", "dora", "tp2", "after"),
    ("qwen3", "dora", "tp4", "before"),
    ("llama", "dora", "pp2 zero3", "after"),
    ("llama", "all linear", "tp2 sp", "after"),
    ("llama", "head", "tp2 pp2 sp", "before"),
    ("llama", "all linear", "cp2", "after"),
    ("gpt2", "conv dora", "tp2", "after"),
    ("phi3", "all linear", "tp2", "after"),
    ("phi3", "fused dora", "tp4", "before"),
    ("llama", "two", "pp2 zero3", "before"),
]


@pytest.mark.parametrize(
    ("family", "lora", "layout", "when"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)],
)
def test_adapters_train_as_on_the_unmodified_model(pool, family, lora, layout, when):
    world, options = LAYOUTS[layout]
    found = pool.run(world, job, family, lora, options, world, when)[0]
    assert largest_difference(found, reference(family, lora)) < 1e-9


def saving_job(lora: str, layout: dict[str, Any], world: int, directory: str) -> None:
    kind = FAMILIES["llama"]
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    model = with_lora(adopt(kind.build()), LORA[lora])
    module = Training(model, kind.batch, world // others)
    with KeepDouble():
        fit(module, MegatronStrategy(**layout), world)
    if layout.get("tp", 1) * layout.get("pp", 1) > 1 or torch.distributed.get_rank() == 0:
        model.save_pretrained(directory)


SAVED = [
    ("attention", "pp2 zero3"),
    ("saved", "tp2"),
    ("saved", "tp2 pp2"),
    ("head", "tp2 pp2"),
    ("dora", "tp2"),
    ("scaled", "tp2"),
]


def content(file: Path) -> Any:
    """Content of a file. PEFT writes a set of names as a list, whose order no process shares."""
    if file.suffix != ".json":
        return file.read_text()
    found = json.loads(file.read_text())
    return {**found, "target_modules": sorted(found["target_modules"])}


@pytest.mark.parametrize(
    ("lora", "layout"),
    [pytest.param(*case, marks=[pytest.mark.thorough] * (i > 1)) for i, case in enumerate(SAVED)],
)
def test_save_pretrained_writes_what_one_process_writes(pool, tmp_path, lora, layout):
    world, options = LAYOUTS[layout]
    with KeepDouble():
        expected = with_lora(FAMILIES["llama"].build(), LORA[lora])
        fit(Training(expected, "causal"), "auto", 1)
    expected.save_pretrained(tmp_path / "one")
    pool.run(world, saving_job, lora, options, world, str(tmp_path / "many"))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == names
    for name in names:
        if not name.endswith(".safetensors"):
            one, many = (content(tmp_path / d / name) for d in ("one", "many"))
            assert many == one
    one, many = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("one", "many"))
    assert largest_difference(many, one) < 1e-9
    base = FAMILIES["llama"].build()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "many")
    assert largest_difference(loaded.state_dict(), expected.state_dict()) < 1e-9


def train(module: L.LightningModule, strategy: Any, world: int, epochs: int, path: Any) -> Any:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with KeepDouble():
        trainer.fit(module, ckpt_path=path)
    return trainer


def resuming_job(
    layout: dict[str, Any], world: int, path: str, epochs: int, *, changed: bool = False
) -> Any:
    """Train one epoch and save, or resume and train a second one."""
    model = with_lora(FAMILIES["llama"].build(), LORA["attention"])
    if changed:
        with torch.no_grad():
            model.get_input_embeddings().weight[1] += 1.0
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    module = Training(adopt(model), "causal", world // others)
    strategy = MegatronStrategy(**layout, checkpoint=CheckpointConfig(weights="trainable"))
    trainer = train(module, strategy, world, epochs, path if epochs > 1 else None)
    if epochs == 1:
        trainer.save_checkpoint(path)
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


def test_checkpoints_of_adapters_alone_resume_under_another_layout(pool, tmp_path):
    path = str(tmp_path / "one")
    pool.run(2, resuming_job, {"zero": 3}, 2, path, 1)
    found = pool.run(2, resuming_job, {"pp": 2, "num_microbatches": 2}, 2, path, 2)[0]
    expected = Training(with_lora(FAMILIES["llama"].build(), LORA["attention"]), "causal")
    train(expected, "auto", 1, 2, None)
    assert largest_difference(found, expected.state_dict()) < 1e-9
    stored = CheckpointReader(tmp_path / "one", alone=True).model_names()
    assert set(stored) == {n for n, p in expected.named_parameters() if p.requires_grad}
    with pytest.raises(Exception, match="left out .* weights .* 1 of them differ"):
        pool.run(2, resuming_job, {"tp": 2}, 2, path, 2, changed=True)


def merging_job(family: str, lora: str, layout: dict[str, Any], world: int, directory: str) -> None:
    kind = FAMILIES[family]
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    model = with_lora(adopt(kind.build()), LORA[lora])
    with KeepDouble():
        fit(Training(model, kind.batch, world // others), MegatronStrategy(**layout), world)
    model.merge_and_unload().save_pretrained(directory)


MERGED = [
    ("llama", "head", "pp2"),
    ("gpt2", "fused", "tp2"),
    ("llama", "head", "tp2 pp2"),
    ("llama", "dora", "tp2"),
    ("llama", "all linear", "pp2 zero3"),
]


@pytest.mark.parametrize(
    ("family", "lora", "layout"),
    [pytest.param(*case, marks=[pytest.mark.thorough] * (i > 1)) for i, case in enumerate(MERGED)],
)
def test_merged_models_are_saved_as_one_process_saves_them(pool, tmp_path, family, lora, layout):
    world, options = LAYOUTS[layout]
    expected = with_lora(FAMILIES[family].build(), LORA[lora])
    with KeepDouble():
        fit(Training(expected, "causal"), "auto", 1)
    expected.merge_and_unload().save_pretrained(tmp_path / "one")
    pool.run(world, merging_job, family, lora, options, world, str(tmp_path / "many"))
    one, many = (load_file(tmp_path / d / "model.safetensors") for d in ("one", "many"))
    assert largest_difference(many, one) < 1e-9
