"""Modules whose steps draw random numbers, before the trunk and after it, from every generator."""

import random
from typing import Any

import lightning as L
import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import PipelineSequential

WIDTH, SAMPLES = 4, 16


class Denoiser(L.LightningModule):
    """Learns the noise that its step adds, by a random timestep and a mix of samples."""

    def __init__(self, batch_size: int = 8, rank_zero_draws: bool = False) -> None:
        super().__init__()
        self.trunk = PipelineSequential(
            layers=[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        )
        self._batch_size, self._rank_zero_draws = batch_size, rank_zero_draws
        self.drawn: list[tuple[float, ...]] = []

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(data), batch_size=self._batch_size)

    val_dataloader = train_dataloader

    def loss(self, x: Tensor) -> Tensor:
        # As masked and denoising objectives, random timesteps and mixup draw.
        noise = torch.randn_like(x)
        kept = torch.rand_like(x) < 0.8
        time = random.random()
        weight = numpy.random.beta(0.5, 0.5)
        order = torch.randperm(len(x))
        mixed = weight * x + (1 - weight) * x[order]
        out = self.trunk(torch.where(kept, mixed + time * noise, 0.0))
        after = torch.rand(()).double()
        self.drawn.append((float(noise.sum()), time, weight, float(after)))
        return F.mse_loss(out, time * noise * after) + random.random() * out.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[0]), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        if self._rank_zero_draws and self.trainer.is_global_zero:
            torch.randn(3), random.random(), numpy.random.rand()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
