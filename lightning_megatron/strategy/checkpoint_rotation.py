"""Which checkpoints ModelCheckpoint makes in turn, and which of them it holds on to."""

import re

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint.directory.retention import Rotation
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path

_NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)"
_FIELD = re.compile(r"\{([^{}:]*)(?::[^{}]*)?\}")


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
