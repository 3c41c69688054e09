"""Pictures out of noise: a small diffusion transformer, and the pictures that it learns from.

The recipe `diffusion` trains it, and it shows what a network that is no language model needs for a
pipeline: its stack is a `PipelineSequential`, called once in each step. Training is rectified flow
(Liu et al., arXiv 2209.03003): a picture is mixed with noise, ``x_t = (1 - t) x + t noise``, and
the network predicts ``noise - x`` from the mixture. The network is DiT's (Peebles and Xie, arXiv
2212.09748) at its simplest: patches are the tokens, and ``t`` is one more token in front.

Time and noise are drawn in the step itself. Under a pipeline the code before the call of the stack
runs on every stage, and draws the same numbers there: the first stage needs the mixture, the last
one the noise.
"""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron import PipelineSequential
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear


class Patches(nn.Module):
    """Pictures ``[b, 1, h, w]`` and times ``[b]`` to tokens: that of the time, then the patches."""

    def __init__(self, picture: int, patch: int, size: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, size, patch, stride=patch)
        self.places = nn.Embedding((picture // patch) ** 2, size)
        self.time = nn.Sequential(nn.Linear(64, size), nn.SiLU(), nn.Linear(size, size))

    @override
    def forward(self, pictures: Tensor, times: Tensor) -> Tensor:
        x = self.patch(pictures).flatten(2).transpose(1, 2) + self.places.weight
        steps = torch.arange(32, device=times.device) / 32
        angles = 1000.0 * times[:, None] * torch.exp(-math.log(10_000.0) * steps)
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)
        return torch.cat([self.time(waves)[:, None], x], dim=1)


class Block(nn.Module):
    """Attention of all tokens to all, and an MLP; heads and MLP are split over tp."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.head_size = size // heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.wq, self.wk, self.wv = (ColumnParallelLinear(size, size) for _ in range(3))
        self.wo = RowParallelLinear(size, size)
        self.up = ColumnParallelLinear(size, 4 * size)
        self.down = RowParallelLinear(4 * size, size)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Pixels(nn.Module):
    """Tokens back to pictures ``[b, 1, h, w]``."""

    def __init__(self, picture: int, patch: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.out = nn.Linear(size, patch**2)
        self.fold = nn.Fold(picture, patch, stride=patch)

    @override
    def forward(self, x: Tensor) -> Tensor:
        folded: Tensor = self.fold(self.out(self.norm(x[:, 1:])).transpose(1, 2))
        return folded


class Denoiser(pl.LightningModule):
    """Learns to make pictures; a batch is a tensor ``[b, 1, picture, picture]`` around -1 to 1.

    Args:
        picture: height and width.
        patch: height and width of a patch.
        size: channels of a token.
        layers: number of blocks.
        heads: attention heads of a block.
        lr: learning rate.
    """

    def __init__(
        self,
        picture: int = 32,
        patch: int = 4,
        size: int = 128,
        layers: int = 6,
        heads: int = 4,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "stack"):
            h: Any = self.hparams
            self.stack = PipelineSequential(
                patches=Patches(h.picture, h.patch, h.size),
                blocks=[Block(h.size, h.heads) for _ in range(h.layers)],
                pixels=Pixels(h.picture, h.patch, h.size),
            )

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss("train_loss", batch)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._loss("val_loss", batch)

    def _loss(self, name: str, pictures: Tensor) -> Tensor:
        times = torch.rand(len(pictures), device=self.device)
        noise = torch.randn_like(pictures)
        t = times.view(-1, 1, 1, 1)
        velocity = self.stack((1 - t) * pictures + t * noise, times)
        loss = F.mse_loss(velocity.float(), noise - pictures)
        self.log(name, loss, prog_bar=True, sync_dist=name == "val_loss")
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        h: Any = self.hparams
        return torch.optim.AdamW(self.parameters(), lr=h.lr, weight_decay=0.0)

    @torch.no_grad()
    def sample(self, number: int, steps: int = 50) -> Tensor:
        """Make pictures; for a module in one process (`lightning_megatron.load_from_checkpoint`).

        Args:
            number: how many.
            steps: calls of the network on the way from noise to picture.
        """
        self.configure_model()
        h: Any = self.hparams
        x = torch.randn(number, 1, h.picture, h.picture, device=self.device)
        for step in range(steps):
            times = torch.full((number,), 1 - step / steps, device=self.device)
            x = x - self.stack(x, times) / steps
        return x


class Shapes(Dataset[Tensor]):
    """Discs and rings of all sizes and places, each a function of its index."""

    draws_random_numbers = False

    def __init__(self, number: int, picture: int, first: int = 0) -> None:
        self.number, self.picture, self.first = number, picture, first

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        drawn = torch.Generator().manual_seed(self.first + index)
        x, y, radius, hole = torch.rand(4, generator=drawn).tolist()
        line = torch.linspace(-1.0, 1.0, self.picture)
        distance = torch.hypot(line - 0.8 * (x - 0.5), line[:, None] - 0.8 * (y - 0.5))
        outer = 0.25 + 0.35 * radius
        inner = outer * (hole - 0.5)  # below 0: a disc
        inside = torch.minimum(outer - distance, distance - inner)
        return (inside * self.picture).clamp(-1.0, 1.0)[None]


class ShapesDataModule(pl.LightningDataModule):
    """Pictures of shapes; put your own in place of it.

    Args:
        picture: height and width.
        number: pictures to train on; a sixteenth as many others are for validation.
        batch_size: pictures of a batch of one data-parallel rank.
    """

    def __init__(self, picture: int = 32, number: int = 16_384, batch_size: int = 64) -> None:
        super().__init__()
        self.picture, self.number, self.batch_size = picture, number, batch_size

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        pictures = Shapes(self.number, self.picture)
        return DataLoader(pictures, self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Shapes(self.number // 16, self.picture, self.number), self.batch_size)
