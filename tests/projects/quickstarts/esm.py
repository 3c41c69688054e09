"""transformers: ESM, a language model of proteins, in a LightningModule."""

import copy

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import EsmConfig, EsmForMaskedLM

from tests.projects.quickstarts.quickstart import Quickstart, weights


class Protein(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = EsmForMaskedLM(
            EsmConfig(
                vocab_size=24,
                mask_token_id=1,
                pad_token_id=0,
                hidden_size=width,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=2 * width,
                max_position_embeddings=34,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                position_embedding_type="rotary",
            )
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[1]).loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.model(input_ids=batch[0], labels=batch[1]).loss
        self.log("val_loss", loss, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0]).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(run: Quickstart) -> None:
    tokens = torch.randint(2, 24, (32, 16))
    masked = tokens.clone()
    masked[:, ::4] = 1
    loader = DataLoader(TensorDataset(masked, tokens), batch_size=run.batch_size(8))

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        return pl.Trainer(max_epochs=epochs, callbacks=[saver], **run.options())

    model, first = Protein(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        numbers |= weights(Protein.load_from_checkpoint(saver.best_model_path))
    with run.part("predict") as numbers:
        numbers["logits"] = torch.cat(first.predict(model, loader))
    with run.part("use") as numbers:
        numbers |= weights(model)
        copied = copy.deepcopy(model.model).eval()
        numbers["logits"] = copied(input_ids=masked[:2]).logits
        model.model.save_pretrained(run.folder / "pretrained")
        first.strategy.barrier()  # one rank writes
        saved = EsmForMaskedLM.from_pretrained(run.folder / "pretrained").eval()
        numbers["saved"] = saved(input_ids=masked[:2]).logits
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(Protein(), loader, loader, ckpt_path=saver.last_model_path)
        numbers["loss"] = second.callback_metrics["val_loss"]
