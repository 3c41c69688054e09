"""Adopted models write while they train what the unmodified ones write, adapters included."""

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_megatron import MegatronStrategy
from lightning_megatron.adoption.adopt import adopt
from tests.adoption.families import FAMILIES
from tests.adoption.harness import BATCHES, KeepDouble
from tests.adoption.test_generate import prompts


class Writing(L.LightningModule):
    """Writes after each batch, in the validation, and when the training is over."""

    def __init__(self, model: torch.nn.Module, copies: int) -> None:
        super().__init__()
        self.lm = model
        self._copies = copies
        self.texts: list[list[list[int]]] = []

    def write(self) -> None:
        mode = self.lm.training
        self.lm.eval()
        given = default_collate(prompts())
        given |= {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, "use_cache": True}
        texts = self.lm.generate(**given)
        self.texts.append(texts.tolist())
        self.lm.train(mode)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.lm(**batch).loss

    def on_train_batch_end(self, *_: object) -> None:
        self.write()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.lm(**batch).loss, sync_dist=True)
        if batch_idx == 0:
            self.write()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learns = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(learns, lr=2e-2, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES["causal"](), batch_size=4 // self._copies)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES["causal"]()[:4], batch_size=4 // self._copies)


def trained(layout: dict[str, object] | None, world: int, copies: int, *, adapters: bool) -> object:
    """Texts and the loss of the validation."""
    torch.manual_seed(0)
    model = FAMILIES["llama"].build()
    if adapters:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config).double()
    module = Writing(model if layout is None else adopt(model), copies)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if layout is None else MegatronStrategy(**layout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with KeepDouble():
        trainer.fit(module)
        module.write()
    return module.texts, float(trainer.callback_metrics["loss"])


LAYOUTS = {
    "zero1": (2, {"zero": 1}, 2),
    "pp2": (2, {"pp": 2}, 1),
    "zero2 pp2": (4, {"zero": 2, "pp": 2}, 2),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}, 1),
    "zero3": (2, {"zero": 3}, 2),
    "zero3 pp2": (4, {"zero": 3, "pp": 2, "microbatch_size": 1}, 2),
}


USUAL = {("zero1", False), ("pp2", False), ("zero3", True)}


@pytest.mark.parametrize(
    ("layout", "adapters"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in USUAL else pytest.mark.thorough)
        for name in LAYOUTS
        for kind in (False, True)
    ],
)
def test_adopted_model_writes_while_it_trains(pool, layout, adapters):
    world, options, copies = LAYOUTS[layout]
    texts, loss = trained(None, 1, 1, adapters=adapters)
    assert len({str(text) for text in texts}) > 3, "training changes what is written"
    for found, own in pool.run(world, trained, options, world, copies, adapters=adapters):
        assert found == texts
        assert own == pytest.approx(loss, abs=1e-9)
