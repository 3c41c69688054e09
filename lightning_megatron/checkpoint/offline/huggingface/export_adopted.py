"""The export of a checkpoint of an adopted model as a Hugging Face model, in one process.

The checkpoint has the names of the library's model, below that of the attribute of the
LightningModule which held it. The model is built on the meta device, takes the weights of the
checkpoint, and saves itself; that needs the memory of the whole model.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.directory.commit import Staging
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.errors import ConfigError, raise_if_any


def export_adopted(
    reader: CheckpointReader,
    target: Path,
    like: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    """Write the weights of a checkpoint as the model that a directory describes.

    Args:
        reader: the checkpoint.
        target: the directory to make; nothing is there, or it may be replaced.
        like: a model directory with ``config.json``.
        dtype: dtype of the weights; the stored one when None.
        max_shard_bytes: largest size of a file, unless a single tensor is larger.

    Raises:
        ConfigError: the checkpoint does not hold all weights of that model.
        CheckpointError: writing failed.
    """
    model = _built(like)
    names = list(model.state_dict())
    prefix = _prefix(reader, names, like)
    state = {}
    for name in names:
        value = reader.tensor(_stored(reader, prefix + name) or "")
        state[name] = value.to(dtype) if dtype is not None and value.is_floating_point() else value
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ConfigError(f"{reader.directory}: its weights do not fit {like}: {error}") from None
    model.tie_weights()
    staging = Staging(target, Staging.new_token())
    try:
        staging.create()
        model.save_pretrained(staging.directory, max_shard_size=max_shard_bytes)
        staging.publish()
    except OSError as error:
        total = sum(value.nbytes for value in state.values())
        raise write_error(error, staging.directory, total) from error
    finally:
        staging.discard()


def _built(like: Path) -> Any:
    """The library's model, on the meta device."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ConfigError(
            "--to hf of an adopted model needs transformers; nearest valid: pip install "
            "'lightning-megatron[hf]'"
        ) from None
    config = transformers.AutoConfig.from_pretrained(like)
    name = (config.architectures or [None])[0]
    kind = None if name is None else getattr(transformers, name, None)
    if kind is None:
        raise ConfigError(f"{like}: architectures names {name}, which transformers does not have")
    with torch.device("meta"):
        model = kind(config)
    if model.can_generate() and (like / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(like)
    return model


def _stored(reader: CheckpointReader, name: str) -> str | None:
    return reader.stored_name(name)


def _prefix(reader: CheckpointReader, names: Sequence[str], like: Path) -> str:
    """What the names of the checkpoint have before those of the model.

    Raises:
        ConfigError: they are not those of the model.
    """
    last = names[-1]
    stored = [*reader.model_names(), *reader.manifest.aliases]
    prefixes = {n.removesuffix(last) for n in stored if n == last or n.endswith(f".{last}")}
    missing = {
        prefix: [n for n in names if _stored(reader, prefix + n) is None] for prefix in prefixes
    }
    fitting = sorted(prefix for prefix, lacks in missing.items() if not lacks)
    if len(fitting) == 1:
        return fitting[0]
    closest = min(missing.values(), key=len, default=list(names))
    raise_if_any(
        [
            f"{os.fspath(reader.directory)}: {name} of the model in {like} is not in the checkpoint"
            for name in closest[:5]
        ]
    )
    raise ConfigError(
        f"{os.fspath(reader.directory)} holds {len(fitting)} models like {like}, below "
        f"{', '.join(fitting)}: must be one"
    )
