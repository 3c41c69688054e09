"""A module for bad numbers, and runs of it that are held against runs without the bad batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.parallel.gradients import local
from tests.strategies.small import GLOBAL_BATCH, WIDTH, make_trainer


class Guarded(pl.LightningModule):
    """Dropout, a batch norm, tied and split weights, momentum, and a schedule that counts steps."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]], reader: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        last.weight = first.weight
        self.net = PipelineSequential(
            first,
            nn.Sequential(ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)),
            nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)),
            last,
        )
        self.batches, self.reader = batches, reader

    def train_dataloader(self) -> Any:
        axis = self.trainer.strategy.topology.batch
        shares = [tuple(t.chunk(axis.size)[axis.rank] for t in batch) for batch in self.batches]
        return DataLoader(shares, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step"}}


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(
            torch.randn(GLOBAL_BATCH, WIDTH, generator=generator, dtype=torch.float64)
            for _ in range(2)
        )  # type: ignore[misc]
        for _ in range(count)
    ]


def poisoned(
    given: Sequence[tuple[Tensor, Tensor]], at: int, value: float, sample: int = -1
) -> list[tuple[Tensor, Tensor]]:
    """The same with one bad target in a batch: in the share of the last data-parallel rank."""
    result = list(given)
    x, y = result[at]
    y = y.clone()
    y[sample, 0] = value
    result[at] = x, y
    return result


class BadGradient(pl.Callback):
    """Makes one element of a gradient of one rank bad, in the batches named."""

    def __init__(self, at: Sequence[int], rank: int, value: float = torch.nan) -> None:
        self.at, self.rank, self.value = list(at), rank, value

    def on_after_backward(self, trainer: Any, module: pl.LightningModule) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx in self.at and trainer.global_rank == self.rank:
            grads = [local(p.grad) for p in module.parameters() if p.grad is not None]
            next(g for g in grads if g.numel()).view(-1)[0] = self.value


def fit(
    layout: Mapping[str, Any],
    devices: int,
    data: Sequence[tuple[Tensor, Tensor]],
    *callbacks: pl.Callback,
    make: Callable[[Any], pl.LightningModule] = Guarded,
    **options: Any,
) -> pl.Trainer:
    module = make(data)
    pl.seed_everything(5, verbose=False)
    trainer = make_trainer(
        layout, devices, callbacks=list(callbacks), use_distributed_sampler=False, **options
    )
    trainer.fit(module)
    return trainer


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    """All that a run is made of, as this rank holds it."""
    module, [optimizer] = trainer.lightning_module, trainer.optimizers
    trainer.strategy.parallel.data.reshard()
    found: dict[str, Any] = {n: local(p.detach()).clone() for n, p in module.named_parameters()}
    found |= {name: value.clone() for name, value in module.named_buffers()}
    for index, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            found[f"{index}.{key}"] = local(value) if isinstance(value, Tensor) else value
    found["rate"] = optimizer.param_groups[0]["lr"]
    found["random"] = torch.get_rng_state()
    for name, value in trainer.strategy.topology.rng.state_dict().items():
        found[f"random {name}"] = value
    return found


def differences(ours: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is not the same to the bit."""
    return [
        name
        for name in {**ours, **other}
        if name not in ours
        or name not in other
        or not torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(other[name]))
    ]
