"""The export of a checkpoint of any layout as a Hugging Face model, in one process.

Tensors are read, renamed and written one at a time, into files of limited size with an index, which
the library itself, vLLM and SGLang read. The directory is built under a hidden name and renamed
when it is complete and on disk.

*Adopted models.* The checkpoint has the names of the library's model, below that of the attribute
of the LightningModule which held it. The model is built on the meta device, takes the weights of
the checkpoint, and saves itself; that needs the memory of the whole model.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.directory.commit import Staging, write_durably
from lightning_megatron.checkpoint.directory.manifest import TensorEntry, local_path
from lightning_megatron.checkpoint.load.file_reader import open_checkpoint
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX, CheckpointReader
from lightning_megatron.checkpoint.offline.huggingface.directory import (
    CONFIG_FILE,
    INDEX_FILE,
    is_hugging_face,
    read_config,
)
from lightning_megatron.checkpoint.offline.huggingface.safetensors_file import (
    TensorInfo,
    write_safetensors,
)
from lightning_megatron.checkpoint.offline.huggingface.transformer import (
    config_of,
    holds_transformer,
    transformer_prefix,
)
from lightning_megatron.checkpoint.offline.offline_writer import groups
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import config_to_hugging_face
from lightning_megatron.models.weights import Weight, shapes_of, weights_of

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a model directory that stay the same in training."""


def export_hugging_face(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    config: TransformerConfig | None = None,
    model_type: str | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face model.

    ``AutoModelForCausalLM.from_pretrained(directory)`` reads it. The export needs the memory of
    about three times the largest tensor.

    Args:
        path: a checkpoint directory of any layout, of a module with a `Transformer` in it; with
            ``like``, or with an adopted model in it, which may be of any family.
        directory: the directory to make.
        config: sizes of the model; those in the checkpoint's hyper-parameters when None.
        model_type: the family to write (``llama`` or ``mistral``, if both fit); that of ``like``,
            or the first that fits, when None.
        like: a model directory, like the imported one, whose family, ids of special tokens,
            tokenizer and generation options are copied.
        dtype: dtype of the weights; the stored one when None.
        max_shard_bytes: largest size of a file, unless a single tensor is larger.
        overwrite: whether to replace a model directory that is there.

    Raises:
        ConfigError: no family fits the model, or the checkpoint does not fit its sizes; it has all
            faults. Nothing was written.
        CheckpointError: the checkpoint does not exist or is damaged, or writing failed.
    """
    target = local_path(directory)
    raise_if_any(_target_problems(target, overwrite))
    reader = open_checkpoint(path, alone=True)
    theirs = None if like is None else read_config(local_path(like), os.fspath(like))
    if like is not None and config is None and not holds_transformer(reader):
        export_adopted(
            reader, target, local_path(like), dtype=dtype, max_shard_bytes=max_shard_bytes
        )
        _copy_companions(local_path(like), target, only_missing=True)
        return
    config = config or config_of(reader, theirs)
    fields = config_to_hugging_face(config, model_type or (theirs or {}).get("model_type"))
    fields |= {name: theirs[name] for name in _TOKEN_IDS if theirs and name in theirs}
    weights = weights_of(config, fields["model_type"])
    writing = _Writing(reader, weights, config, dtype)
    fields["torch_dtype"] = str(writing.infos[weights[0].name].dtype).removeprefix("torch.")
    staging = Staging(target, Staging.new_token())
    try:
        staging.create()
        total = writing.write(staging.directory, max_shard_bytes)
        _write_json(staging.directory / CONFIG_FILE, fields)
        if like is not None:
            _copy_companions(local_path(like), staging.directory)
        staging.publish()
    except OSError as error:
        total = sum(info.size for info in writing.infos.values())
        raise write_error(error, staging.directory, total) from error
    finally:
        staging.discard()


class _Writing:
    """Writes tensors of the checkpoint to files."""

    def __init__(
        self,
        reader: CheckpointReader,
        weights: Sequence[Weight],
        config: TransformerConfig,
        dtype: torch.dtype | None,
    ) -> None:
        self._reader = reader
        self._weights = {weight.name: weight for weight in weights}
        self._prefix = transformer_prefix(reader)
        self._stored: dict[str, str] = {}
        """Name in the checkpoint of every tensor of ours."""
        raise_if_any(self._find(shapes_of(config)))
        self.infos = {
            weight.name: TensorInfo(
                dtype=(None if weight.keeps_dtype else dtype)
                or self._entry(weight.ours[0]).torch_dtype,
                shape=weight.shape,
            )
            for weight in weights
        }

    def _find(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Find every tensor of the model in the checkpoint; return faults."""
        problems, used = [], set()
        for name, shape in shapes.items():
            stored = self._reader.stored_name(self._prefix + name)
            if stored is None:
                problems.append(f"{name}: a weight of the model that the checkpoint does not have")
                continue
            self._stored[name] = stored
            used.add(stored)
            found = self._entry(name).shape
            if found != shape:
                problems.append(f"{name}: shape {found} in the checkpoint, the model has {shape}")
        problems += [
            f"{name}: not a weight of this model"
            for name in (*self._reader.model_names(), *self._reader.extras)
            if name not in used
        ]
        return problems

    def _entry(self, name: str) -> TensorEntry:
        return self._reader.manifest.tensors[f"{MODEL_PREFIX}.{self._stored[name]}"]

    def write(self, directory: Path, max_shard_bytes: int) -> int:
        """Write all files and their index; return the bytes of all tensors."""
        sizes = ((name, info.size) for name, info in self.infos.items())
        shards = list(groups(sizes, max_shard_bytes))
        places: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_safetensors(
                directory / file, {name: self.infos[name] for name in names}, self._value
            )
            places |= dict.fromkeys(names, file)
        total = sum(info.size for info in self.infos.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(directory / INDEX_FILE, index)
        return total

    def _value(self, name: str) -> Tensor:
        weight = self._weights[name]
        parts = [self._reader.tensor(self._stored[part], weight.expert) for part in weight.ours]
        return weight.to_theirs(parts)


def _target_problems(target: Path, overwrite: bool) -> list[str]:
    if not os.path.lexists(target):
        return []
    if not overwrite:
        return [f"{target} exists; nearest valid: another path, or overwrite=True"]
    if not is_hugging_face(target):
        return [
            f"{target} exists and is no model directory: it is not overwritten; nearest valid: "
            "another path"
        ]
    return []


def _copy_companions(source: Path, directory: Path, *, only_missing: bool = False) -> None:
    for name in _COMPANIONS:
        if (source / name).is_file() and not (only_missing and (directory / name).exists()):
            shutil.copyfile(source / name, directory / name)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    write_durably(file, (json.dumps(content, indent=2) + "\n").encode())


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
    """Prefix of the checkpoint's names before those of the model.

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
