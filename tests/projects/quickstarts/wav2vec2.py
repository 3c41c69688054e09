"""transformers: Wav2Vec2 learns to write what it hears, of random waveforms."""

import copy

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from tests.projects.quickstarts.quickstart import Quickstart, weights


class Speech(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        # What it drops and masks at random is off. The parts that listen are frozen, as is usual.
        self.model = Wav2Vec2ForCTC(
            Wav2Vec2Config(
                vocab_size=12,
                pad_token_id=0,
                hidden_size=width,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=2 * width,
                conv_dim=(8, 8),
                conv_kernel=(10, 3),
                conv_stride=(5, 2),
                num_conv_pos_embeddings=8,
                num_conv_pos_embedding_groups=2,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                feat_proj_dropout=0.0,
                final_dropout=0.0,
                layerdrop=0.0,
                apply_spec_augment=False,
                ctc_loss_reduction="mean",
            )
        )
        self.model.freeze_feature_encoder()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_values=batch[0], labels=batch[1]).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_values=batch[0]).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


def main(run: Quickstart) -> None:
    waves, letters = torch.randn(32, 320), torch.randint(1, 12, (32, 6))
    loader = DataLoader(TensorDataset(waves, letters), batch_size=run.batch_size(8))

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        return pl.Trainer(max_epochs=epochs, callbacks=[saver], **run.options())

    model, first = Speech(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        numbers |= weights(Speech.load_from_checkpoint(saver.best_model_path))
    with run.part("predict") as numbers:
        numbers["logits"] = torch.cat(first.predict(model, loader))
    with run.part("use") as numbers:
        numbers |= weights(model)
        copied = copy.deepcopy(model.model).eval()
        numbers["logits"] = copied(input_values=waves[:2]).logits
        model.model.save_pretrained(run.folder / "pretrained")
        first.strategy.barrier()  # one rank writes
        saved = Wav2Vec2ForCTC.from_pretrained(run.folder / "pretrained").eval()
        numbers["saved"] = saved(input_values=waves[:2]).logits
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(Speech(), loader, loader, ckpt_path=saver.last_model_path)
        numbers["loss"] = second.callback_metrics["val_loss"]
