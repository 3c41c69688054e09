"""Contrastive learning over the samples of all ranks: ``python examples/contrastive.py``.

SimCLR (Chen et al., arXiv 2002.05709): two noisy views of each sample; each has to find the other
one among the views of the whole global batch. Three things are to be known under a parallel layout:

* Use ``trainer.strategy.data_parallel_rank``, the rank among those that read different samples.
  ``global_rank`` also numbers the tp and pp ranks that work on the same samples. ``all_gather``
  gathers over the data-parallel ranks, too.
* The step sees a microbatch. Cut into two, a batch has half of the negatives in each, and another
  loss: ``num_microbatches=1`` keeps it whole. ``couples_samples`` says that the loss is of that
  kind, so that a warning follows where batches are cut.
* Set the batch size of a rank to the global batch size divided by the data-parallel ranks.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy

GLOBAL_BATCH = 64


class Contrastive(L.LightningModule):
    couples_samples = True

    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.encoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))

    def training_step(self, batch, batch_idx):
        (sample,) = batch
        views = [sample + 0.1 * torch.randn_like(sample) for _ in range(2)]
        queries, keys = (F.normalize(self.encoder(view), dim=-1) for view in views)
        # [ranks, b, 16] on several data-parallel ranks, with gradients to all of them.
        everybody = self.all_gather(keys, sync_grads=True).reshape(-1, keys.shape[-1])
        logits = queries @ everybody.T / self.temperature
        first = self.trainer.strategy.data_parallel_rank * len(queries)
        labels = first + torch.arange(len(queries), device=self.device)
        loss = F.cross_entropy(logits, labels)
        found = (logits.argmax(-1) == labels).float().mean()
        self.log_dict({"train_loss": loss, "found": found}, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(args=None):
    parser = argparse.ArgumentParser(description="Contrastive learning over all ranks.")
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(args)
    L.seed_everything(1, verbose=False)
    samples = torch.randn(2048, 32)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MegatronStrategy(num_microbatches=1),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
    )
    batch = GLOBAL_BATCH // options.devices
    trainer.fit(Contrastive(), DataLoader(TensorDataset(samples), batch, shuffle=True))
    if trainer.is_global_zero:
        loss, found = (float(trainer.callback_metrics[name]) for name in ("train_loss", "found"))
        print(f"final loss {loss:.3f}; {found:.0%} found among {GLOBAL_BATCH}")
    return trainer.callback_metrics


if __name__ == "__main__":
    main()
