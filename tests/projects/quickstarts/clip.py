"""transformers: CLIP compares the images and texts of a batch, on each rank with one another."""

import copy
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from tests.projects.quickstarts.quickstart import Quickstart, weights

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class Pairs(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        text = CLIPTextConfig(vocab_size=32, max_position_embeddings=8, eos_token_id=31, **SIZES)
        vision = CLIPVisionConfig(image_size=16, patch_size=8, **SIZES)
        self.model = CLIPModel(
            CLIPConfig(
                text_config=text.to_dict(),
                vision_config=vision.to_dict(),
                projection_dim=width,
            )
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], pixel_values=batch[1], return_loss=True).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], pixel_values=batch[1]).image_embeds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(run: Quickstart) -> None:
    texts, images = torch.randint(1, 32, (32, 8)), torch.randn(32, 3, 16, 16)
    pairs = TensorDataset(texts, images)
    # A sampler that divides is left alone by both. Lightning's own would shuffle.
    rank = int(os.environ["RANK"])
    sampler = DistributedSampler(pairs, num_replicas=run.ranks, rank=rank, shuffle=False)
    loader = DataLoader(pairs, batch_size=run.batch_size(8), sampler=sampler)

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        return pl.Trainer(max_epochs=epochs, callbacks=[saver], **run.options())

    model, first = Pairs(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        numbers |= weights(Pairs.load_from_checkpoint(saver.best_model_path))
    with run.part("predict") as numbers:
        numbers["images"] = torch.cat(first.predict(model, loader)).mean()
    with run.part("use") as numbers:
        copied = copy.deepcopy(model.model).eval()
        numbers |= weights(copied)
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(Pairs(), loader, loader, ckpt_path=saver.last_model_path)
        numbers["loss"] = second.callback_metrics["val_loss"]
