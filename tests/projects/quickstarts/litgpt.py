"""litgpt: its model of a language in a LightningModule. Its own scripts use Fabric."""

import copy
import io

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from litgpt.model import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader

from tests.projects.quickstarts.quickstart import Quickstart, weights


class Language(pl.LightningModule):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(
            Config(
                block_size=16,
                vocab_size=32,
                padded_vocab_size=32,
                n_layer=layers,
                n_head=2,
                n_embd=16,
            )
        )

    def loss(self, tokens: Tensor) -> Tensor:
        return chunked_cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(run: Quickstart) -> None:
    tokens = torch.randint(0, 32, (32, 16))
    loader = DataLoader(list(tokens), batch_size=run.batch_size(8))

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        return pl.Trainer(max_epochs=epochs, callbacks=[saver], **run.options())

    model, first = Language(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        numbers |= weights(Language.load_from_checkpoint(saver.best_model_path))
    with run.part("predict") as numbers:
        numbers["logits"] = torch.cat(first.predict(model, loader))
    with run.part("use") as numbers:
        numbers |= weights(model)
        numbers["logits"] = copy.deepcopy(model.model)(tokens[:2])
        torch.save(model.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(Language(), loader, loader, ckpt_path=saver.last_model_path)
        numbers["loss"] = second.callback_metrics["val_loss"]
