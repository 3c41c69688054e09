"""A module for bad numbers, and runs of it that are held against runs without the bad batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.whole.memory import own_weights
from lightning_megatron.zero.gradients import local
from tests.strategy.small import GLOBAL_BATCH, WIDTH, make_trainer


class Guarded(pl.LightningModule):
    """Dropout, a batch norm, tied and split weights, momentum, and a schedule that counts steps."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        last.weight = first.weight
        self.net = PipelineSequential(
            first,
            nn.Sequential(ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)),
            self.between(),
            last,
        )
        self.batches = batches

    def between(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))

    def train_dataloader(self) -> Any:
        axis = self.trainer.strategy.topology.batch
        shares = [tuple(t.chunk(axis.size)[axis.rank] for t in batch) for batch in self.batches]
        return DataLoader(shares, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=GLOBAL_BATCH)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step"}}


class Manual(Guarded):
    """The same training in the user's own hands."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, count, GLOBAL_BATCH, WIDTH, generator=generator, dtype=dtype)
    return list(zip(x, y, strict=True))


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
    """Makes one element of a gradient of one rank bad, in the batches named: so many times each."""

    def __init__(self, at: Sequence[int], rank: int, times: int = 1_000) -> None:
        self.left, self.rank, self.value = dict.fromkeys(at, times), rank, torch.nan

    @own_weights  # on one rank only
    def on_after_backward(self, trainer: Any, module: pl.LightningModule) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_idx
        if self.left.get(batch) and trainer.global_rank == self.rank:
            self.left[batch] -= 1
            grads = [local(p.grad) for p in module.parameters() if p.grad is not None]
            next(g for g in grads if g.numel()).view(-1)[0] = self.value


def fit(
    layout: Mapping[str, Any],
    devices: int,
    data: Sequence[tuple[Tensor, Tensor]],
    *callbacks: pl.Callback,
    make: Callable[[Any], pl.LightningModule] = Guarded,
    ckpt_path: str | None = None,
    **options: Any,
) -> pl.Trainer:
    module = make(data)
    pl.seed_everything(5, verbose=False)
    trainer = make_trainer(
        layout, devices, callbacks=list(callbacks), use_distributed_sampler=False, **options
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    """All that a run is made of, as this rank holds it."""
    module, [optimizer] = trainer.lightning_module, trainer.optimizers
    trainer.strategy.parallel.data.come_to_rest()
    found: dict[str, Any] = {n: local(p.detach()).clone() for n, p in module.named_parameters()}
    found |= {name: value.clone() for name, value in module.named_buffers()}
    for index, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            found[f"{index}.{key}"] = local(value) if isinstance(value, Tensor) else value
    found["rate"] = optimizer.param_groups[0]["lr"]
    found["random"] = torch.get_rng_state()
    for name, value in trainer.strategy.topology.rng.state_dict().items():
        found[f"random {name}"] = value
    found["mean loss"] = trainer.callback_metrics.get("train_loss_epoch", torch.nan)
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
