"""A causal language model of a Hugging Face directory, or LoRA adapters of it.

The module of the recipe `finetune-adopted`, and a start for your own: nothing in it is for this
library but `adopt`.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron import adopt


class AdoptedLanguageModel(pl.LightningModule):
    """Fine-tuning of a model directory, under any layout.

    Args:
        directory: model directory, as ``save_pretrained`` or a download writes it.
        save_to: directory for the trained model, or its adapters, in the same format.
        lora_rank: rank of LoRA adapters on all linear layers, which alone are then trained; 0: the
            whole model is.
        lr: largest learning rate, behind ``warmup_steps`` in which it grows from 0.
        warmup_steps: steps, at least 1.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        directory: str,
        save_to: str,
        lora_rank: int = 0,
        lr: float = 1e-5,
        warmup_steps: int = 50,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lm: Any = None

    @override
    def configure_model(self) -> None:
        if self.lm is not None:
            return
        self.lm = adopt(self.hparams["directory"], dtype=torch.float32)
        if self.hparams["lora_rank"]:
            from peft import LoraConfig, get_peft_model

            rank = self.hparams["lora_rank"]
            lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            self.lm = get_peft_model(self.lm, lora)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        # The model shifts labels itself.
        loss: Tensor = self.lm(input_ids=batch["tokens"], labels=batch["tokens"]).loss
        return loss

    @override
    def configure_optimizers(self) -> Any:
        learns = [p for p in self.parameters() if p.requires_grad]
        given = self.hparams
        optimizer = torch.optim.AdamW(learns, lr=given["lr"], weight_decay=given["weight_decay"])
        warmup = given["warmup_steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @override
    def on_train_end(self) -> None:
        self.lm.save_pretrained(self.hparams["save_to"])
