"""The Trainer's connectors: samplers, checkpoints. All of them are private attributes of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Trainer


def cluster_environment(trainer: Trainer) -> ClusterEnvironment:
    """The cluster environment of a Trainer, whatever its strategy.

    Private: ``Trainer._accelerator_connector.cluster_environment``.
    """
    return trainer._accelerator_connector.cluster_environment


def divides_data(trainer: Trainer) -> bool:
    """Whether Lightning divides the samples of loaders by samplers of its own.

    Private: ``Trainer._accelerator_connector.use_distributed_sampler``.
    """
    return trainer._accelerator_connector.use_distributed_sampler


def divide_data(trainer: Trainer, *, divide: bool) -> None:
    """Say whether Lightning is to divide the samples of loaders by samplers of its own.

    Changed: ``Trainer._accelerator_connector.use_distributed_sampler``. Lightning would shuffle
    what is trained on, and repeat samples that are evaluated. Unnecessary if a strategy could
    decline; the user's argument of the Trainer cannot be changed by it.
    """
    trainer._accelerator_connector.use_distributed_sampler = divide


def collect_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """The content of a checkpoint of the present, as Lightning collects it; on all ranks.

    Private: ``Trainer._checkpoint_connector.dump_checkpoint``. Needed for local checkpoints, which
    are saved more often than, and beside, those of ``Trainer.save_checkpoint``.
    """
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


@contextmanager
def callbacks_without_log(trainer: Trainer) -> Iterator[None]:
    """Take the module's ``log`` and ``log_dict`` from the callbacks within the block.

    Lightning makes them attributes of each callback when a run begins. A pickle of a callback (a
    module may have it among its hyper-parameters) would hold the module, in parts.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    taken = [
        {name: vars(callback).pop(name) for name in ("log", "log_dict") if name in vars(callback)}
        for callback in callbacks
    ]
    try:
        yield
    finally:
        for callback, methods in zip(callbacks, taken, strict=True):
            vars(callback).update(methods)


def requeue_path(trainer: Trainer) -> str:
    """Path from which Lightning starts in a job that Slurm has queued again.

    Private: ``Trainer._checkpoint_connector.hpc_save_path``.
    """
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def show_checkpoint_path(trainer: Trainer, path: str | None) -> None:
    """Name the checkpoint that a run started from, for what Lightning prints and may delete.

    Changed: ``Trainer._checkpoint_connector._ckpt_path``. The public ``trainer.ckpt_path`` would
    make every later run start from it as well.
    """
    trainer._checkpoint_connector._ckpt_path = path
