"""A run that is interrupted at many points, and what comes after each of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.whole.memory import weights_in_parts
from tests.strategy.small import dp_of, make_trainer

WIDTH, SAMPLES, GLOBAL_BATCH, ACCUMULATE, EPOCHS = 4, 22, 4, 2, 2
"""Six batches an epoch, the last one of two samples; three optimizer steps."""


class Augmented(Dataset[Any]):
    """Samples to which all three generators add noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), random.random(), random.gauss(0, 1), numpy.random.rand()]
        return torch.tensor(noise, dtype=torch.float64) + index, index


class Block(nn.Module):
    """Drops what tp ranks share, and what each holds for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.2), Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.inner(torch.tanh(self.up(x))))
        return x + self.outer(hidden)


class Noisy(pl.LightningModule):
    """Random in its data, its dropout and its step; keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)
        self.net = PipelineSequential(layers=[Block(), Block()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):  # of several loaders
            batch = [torch.cat([part[0] for part in batch.values()])]
        x = self.statistics(batch[0]) if len(batch[0]) > 1 else batch[0]
        out = self.net(x + 0.1 * torch.rand(()))
        return (out**2).mean() + 0.01 * random.random() * out.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Curve(pl.Callback):
    """Everything that a step may change, by epoch and batch."""

    def __init__(self) -> None:
        self.points: dict[tuple[int, int], tuple[Any, ...]] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        stepped = (index + 1) % ACCUMULATE == 0
        with weights_in_parts():  # the parts of this rank are what is compared
            held = [local(p).tolist() for p in module.parameters()]
        norm = strategy.parallel.gradients.last_norm if stepped else None
        self.points[trainer.current_epoch, index] = (
            outputs["loss"].item(),
            None if norm is None else float(norm),
            trainer.optimizers[0].param_groups[0]["lr"],
            trainer.global_step,
            numbers(batch),
            held,
            # Other ranks gather others, of which a checkpoint keeps the first rank's.
            [b.tolist() for b in module.buffers() if strategy.topology.batch.rank == 0],
        )


def numbers(batch: Any) -> list[int]:
    """Which samples a batch has, of all its loaders."""
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return [number for part in parts for number in part[1].tolist()]


def local(tensor: Any) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


class Interruptions(pl.Callback):
    """Saves where a run is interrupted: at some of `POINTS`."""

    def __init__(self, directory: str, points: Sequence[str]) -> None:
        self.directory, self.points = directory, points

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        if name in self.points:
            trainer.save_checkpoint(f"{self.directory}/{name}.ckpt")

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "before the first step")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == (1, 3):
            self._save(trainer, "amid a window, as a batch starts")

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        names = {
            (0, 1): "in mid-epoch",
            (0, 2): "in mid-accumulation",
            (0, 5): "with the last batch of an epoch",
            (1, 0): "in the first accumulation of an epoch",
            (1, 3): "in the second epoch",
        }
        if name := names.get((trainer.current_epoch, i)):
            self._save(trainer, name)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, out: Any, batch: Any, index: int, *_: Any
    ) -> None:
        if not trainer.sanity_checking and (trainer.current_epoch, index) == (0, 2):
            self._save(trainer, "during validation")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking and trainer.current_epoch == 1:
            self._save(trainer, "after validation")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0:
            self._save(trainer, "between epochs")


POINTS = {
    "before the first step": (0, 0),
    "in mid-epoch": (0, 2),
    "in mid-accumulation": (0, 2),
    "during validation": (0, 4),
    "with the last batch of an epoch": (1, 0),
    "between epochs": (1, 0),
    "in the first accumulation of an epoch": (1, 0),
    "amid a window, as a batch starts": (1, 2),
    "in the second epoch": (1, 4),
    "after validation": (1, 4),
}
"""Where a run is interrupted, and the first batch that is trained on afterwards."""

MakeLoader = Callable[[int, int], Any]


def augmented_loader(batch_size: int, workers: int) -> Any:
    return DataLoader(
        Augmented(),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


def train(
    layout: Mapping[str, Any],
    devices: int,
    workers: int,
    make_loader: MakeLoader,
    directory: str | None = None,
    path: str | None = None,
    module: type[pl.LightningModule] = Noisy,
    points: Sequence[str] = (),
    **options: Any,
) -> dict[tuple[int, int], tuple[Any, ...]]:
    """The curve of a run that starts fresh and saves at ``points``, or that goes on from a path."""
    # A process that starts anew has other random numbers.
    pl.seed_everything(7 if path is None else 8, verbose=False)
    curve = Curve()
    callbacks: list[pl.Callback] = [curve, *options.pop("callbacks", [])]
    if directory is not None:
        callbacks.append(Interruptions(directory, points))
    quiet: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": 0.5,
        "val_check_interval": 4,
        "num_sanity_val_steps": 1,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    }
    trainer = make_trainer(layout, devices, callbacks=callbacks, **{**quiet, **options})
    size = GLOBAL_BATCH // dp_of(devices, layout)
    validation = DataLoader(Augmented(), batch_size=size)
    trainer.fit(module(), make_loader(size, workers), validation, ckpt_path=path)
    return curve.points


def interrupt_and_resume(
    layout: Mapping[str, Any],
    devices: int,
    workers: int,
    points: list[str],
    directory: str,
    make_loader: MakeLoader = augmented_loader,
    **options: Any,
) -> dict[str, list[str]]:
    """What differs after each interruption; nothing should."""
    options = {"limit_val_batches": 4, **options}
    whole = train(layout, devices, workers, make_loader, directory, points=points, **options)
    assert sorted(i for (e, _), p in whole.items() if e == 0 for i in p[4])  # something was read
    faults = {}
    for point in points:
        path = str(Path(directory) / f"{point}.ckpt")
        rest = train(layout, devices, workers, make_loader, path=path, **options)
        faults[point] = differences(whole, rest, POINTS[point])
    return faults


def differences(whole: Any, rest: Any, first: tuple[int, int]) -> list[str]:
    expected = {at: point for at, point in whole.items() if at >= first}
    faults = [] if rest.keys() == expected.keys() else [f" {sorted(rest)} instead of {first} on"]
    names = ("loss", "norm", "rate", "step", "samples", "weights", "buffers")
    for at in rest.keys() & expected.keys():
        for name, ours, theirs in zip(names, rest[at], expected[at], strict=True):
            if ours != theirs:
                faults.append(f"{at}: {name} {str(ours)[:80]} instead of {str(theirs)[:80]}")
    return sorted(faults)[:6]
