"""``state.json``, ``state.safetensors`` and ``objects.pkl``: all state that is not in shards.

They hold Lightning's checkpoint dictionary of the first rank; the options and non-tensor state of
the optimizers, united over ranks, as each pipeline stage has its own parameters; module state that
is neither parameter nor buffer; and the versions of the modules. Objects, which are neither plain
values nor tensors, are in ``objects.pkl``, which exists only where there are some.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from torch import Tensor

from lightning_megatron.checkpoint.chunks import StateMapping, chunks_of
from lightning_megatron.checkpoint.directory.hashed_files import encoded, read_text
from lightning_megatron.checkpoint.directory.manifest import (
    OBJECTS_FILE,
    STATE_FILE,
    STATE_TENSORS_FILE,
    Manifest,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot, merge_snapshots
from lightning_megatron.checkpoint.trainer_state.codec import Decoder, Encoder
from lightning_megatron.checkpoint.trainer_state.plain_pickle import load_plain
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError, raise_if_any

# Types, which are Lightning's own; a plain dict loads as well.
_HYPER_PARAMETERS = frozenset({"hyper_parameters", "datamodule_hyper_parameters"})
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
    """Content of the files."""

    json: bytes
    tensors: bytes | None
    objects: bytes | None
    aliases: Mapping[str, str]
    """Canonical names by alias, over all ranks."""

    def files(self) -> dict[str, bytes]:
        """Return the content of the files, by name."""
        files = {
            STATE_FILE: self.json,
            STATE_TENSORS_FILE: self.tensors,
            OBJECTS_FILE: self.objects,
        }
        return {name: content for name, content in files.items() if content is not None}


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
        ConfigError: values cannot be pickled; it names all of them.
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
        "state": {
            key: encoder.encode(_dict_of(value) if key in _HYPER_PARAMETERS else value, key)
            for key, value in state.items()
            if key not in _NOT_STORED
        },
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
        objects=_pickled(encoder.objects) if encoder.objects else None,
        aliases=aliases,
    )


def _dict_of(value: Any) -> Any:
    """Return another kind of mapping (of OmegaConf) as a dict, which is read without trust."""
    return dict(value) if isinstance(value, Mapping) else value


def _pickled(objects: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(objects), buffer)
    return buffer.getvalue()


def read_state_files(
    directory: AnyPath, manifest: Manifest, *, weights_only: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``state``, ``optimizers``, ``extras`` and, in newer checkpoints, ``versions``.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        weights_only: whether objects of classes that the user has not registered are left out.

    Returns:
        These, and the classes of objects that are left out, by their places.

    Raises:
        OSError: a file cannot be read.
        DamagedCheckpointError: the files are not the state of a checkpoint.
    """
    try:
        data = json.loads(read_text(directory / manifest.file(STATE_FILE)))
        tensors: dict[str, Tensor] = {}
        if (name := manifest.file(STATE_TENSORS_FILE)) in manifest.files:
            tensors = safetensors_load((directory / name).read_bytes())
        objects, left_out = _read_objects(directory, manifest, weights_only)
        content = Decoder(tensors, objects).decode(data)
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
    return content, left_out


def _read_objects(
    directory: AnyPath, manifest: Manifest, weights_only: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    if (name := manifest.file(OBJECTS_FILE)) not in manifest.files:
        return {}, {}
    content = io.BytesIO((directory / name).read_bytes())
    if weights_only:
        return load_plain(content, map_location="cpu")
    return torch.load(content, map_location="cpu", weights_only=False), {}
