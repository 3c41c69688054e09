"""nanoGPT: a network as in its `model.py`, in a LightningModule.

The project is in no package index. Here are its ways, in other code: parts in a ModuleDict, one
weight for tokens in and out, a normalization whose bias is optional, queries, keys and values of
one layer that are split by width, logits of the last position where no targets are given, initial
weights by name, and an optimizer with decay for matrices alone.
"""

import copy
import io
import math

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.projects.quickstarts.quickstart import Quickstart, weights

VOCABULARY, LENGTH, HEADS = 32, 16, 2


class Normalization(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.width = width
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        query, key, value = (
            each.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for each in self.c_attn(x).split(self.width, dim=2)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).contiguous().view(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = Normalization(width, bias), Attention(width, bias)
        self.ln_2, self.mlp = Normalization(width, bias), MLP(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(LENGTH, width),
                "h": nn.ModuleList(Block(width, bias) for _ in range(layers)),
                "ln_f": Normalization(width, bias),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Language(pl.LightningModule):
    def __init__(self, width: int = 16, layers: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(width, layers, bias)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0], batch[1])[1]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(batch[0], batch[1])[1], sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [each for each in self.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in trained if each.dim() >= 2], "weight_decay": 0.1},
            {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def main(run: Quickstart) -> None:
    text = torch.randint(0, VOCABULARY, (32, LENGTH + 1))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=run.batch_size(8))

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        options = run.options(callbacks=[saver], gradient_clip_val=1.0, accumulate_grad_batches=2)
        return pl.Trainer(max_epochs=epochs, **options)

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
        copied = copy.deepcopy(model.model)
        numbers["generated"] = generated(copied, text[:2, :4])
        torch.save(model.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(Language(), loader, loader, ckpt_path=saver.last_model_path)
        numbers["loss"] = second.callback_metrics["val_loss"]


@torch.no_grad()
def generated(model: GPT, tokens: Tensor) -> Tensor:
    """Logits of tokens that are drawn one after the other, the likeliest each time."""
    seen = []
    for _ in range(4):
        logits, _ = model(tokens)
        seen.append(logits)
        tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return torch.cat(seen, dim=1)
