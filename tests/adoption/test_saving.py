"""`save_pretrained` under a layout writes what one process writes, to the byte."""

import filecmp
import os

import pytest
import torch
import transformers

from lightning_megatron import MegatronStrategy, adopt, gather
from lightning_megatron.errors import ConfigError
from lightning_megatron.launch import store_barrier
from tests.adoption.families import FAMILIES
from tests.adoption.harness import Training, fit

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
    "tp2 zero3": (4, {"tp": 2, "zero": 3}),
}


class Saving(Training):
    """Saves its model at the end of training."""

    def __init__(self, model: torch.nn.Module, directory: str, copies: int, ranks: str) -> None:
        super().__init__(model, "causal", copies)
        self._directory = directory
        self._ranks = ranks

    def on_train_end(self) -> None:
        if self._ranks == "all" or self.trainer.is_global_zero:
            self.lm.save_pretrained(self._directory, max_shard_size="30KB")


def saved(family: str, layout: dict[str, int], world: int, directory: str) -> None:
    """Train, and save in a hook, after the run, and what `gather` gives."""
    copies = world // (layout.get("tp", 1) * layout.get("pp", 1))
    model = adopt(FAMILIES[family].build())
    module = Saving(model, f"{directory}/hook", copies, "all")
    fit(module, MegatronStrategy(**layout), world, limit_train_batches=1)
    whole = gather(module)
    model.save_pretrained(f"{directory}/after", max_shard_size="30KB")
    if int(os.environ.get("RANK", module.global_rank)) == 0:
        plain = FAMILIES[family].build()
        plain.load_state_dict({n.removeprefix("lm."): v for n, v in whole.items()})
        plain.save_pretrained(f"{directory}/one", max_shard_size="30KB")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp2"),
        ("qwen3", "pp2"),
        ("gpt2", "tp2"),
        ("phi3", "tp2 zero3"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ("llama", "tp2"),
                ("gpt2", "tp2 pp2"),
                ("qwen3", "tp2 pp2"),
                ("qwen3", "pp2 zero3"),
                ("phi3", "tp2"),
                ("mixtral", "tp2"),
            ]
        ),
    ],
)
def test_directory_is_that_of_one_process(pool, tmp_path, family, layout):
    world, options = LAYOUTS[layout]
    pool.run(world, saved, family, options, world, str(tmp_path))
    files = sorted(os.listdir(tmp_path / "one"))
    assert len(files) > 3
    for place in ("hook", "after"):
        assert sorted(os.listdir(tmp_path / place)) == files
        same, *others = filecmp.cmpfiles(tmp_path / place, tmp_path / "one", files, shallow=False)
        assert others == [[], []]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hook")


def saved_by_one(directory: str) -> None:
    store_barrier.PATIENCE_S = 1.0
    module = Saving(adopt(FAMILIES["llama"].build()), directory, 1, "first")
    fit(module, MegatronStrategy(tp=2), 2, limit_train_batches=1)


def test_call_on_one_rank_alone_is_refused(pool, tmp_path):
    with pytest.raises(Exception, match="called on ranks 0 of 2 alone"):
        pool.run(2, saved_by_one, str(tmp_path))


def saved_by_one_of_two_runs(directory: str) -> list[str]:
    """Messages of saves by one rank, after which all save."""
    found = []
    for _ in range(2):
        module = Saving(adopt(FAMILIES["llama"].build()), directory, 1, "all")
        strategy = MegatronStrategy(tp=2, gather_at_end=False)
        trainer = fit(module, strategy, 2, limit_train_batches=1)
        store_barrier.PATIENCE_S = 1.0
        if trainer.is_global_zero:
            try:
                module.lm.save_pretrained(directory)
            except ConfigError as error:
                found.append(str(error))
        torch.distributed.barrier()
        store_barrier.PATIENCE_S = 60.0
        module.lm.save_pretrained(directory)
    return found


def test_call_on_one_rank_alone_is_refused_in_each_run_and_the_next_call_saves(pool, tmp_path):
    found = pool.run(2, saved_by_one_of_two_runs, str(tmp_path))[0]
    assert ["called on ranks 0 of 2 alone" in each for each in found] == [True, True]


def inner_saved(directory: str) -> None:
    model = adopt(FAMILIES["llama"].build())
    strategy = MegatronStrategy(tp=2, gather_at_end=False)
    fit(Training(model, "causal"), strategy, 2, limit_train_batches=1)
    with pytest.raises(ConfigError, match="distributed_checkpoint=False"):
        model.save_pretrained(directory, distributed_checkpoint=True)
    model.model.save_pretrained(directory)


def test_model_inside_of_the_model_is_saved_whole(pool, tmp_path):
    pool.run(2, inner_saved, str(tmp_path))
    found = transformers.LlamaModel.from_pretrained(tmp_path)
    assert found.embed_tokens.weight.shape == (64, 32)
    assert found.layers[0].self_attn.q_proj.weight.shape == (32, 32)


def test_model_that_was_opened_and_not_trained_is_saved_as_it_was(tmp_path):
    FAMILIES["qwen3"].build().save_pretrained(tmp_path / "one")
    adopt(tmp_path / "one").save_pretrained(tmp_path / "two")
    for file in os.listdir(tmp_path / "one"):
        assert filecmp.cmp(tmp_path / "one" / file, tmp_path / "two" / file, shallow=False), file
