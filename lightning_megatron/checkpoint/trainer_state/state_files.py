"""``state.json`` and ``state.safetensors``: all state that is not in shards.

They hold Lightning's checkpoint dictionary of the first rank; the options and non-tensor state of
the optimizers, united over ranks, as each pipeline stage has its own parameters; module state that
is neither parameter nor buffer; and the versions of the modules.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from torch import Tensor

from lightning_megatron.checkpoint.chunks import StateMapping, chunks_of
from lightning_megatron.checkpoint.directory.hashed_files import encoded, read_text
from lightning_megatron.checkpoint.directory.manifest import (
    STATE_FILE,
    STATE_TENSORS_FILE,
    Manifest,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot, merge_snapshots
from lightning_megatron.checkpoint.trainer_state.codec import Decoder, Encoder
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError, raise_if_any

logger = logging.getLogger(__name__)

_HYPER_PARAMETERS = frozenset({"hyper_parameters", "datamodule_hyper_parameters"})
# Types, which are Lightning's own; a plain dict loads as well.
_NOT_STORED = frozenset({"hparams_type", "datamodule_hparams_type"})


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank without tensors."""

    aliases: Mapping[str, str]
    """Canonical names by alias."""
    extras: Mapping[str, Any]
    optimizers: Sequence[OptimizerSnapshot]
    versions: Mapping[str, int | str]
    """Versions of the modules, by name, where they are not torch's default."""


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """Content of the two files."""

    json: bytes
    tensors: bytes | None
    aliases: Mapping[str, str]
    """Canonical names by alias, over all ranks."""

    def files(self) -> dict[str, bytes]:
        """Return the content of the files, by name."""
        files = {STATE_FILE: self.json}
        return files if self.tensors is None else {**files, STATE_TENSORS_FILE: self.tensors}


def rank_state(model: Mapping[str, Any], optimizers: Sequence[OptimizerSnapshot]) -> RankState:
    """Return the state of this rank without tensors."""
    chunks = chunks_of(model)
    return RankState(
        aliases={alias: name for name, chunk in chunks.items() for alias in chunk.aliases},
        extras={name: value for name, value in model.items() if name not in chunks},
        optimizers=[snapshot.without_tensors() for snapshot in optimizers],
        versions=model.versions if isinstance(model, StateMapping) else {},
    )


def join_states(state: Mapping[str, Any], states: Sequence[RankState]) -> StateFiles:
    """Join the states of all ranks to the content of the files; on the first rank.

    Raises:
        ConfigError: values cannot be stored; it names all of them.
        CheckpointError: the file would be too large to be read.
    """
    if len({len(c.optimizers) for c in states}) != 1:
        raise CheckpointError("the ranks have different numbers of optimizers")
    snapshots = zip(*(c.optimizers for c in states), strict=True)
    extras: dict[str, Any] = {}
    versions: dict[str, int | str] = {}
    for one in reversed(states):  # the lowest rank that has one decides
        extras |= one.extras
        versions |= one.versions
    encoder = Encoder()
    content = {
        "state": _encode_lightning_state(state, encoder),
        "optimizers": encoder.encode([merge_snapshots(s) for s in snapshots], "optimizers"),
        "extras": encoder.encode(extras, "state_dict"),
        "versions": encoder.encode(versions, "versions"),
    }
    raise_if_any(encoder.problems)
    aliases: dict[str, str] = {}
    for one in states:
        aliases |= one.aliases
    return StateFiles(
        json=encoded(STATE_FILE, json.dumps(content, allow_nan=False)),
        tensors=safetensors_save(encoder.tensors) if encoder.tensors else None,
        aliases=aliases,
    )


def _encode_lightning_state(state: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Encode the checkpoint dictionary; hyper-parameters that cannot be stored are left out."""
    encoded = {}
    for key, value in state.items():
        if key in _HYPER_PARAMETERS and isinstance(value, Mapping):
            encoded[key] = _encode_hyper_parameters(key, value, encoder)
        elif key not in _NOT_STORED:
            encoded[key] = encoder.encode(value, key)
    return encoded


def _encode_hyper_parameters(
    name: str, values: Mapping[str, Any], encoder: Encoder
) -> dict[str, Any]:
    encoded = {}
    for key, value in values.items():
        trial = Encoder()
        data = trial.encode(value, f"{name}.{key}")
        if not trial.problems:
            encoded[str(key)] = data
            encoder.tensors |= trial.tensors
            continue
        logger.warning(
            "Hyper-parameter %r is not stored: %s. Give it to load_from_checkpoint, or exclude it "
            "by save_hyperparameters(ignore=[%r]).",
            key,
            trial.problems[0],
            key,
        )
    return encoded


def read_state_files(directory: AnyPath, manifest: Manifest) -> dict[str, Any]:
    """Return ``state``, ``optimizers``, ``extras`` and, in newer checkpoints, ``versions``.

    Raises:
        OSError: a file cannot be read.
        DamagedCheckpointError: the files are not the state of a checkpoint.
    """
    try:
        data = json.loads(read_text(directory / manifest.file(STATE_FILE)))
        tensors: dict[str, Tensor] = {}
        if (name := manifest.file(STATE_TENSORS_FILE)) in manifest.files:
            tensors = safetensors_load((directory / name).read_bytes())
        content = Decoder(tensors).decode(data)
    except OSError:
        raise
    except Exception as error:  # the readers raise all kinds of errors for garbage
        raise DamagedCheckpointError(f"the state cannot be read: {error!r}") from error
    shapes = (("state", dict), ("extras", dict), ("optimizers", list))
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), kind) for key, kind in shapes
    ):
        raise DamagedCheckpointError(f"{STATE_FILE} is not the state of a checkpoint")
    versions = content.get("versions", {})
    if not isinstance(versions, dict) or any(type(v) not in (int, str) for v in versions.values()):
        raise DamagedCheckpointError(f"{STATE_FILE} has no versions of modules")
    return content
