"""A small module, its data and a quiet Trainer: what the tests of the strategy run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_megatron import (
    CheckpointConfig,
    MegatronStrategy,
    PipelineConfig,
    PipelineSequential,
)
from lightning_megatron.testing import WorkerPool

WIDTH = 4
GLOBAL_BATCH = 8
T = TypeVar("T")


class Small(pl.LightningModule):
    """Four linear layers that fit random targets; any layout can hold it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = PipelineSequential(
            layers=[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        )
        self.lr = lr

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuner_of(strategy: MegatronStrategy, kind: type[T]) -> T | None:
    """What measures the first steps of a run, of this kind."""
    return next((tuner for tuner in strategy.tuners if isinstance(tuner, kind)), None)


def samples(count: int = 32, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(count, WIDTH, generator=generator, dtype=torch.float64),
    )


def loader(dataset: Dataset[Any] | None = None, *, dp: int = 1, **options: Any) -> Any:
    """A loader whose batches on ``dp`` ranks make up the same global batch as on one."""
    return DataLoader(dataset or samples(), batch_size=GLOBAL_BATCH // dp, **options)


def make_trainer(layout: Mapping[str, Any] | None, devices: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer without files and bars; ``layout`` None is plain Lightning.

    It saves directories: `tests/checkpoint/test_files.py` has files.
    """
    strategy: Any = "auto"
    if layout is not None:
        config = layout.get("checkpoint", CheckpointConfig())
        if isinstance(config, CheckpointConfig) and config.format == "auto":
            config = replace(config, format="directory")
        strategy = MegatronStrategy(**{**layout, "checkpoint": config})
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "precision": "64-true",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**quiet, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter that this rank holds, whole over the data-parallel ranks."""
    return {name: full(parameter) for name, parameter in module.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def merged(by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters of all stages; ranks that hold the same one must agree exactly."""
    result: dict[str, Tensor] = {}
    for held in by_rank:
        for name, value in held.items():
            torch.testing.assert_close(value, result.setdefault(name, value), rtol=0, atol=0)
    return result


def assert_same(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-13)


LAYOUTS = {
    "one process, 4 microbatches": (1, {"num_microbatches": 4}),
    "pp=2": (2, {"pp": 2}),
    "pp=2 zbv": (2, {"pp": PipelineConfig(degree=2, schedule="zbv")}),
    "pp=2, 1 microbatch": (2, {"pp": 2, "num_microbatches": 1}),
    "dp=2": (2, {"zero": 1}),
    "dp=2, 2 microbatches": (2, {"zero": 2, "num_microbatches": 2}),
    "pp=2 x dp=2": (4, {"pp": 2, "num_microbatches": 2}),
}
"""Processes and options; few layouts, as the parity matrix holds the numbers over all of them."""


def dp_of(processes: int, layout: Mapping[str, Any]) -> int:
    options = MegatronStrategy(**layout).options
    return processes // (options.tp * options.pp.degree * options.cp.degree)


def run(pool: WorkerPool, layout: str | None, job: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Call ``job(layout, devices, *args)`` under one of `LAYOUTS`; None is plain Lightning."""
    devices, options = (1, None) if layout is None else LAYOUTS[layout]
    return pool.run(devices, job, options, devices, *args, **kwargs)
