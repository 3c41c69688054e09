"""The `Transformer` of a checkpoint, inside any module.

A `LanguageModel` stores the sizes in its hyper-parameters; so does any module of the user that
calls ``save_hyperparameters`` with a ``config``.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_megatron.checkpoint.load.file_reader import open_checkpoint
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import config_from_hugging_face
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.models.weights import EMBEDDING


def load_transformer(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> Transformer:
    """Return the model of a checkpoint directory of any layout, with the stored dtype.

    Args:
        path: a checkpoint directory.
        device: device of the weights.

    Raises:
        ConfigError: the checkpoint has no sizes of a Transformer, or weights of other sizes.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    reader = open_checkpoint(path, alone=True)
    prefix = transformer_prefix(reader)
    with torch.device("meta"):
        model = Transformer(config_of(reader))
    stored = load_full_state_dict(path, device=device)
    state = {n.removeprefix(prefix): v for n, v in stored.items() if n.startswith(prefix)}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"{reader.directory}: the weights do not fit the stored hyper-parameters: {error}"
        ) from None
    return model


def stored_config(path: str | os.PathLike[str]) -> TransformerConfig:
    """Return the sizes of the model in a checkpoint directory, from its hyper-parameters.

    Raises:
        ConfigError: its module had no hyper-parameter ``config`` with the sizes.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    return config_of(open_checkpoint(path, alone=True))


def config_of(
    reader: CheckpointReader, theirs: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Return the sizes of the model in an open checkpoint.

    Args:
        reader: the checkpoint.
        theirs: a ``config.json`` with the sizes, in case the checkpoint has none.

    Raises:
        ConfigError: neither has the sizes.
    """
    stored = (reader.state.get("hyper_parameters") or {}).get("config")
    if isinstance(stored, TransformerConfig):
        return stored
    if isinstance(stored, dict) and stored.keys() <= TransformerConfig.__dataclass_fields__.keys():
        return TransformerConfig.from_fields(stored)
    if theirs is not None:
        return config_from_hugging_face(theirs)
    raise ConfigError(
        f"{reader.directory} has no hyper-parameter 'config' with the sizes of a Transformer; "
        "nearest valid: config=TransformerConfig(...), or like= a model directory of these sizes"
    )


def holds_transformer(reader: CheckpointReader) -> bool:
    """Whether the module that was saved has a `Transformer`."""
    return any(name.endswith(EMBEDDING) for name in reader.model_names())


def transformer_prefix(reader: CheckpointReader) -> str:
    """Return the prefix of the `Transformer`'s names in the module that was saved.

    Raises:
        ConfigError: the module has no Transformer, or more than one.
    """
    found = [n.removesuffix(EMBEDDING) for n in reader.model_names() if n.endswith(EMBEDDING)]
    if len(found) != 1:
        raise ConfigError(
            f"{reader.directory} has {len(found)} tensors named {EMBEDDING}: must be one; nearest "
            "valid: the checkpoint of a module with one Transformer, or, for an adopted model of "
            "transformers, --like its model directory"
        )
    return found[0]
