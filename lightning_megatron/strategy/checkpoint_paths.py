"""Paths of checkpoints: the one that ``ckpt_path`` means, and those that ModelCheckpoint rotates.

Lightning resolves ``"best"``, ``"last"`` and ``"hpc"`` to a path, by names and dates alone, and
hands any other text to the strategy as it is. So ``"auto"`` arrives here as it was given, and
``"last"`` as a path that bears the name of a last checkpoint.
"""

import os
import re
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_megatron._lightning.connectors import show_checkpoint_path
from lightning_megatron.checkpoint.directory.discovery import Places
from lightning_megatron.checkpoint.directory.retention import Rotation
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.checkpoint.load.file_reader import Opening
from lightning_megatron.checkpoint.load.newest import open_newest, open_or_go_back
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.local.restore import LocalStock
from lightning_megatron.errors import ConfigError

AUTO = "auto"
"""Value of ``ckpt_path`` for the newest valid checkpoint, shared or local."""


_NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)"
_FIELD = re.compile(r"\{([^{}:]*)(?::[^{}]*)?\}")


class NoCheckpoint(dict[str, Any]):
    """Stand-in for a checkpoint where there is nothing to load.

    Lightning asks it for the version that wrote it, and restores nothing from a checkpoint that is
    false.
    """

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": version("lightning")})

    def __bool__(self) -> bool:
        return False


def find_checkpoint(
    path: str | os.PathLike[str],
    trainer: pl.Trainer,
    *,
    with_optimizers: bool,
    opening: Opening,
    stock: LocalStock | None = None,
) -> CheckpointReader | None:
    """Open the checkpoint that a run starts from; collective.

    Args:
        path: ``ckpt_path`` as Lightning passes it on.
        trainer: says where checkpoints are.
        with_optimizers: whether the run needs the state of the optimizers.
        opening: opens it.
        stock: what the nodes have of local checkpoints, which ``"auto"`` takes into account.

    Returns:
        None if it is ``"auto"`` and training starts from the beginning.

    Raises:
        ConfigError: ``"auto"`` finds nothing to evaluate.
        CheckpointError: it does not exist, or neither it nor another that may stand in is valid.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    if os.fspath(path) == AUTO:
        places = checkpoint_places(trainer)
        reader = open_newest(places, opening, with_optimizers=with_optimizers, stock=stock)
        looked = ", ".join(map(str, dict.fromkeys((*places.trees, *places.folders))))
        if reader is None and not fitting:
            raise ConfigError(
                f"ckpt_path='auto': there is no checkpoint in {looked}; nearest valid: the path of "
                "one, or None to use the weights that the module has"
            )
        if reader is None:
            rank_zero_info(f"ckpt_path='auto': no checkpoint in {looked}; starting from scratch")
    elif fitting and _is_last(storage_path(path), trainer):
        reader = open_or_go_back(
            storage_path(path),
            checkpoint_places(trainer),
            opening,
            with_optimizers=with_optimizers,
        )
    else:
        reader = opening(path)
    # Lightning shows it, and spares it when ModelCheckpoint deletes. Setting trainer.ckpt_path
    # would make every later run start from it as well.
    show_checkpoint_path(trainer, None if reader is None else str(reader.directory))
    return reader


def checkpoint_places(trainer: pl.Trainer) -> Places:
    """Return where the checkpoints of a Trainer are, this run's and those of runs before it.

    These are the directories of its ModelCheckpoint callbacks. Where the logger names them
    (``<name>/version_3/checkpoints``), every start has a new one: all versions count then. Beside
    them ``default_root_dir`` itself, where ``save_checkpoint`` of a script may have put some.
    """
    trees = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            trees.append(_all_versions(storage_path(callback.dirpath), trainer))
    root = storage_path(trainer.default_root_dir)
    return Places(trees=tuple(dict.fromkeys(trees)), folders=(root,))


def _all_versions(directory: AnyPath, trainer: pl.Trainer) -> AnyPath:
    if not trainer.loggers:
        return directory
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    above = storage_path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
    return above if directory == above / version / "checkpoints" else directory


def _is_last(path: AnyPath, trainer: pl.Trainer) -> bool:
    """Whether the name says that this is the newest state, not one in particular."""
    return any(
        isinstance(callback, ModelCheckpoint)
        and callback.dirpath is not None
        and path.parent == storage_path(callback.dirpath)
        and path.name.startswith(callback.CHECKPOINT_NAME_LAST)
        for callback in trainer.checkpoint_callbacks
    )


def rotations(trainer: pl.Trainer) -> tuple[Rotation, ...]:
    """Return what `retention.rotate` has to know of the Trainer's callbacks, as they are now."""
    spared = frozenset(path for callback in _callbacks(trainer) for path in _held(callback))
    if trainer.ckpt_path:
        spared |= {storage_path(trainer.ckpt_path)}
    return tuple(
        Rotation(directory=storage_path(callback.dirpath), names=names_of(callback), spared=spared)
        for callback in _callbacks(trainer)
        if callback.dirpath is not None
    )


def names_of(callback: ModelCheckpoint) -> str:
    """Return a regular expression of the paths that a callback makes below its directory.

    A field of the name is a number, after its own name and "=" if the callback puts them there. So
    ``{step}`` stands for ``step=7`` and not for every text.
    """
    template = callback.filename or f"{{epoch}}{callback.CHECKPOINT_JOIN_CHAR}{{step}}"
    parts, end = [], 0
    for field in _FIELD.finditer(template):
        parts.append(re.escape(template[end : field.start()]))
        if callback.auto_insert_metric_name:
            parts.append(re.escape(field[1] + callback.CHECKPOINT_EQUALS_CHAR))
        parts.append(_NUMBER)
        end = field.end()
    version = rf"(?:{re.escape(callback.CHECKPOINT_JOIN_CHAR)}v\d+)?"
    return "".join(parts) + re.escape(template[end:]) + version + re.escape(callback.FILE_EXTENSION)


def _held(callback: ModelCheckpoint) -> set[AnyPath]:
    # With save_top_k=-1 all of them are in best_k_models, which is no choice.
    best = callback.best_k_models if callback.save_top_k != -1 else ()
    held = {*best, callback.best_model_path, callback.last_model_path}
    return {storage_path(path) for path in held if path}


def _callbacks(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
