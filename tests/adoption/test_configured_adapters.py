"""Adapters of models that ``configure_model`` builds on the meta device."""

from typing import Any

import lightning as L
import peft
import pytest
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from lightning_megatron import MegatronStrategy, adopt, gather
from tests.adoption.families import FAMILIES
from tests.adoption.harness import KeepDouble, Training, fit, largest_difference


class Configured(Training):
    """Training of a model with adapters.

    Args:
        by: whose function adds the adapters: PEFT's, or the model's own.
    """

    def __init__(self, by: str) -> None:
        super().__init__(None, "causal")  # type: ignore[arg-type]
        self._by = by

    def configure_model(self) -> None:
        if self.lm is None:
            model = adopt(FAMILIES["llama"].build())
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"])
            if self._by == "model":
                model.add_adapter(config)
            self.lm = model if self._by == "model" else peft.get_peft_model(model, config)
            self.lm.double()


def job(by: str, layout: dict[str, Any], world: int) -> Any:
    L.seed_everything(1)
    module = Configured(by)
    with KeepDouble():
        trainer = fit(module, MegatronStrategy(**layout), world)
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


def refusal() -> str:
    """What transformers says of the installed PEFT before a model adds adapters; mostly nothing."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "by",
    [
        pytest.param("model", marks=pytest.mark.skipif(bool(refusal()), reason=refusal())),
        pytest.param("peft", marks=pytest.mark.thorough),
    ],
)
def test_adapters_begin_and_train_alike_under_tp(pool, by):
    one = pool.run(1, job, by, {}, 1)[0]
    two = pool.run(2, job, by, {"tp": 2}, 2)[0]
    assert len([n for n, v in one.items() if "lora_B" in n and v.abs().max() > 0]) == 6
    assert largest_difference(two, one) < 1e-9
