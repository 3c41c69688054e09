"""Evaluation, prediction and generation of a run that splits sequences are those of one process."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ActivationConfig, MegatronStrategy, PipelineConfig, generate
from lightning_megatron.layers import whole
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.testing import WorkerPool
from tests.parity import reference
from tests.parity.jobs import quiet_trainer, transformer_config


def needs_a_step(options: Any) -> bool:
    """Whether parameters are there in steps only."""
    return bool(options.zero.stage == 3 and options.pp.degree == 1)


class Looking(L.LightningModule):
    """Validates, predicts and writes texts of several lengths while it trains."""

    def __init__(self, *, even: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Transformer(transformer_config("llama")).double()
        self.loss = VocabParallelCrossEntropy(ignore_index=reference.IGNORED)
        self.even = even
        self.texts: list[Tensor] = []

    def batches(self, *lengths: int) -> Any:
        draw = torch.Generator().manual_seed(2)
        texts = [torch.randint(reference.VOCABULARY, (4, n), generator=draw) for n in lengths]
        if self.even:  # without their last token
            texts = [text[:, : text.shape[1] // 2 * 2 - 1] for text in texts]
        return DataLoader(texts, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self.batches(13, 8)

    def val_dataloader(self) -> Any:
        return self.batches(9, 14)

    def predict_dataloader(self) -> Any:
        return self.batches(11)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(self.model(batch[:, :-1]), batch[:, 1:])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(self.model(batch[:, :-1]), batch[:, 1:]), sync_dist=True)
        self.texts.append(generate(self.model, batch[:, :3], 3))

    def on_validation_epoch_end(self) -> None:
        if not needs_a_step(self.trainer.strategy.options):
            prompt = torch.zeros(1, 2, dtype=torch.long)
            self.texts += [generate(self.model, prompt, 3), whole(self.model(prompt).argmax(-1))]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found: Tensor = self.model(batch[:, :-1])
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def looking_job(
    options: Mapping[str, Any], even: bool
) -> tuple[float, list[Tensor], list[Tensor], Tensor]:
    """Loss of the validation, texts of both kinds, and logits of the prediction."""
    L.seed_everything(1, verbose=False)
    module = Looking(even=even)
    trainer = quiet_trainer(MegatronStrategy(**options), num_sanity_val_steps=0)
    trainer.fit(module)
    value = float(trainer.callback_metrics["val"])
    [logits] = trainer.predict(module)
    assert type(logits) is Tensor, "whole, and nothing but a tensor: it may be pickled"
    short = [text for text in module.texts if text.shape[0] == 1]
    return value, [text for text in module.texts if text.shape[0] > 1], short, logits


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Any:
    return {even: pool.run(1, looking_job, {}, even)[0] for even in (False, True)}


LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "ZeRO 3, selective": (
        2,
        {"cp": 2, "zero": 3, "activations": ActivationConfig(recompute="selective")},
        False,
    ),
    "tp": (4, {"cp": 2, "tp": 2}, False),
    "pp": (4, {"cp": 2, "pp": 2, "num_microbatches": 2}, False),
    "sequence parallelism": (2, {"tp": 2, "sequence_parallel": True}, True),
    "sequence parallelism, pp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}, True),
    "ZeRO 3, pp": (4, {"pp": 2, "zero": 3, "num_microbatches": 2}, False),
    "V": (2, {"pp": PipelineConfig(degree=2, schedule="zbv")}, False),
}
"""Processes, options, and whether all sequences have an even number of tokens."""
JOINED = ("tp", "sequence parallelism, pp", "ZeRO 3, pp")
"""Of four processes, which join what two show; under context parallelism a pipeline stays."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in JOINED)) for name in LAYOUTS],
)
def test_what_a_run_shows_of_itself_is_whole(pool: WorkerPool, alone: Any, layout: str) -> None:
    processes, options, even = LAYOUTS[layout]
    value, texts, short, logits = alone[even]
    for found in pool.run(processes, looking_job, options, even):
        assert found[0] == pytest.approx(value, rel=1e-10)
        torch.testing.assert_close(found[3], logits, rtol=1e-9, atol=1e-11)
        assert all(torch.equal(a, b) for a, b in zip(found[1], texts, strict=True))
        expected = [] if "zero" in options and "pp" not in options else short
        assert all(torch.equal(a, b) for a, b in zip(found[2], expected, strict=True))
