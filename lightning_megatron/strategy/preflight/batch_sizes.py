"""Faults of ``global_batch_size`` and of a `BatchSchedule`, before any process group forms."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron._lightning import training_source
from lightning_megatron.data.batch_sizes import BatchSizes
from lightning_megatron.errors import whole_numbers
from lightning_megatron.strategy.data.global_batch import schedule_of, sizing_problem


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
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if every != 1 or any(isinstance(one, GradientAccumulationScheduler) for one in callbacks):
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
