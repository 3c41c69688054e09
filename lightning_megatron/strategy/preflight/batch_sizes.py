"""Faults of the options that size batches and microbatches, before any process group forms."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron._lightning.hooks import synchronizes_batch_norm
from lightning_megatron._lightning.loaders import training_source
from lightning_megatron.data.reading.batch_sizes import BatchSizes
from lightning_megatron.data.reading.global_batch import schedule_of, sizing_problem
from lightning_megatron.errors import whole_numbers
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.zero.data_parallel import ShardingConfig

AUTO_SIZE = "auto"
"""Value of ``microbatch_size`` that leaves it to the strategy."""


def fitting_problems(
    trainer: Trainer,
    module: nn.Module,
    degrees: Degrees,
    zero: ShardingConfig,
    activations: ActivationConfig,
) -> list[str]:
    """Reasons why the size of microbatches cannot be found by trial.

    A batch on trial must run without communication, so that no rank waits for one that is out of
    memory.
    """
    found = {
        f"{axis}={size}": "ranks communicate amid forward and backward"
        for axis, size in (("tp", degrees.tp), ("pp", degrees.pp), ("cp", degrees.cp))
        if size > 1
    }
    if degrees.ep > 1:
        found[f"ep={degrees.ep}"] = "ranks communicate amid forward and backward"
    if zero.stage == 3:
        found["zero=3"] = "parameters are gathered amid forward and backward"
    if degrees.dp > 1:
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()) or (
            isinstance(trainer.strategy, ParallelStrategy)
            and synchronizes_batch_norm(trainer.strategy)
        ):
            found["synchronized batch norms"] = "they communicate in every forward"
        routers = (part for part in module.modules() if isinstance(part, Router))
        if any(router.config.balance == "batch" for router in routers):
            found["RouterConfig(balance='batch')"] = "routers communicate in every forward"
    every = trainer.accumulate_grad_batches
    accumulated = "GradientAccumulationScheduler" if _accumulates_later(trainer) else ""
    if every != 1 or accumulated:
        found[accumulated or f"accumulate_grad_batches={every}"] = (
            "earlier batches would have to be run again too; use global_batch_size"
        )
    if activations.recompute == "adaptive":
        found["activations.recompute='adaptive'"] = "it measures memory at a given size"
    return [
        f"microbatch_size='auto', {what}: {why}, where a rank that is out of memory would leave "
        "the others waiting; nearest valid: microbatch_size=<a number>"
        for what, why in found.items()
    ]


def batch_size_problems(
    trainer: Trainer, global_batch_size: int | None, ranks: int | None
) -> list[str]:
    """Everything that is wrong with the sizes that the strategy is to give global batches.

    Args:
        trainer: of the run.
        global_batch_size: option of the strategy.
        ranks: number of ranks that read different samples; None if the layout is not legal.
    """
    sizes = schedule_of(trainer)
    problems = []
    if global_batch_size is not None:
        problems = whole_numbers(1, global_batch_size=global_batch_size)
    if problems or (sizes is None and global_batch_size is None):
        return problems
    if sizes is not None:
        problems += _schedule_problems(trainer, sizes, global_batch_size)
        name, wanted = "BatchSchedule", sizes.all(global_batch_size)
    if sizes is None and global_batch_size is not None:
        name, wanted = f"global_batch_size={global_batch_size}", [global_batch_size]
    every = trainer.accumulate_grad_batches
    if every != 1 or _accumulates_later(trainer):
        problems.append(
            f"{name}, accumulate_grad_batches={every}: the size is that of an optimizer step, "
            "which is one batch of the loader, cut into microbatches; nearest valid: "
            "accumulate_grad_batches=1 and microbatch_size=<what fits>"
        )
    uneven = [size for size in wanted if ranks is not None and size % ranks]
    if uneven:
        assert ranks is not None
        size = uneven[0]
        lower, upper = size // ranks * ranks, (size // ranks + 1) * ranks
        problems.append(
            f"{name}: {ranks} data-parallel ranks read equal parts of every global batch, and "
            f"{', '.join(map(str, uneven))} cannot be divided so; nearest valid: "
            f"{f'{lower} or ' if lower else ''}{upper}"
        )
    source = training_source(trainer)
    if isinstance(source, DataLoader):
        problem = sizing_problem(source, name)
        problems += [] if problem is None else [problem]
    return problems


def _accumulates_later(trainer: Trainer) -> bool:
    """Whether a callback has gradients accumulated from some epoch on."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(one, GradientAccumulationScheduler) for one in callbacks)


def _schedule_problems(
    trainer: Trainer, sizes: BatchSizes, global_batch_size: int | None
) -> list[str]:
    noise = sizes.noise
    if noise is None and global_batch_size is not None:
        return [
            f"global_batch_size={global_batch_size}, BatchSchedule: the schedule gives all sizes; "
            "nearest valid: no global_batch_size"
        ]
    if noise is not None and noise.start is None and global_batch_size is None:
        return [
            f"NoiseScale(max={noise.max}, start=None): there is no size to begin with; nearest "
            "valid: NoiseScale(start=...), or MegatronStrategy(global_batch_size=...)"
        ]
    if noise is not None and global_batch_size is not None:
        if noise.start not in (None, global_batch_size):
            return [
                f"global_batch_size={global_batch_size}, NoiseScale(start={noise.start}): both are "
                "the first size; nearest valid: no global_batch_size"
            ]
        if global_batch_size > noise.max:
            return [
                f"global_batch_size={global_batch_size}, NoiseScale(max={noise.max}): sizes grow; "
                f"nearest valid: max={global_batch_size}"
            ]
    source = training_source(trainer)
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return [
            f"BatchSchedule, {type(source.dataset).__name__}: an iterable dataset is divided by "
            "its own code, and its position is no number of samples; nearest valid: a map-style "
            "dataset, or MegatronStrategy(global_batch_size=...)"
        ]
    return []
