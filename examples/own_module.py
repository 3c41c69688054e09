"""A module of your own under tensor and pipeline parallelism: ``python examples/own_module.py``.

Four processes on this machine's CPUs learn to count: tp=2 shares each layer between two, pp=2 cuts
the stack in two. Change the numbers, or put `--tp 1 --pp 1` behind the command: the loss and the
accuracy stay the same, to rounding.
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = ColumnParallelLinear(size, 4 * size)  # each tp rank has a part of the columns
        self.down = RowParallelLinear(4 * size, size)  # and of the rows; the sum is over ranks

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class NextNumber(L.LightningModule):
    def configure_model(self):  # on the meta device: no process ever holds the whole network
        if not hasattr(self, "trunk"):
            self.trunk = PipelineSequential(
                embedding=VocabParallelEmbedding(32, 64),
                blocks=[Block(64) for _ in range(4)],
                head=ColumnParallelLinear(64, 32),
            )
            self.loss = VocabParallelCrossEntropy(vocab_size=32)

    def training_step(self, batch, batch_idx):
        numbers, following = batch
        logits = self.trunk(numbers)  # the one call that the pipeline cuts
        loss = self.loss(logits, following)
        # Each tp rank computed half of the logits, and argmax still finds the largest of all.
        accuracy = (logits.argmax(-1) == following).float().mean()
        self.log_dict({"train_loss": loss, "accuracy": accuracy}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    options = parser.parse_args(args)
    L.seed_everything(1, verbose=False)
    numbers = torch.arange(16).repeat(256, 1) + torch.arange(16).repeat(16)[:, None]
    data = TensorDataset(numbers, (numbers + 1) % 32)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.tp * options.pp,
        strategy=MegatronStrategy(tp=options.tp, pp=options.pp, num_microbatches=4),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(NextNumber(), DataLoader(data, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        told = {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}
        print(told)
    return trainer.callback_metrics


if __name__ == "__main__":
    main()
