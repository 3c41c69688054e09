"""A step that does with split logits and activations what it does in one process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from tests.parity.plain_modules import FromMemory, draw

VOCAB, SIZE = 32, 16


class Block(nn.Module):
    """The README's, with any function between the two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(SIZE)
        self.up = ColumnParallelLinear(SIZE, 4 * SIZE)
        self.scale = nn.Parameter(torch.ones(4 * SIZE))
        self.down = RowParallelLinear((2 if kind == "gated" else 4) * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.between(self.up(self.norm(x)) * self.scale))
        return out

    def between(self, y: Tensor) -> Tensor:
        if self.kind == "gated":
            gate, value = y.chunk(2, -1)
            return F.silu(gate) * value
        if self.kind == "softmax":
            return y.softmax(-1) + F.layer_norm(y, y.shape[-1:])
        if self.kind == "heads":
            heads = y.view(*y.shape[:2], -1, 8).transpose(1, 2)
            heads = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return heads.transpose(1, 2).flatten(2)
        return torch.relu(y)


class Shares(nn.Module):
    """A softmax over what the item before splits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.temperature).softmax(-1) * self.scale


class NextLetter(FromMemory):
    """Measures what it predicts, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []
        kinds = ("relu", "gated", "softmax", "heads")
        self.trunk = PipelineSequential(
            embedding=VocabParallelEmbedding(VOCAB, SIZE),
            up=ColumnParallelLinear(SIZE, 3 * SIZE),
            between=Shares(3 * SIZE),
            down=RowParallelLinear(3 * SIZE, SIZE),
            blocks=[Block(kind) for kind in kinds],
            head=ColumnParallelLinear(SIZE, VOCAB),
        )
        self.loss = VocabParallelCrossEntropy()
        self.accuracy = MulticlassAccuracy(VOCAB)

    def batch(self, step: int) -> Any:
        letters = draw(9, high=VOCAB, step=step)
        return letters[:, :-1], letters[:, 1:]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        letters, following = batch
        logits = self.trunk(letters)
        loss = self.loss(logits, following)
        self.log("accuracy", (logits.argmax(-1) == following).double().mean())
        chance = logits.softmax(-1).gather(-1, following[..., None])
        self.log("chance", chance.mean())
        # By default it looks at values only in processes that have compiled nothing yet.
        letter = torch.distributions.Categorical(logits=logits, validate_args=True)
        self.log("entropy", letter.entropy().mean())
        plain = F.cross_entropy(logits.view(-1, VOCAB), following.flatten())
        return {"loss": loss + 0.5 * plain + 0.01 * logits.square().mean(), "logits": logits}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        if "logits" in outputs:  # under a pipeline the last stage has it
            self.notes += outputs["logits"].topk(3).indices.flatten().tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.trunk(batch[0])
        self.accuracy(logits.flatten(0, 1), batch[1].flatten())
        self.log("val_accuracy", self.accuracy)
        return logits

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        assert type(outputs) is Tensor
        self.notes += outputs.flatten().tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.trunk(batch[0]).argmax(-1)  # type: ignore[no-any-return]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()  # type: ignore[no-any-return]
