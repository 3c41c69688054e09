"""Copies of adopted models, in memory and in files."""

import copy
import pickle

import pytest
import torch
import transformers

from lightning_megatron import MegatronStrategy, adopt
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.errors import ConfigError
from tests.adoption.families import FAMILIES
from tests.adoption.harness import Training, fit

TOKENS = torch.arange(12).view(1, -1)


class Copying(Training):
    """Copies its model when training starts, and compares and saves the copy at its end.

    Args:
        directory: where the copy is saved.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(adopt(FAMILIES["llama"].build()), "causal")
        self._directory = directory

    @torch.no_grad()
    def on_train_start(self) -> None:
        teacher = copy.deepcopy(self.lm)
        self.kept = [teacher]  # no submodule
        self.before = self.lm(TOKENS).logits
        assert torch.equal(teacher(TOKENS).logits, self.before)

    @torch.no_grad()
    def on_train_end(self) -> None:
        (teacher,) = self.kept
        assert torch.equal(teacher(TOKENS).logits, self.before)
        assert not torch.equal(self.lm(TOKENS).logits, self.before)
        if self.trainer.is_global_zero:
            teacher.save_pretrained(self._directory)


def copied(layout: dict[str, int], directory: str) -> None:
    """Train with a teacher that is a copy."""
    fit(Copying(directory), MegatronStrategy(**layout), 2, limit_train_batches=1)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_copy_in_a_run_has_its_own_weights(pool, tmp_path, zero):
    pool.run(2, copied, {"zero": zero}, str(tmp_path))
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    start = FAMILIES["llama"].build()
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, start.get_parameter(name)), name


def refused(layout: dict[str, int], directory: str) -> None:
    """Copy a model that is split."""
    with pytest.raises(ConfigError, match="each rank holds a part"):
        fit(Copying(directory), MegatronStrategy(**layout), 2)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_copy_of_a_part_is_refused(pool, tmp_path, layout):
    pool.run(2, refused, layout, str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pickled_model_is_adopted_and_computes_the_same(family):
    model = adopt(FAMILIES[family].build()).eval()
    found = pickle.loads(pickle.dumps(model))
    assert type(found) is type(model)
    assert any(isinstance(m, AdoptedTrunk) for m in found.modules())
    assert torch.equal(found(TOKENS).logits, model(TOKENS).logits)
