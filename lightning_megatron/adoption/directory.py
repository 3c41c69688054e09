"""`adopt("directory")`: a model whose weights stay in their files until each rank reads its own.

transformers itself builds the model and finds the tensor of every parameter: renamed, cast, tied,
merged from the experts' own, or initialised where the directory has none. It is given
`StoredTensor` for tensors, so that all of it takes no memory and reads nothing. `build.init` reads
them unit by unit, after the model has been divided.

Only ``config.json``, the index and safetensors files are read. Files are read with ``pread``: pages
of a mapped file count as memory of the process.
"""

import json
import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.safetensors_dtypes import SAFETENSORS_DTYPES
from lightning_megatron._torch.wrappers import without_modes
from lightning_megatron.build.stored_tensor import StoredTensor
from lightning_megatron.errors import ConfigError, raise_if_any

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER = "adapter_config.json"
_BLOCK = 1 << 22
"""Bytes that are read at once where only a part of each row is kept."""
_MOST_HEADER = 100_000_000


def open_directory(
    path: str | os.PathLike[str], model_class: type[Any] | None, **options: Any
) -> nn.Module:
    """Return the model of a directory, with `StoredTensor` for weights.

    Args:
        path: a directory that ``save_pretrained`` wrote.
        model_class: class of transformers, or one of its auto classes; the one that the directory
            names when None.
        options: further arguments of ``from_pretrained``: ``dtype``, ``attn_implementation``,
            ``subfolder``, attributes of the configuration.

    Raises:
        ConfigError: the directory is none of a model, is damaged, or has quantised weights; or an
            option is not one that a directory has.
    """
    directory = Path(path) / (options.pop("subfolder", None) or "")
    named = _config(directory, os.fspath(directory))
    _refuse_idle(options)
    transformers: Any = import_module("transformers")
    of_model = {name: options.pop(name) for name in _OF_MODEL if name in options}
    with without_modes():
        config, rest = transformers.AutoConfig.from_pretrained(
            directory, return_unused_kwargs=True, **options
        )
        raise_if_any([_unknown(name, config) for name in rest])
        trusted = bool(options.get("trust_remote_code"))
        kind = _class_of(transformers, config, named, model_class, directory, trusted)
        state = {name: StoredTensor.of(part) for name, part in stored_parts(directory).items()}
        model = kind.from_pretrained(None, config=config, state_dict=state, **of_model)
        model.config.name_or_path = model.name_or_path = os.fspath(path)
        if model.can_generate():
            model.generation_config = _generation_config(transformers, directory)
    assert isinstance(model, nn.Module)
    return model


class StoredPart:
    """Tensor in a safetensors file.

    Args:
        file: the file.
        offset: of its first byte in the file.
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(self, file: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.file = file
        self.offset = offset
        self.shape = shape
        self.dtype = dtype

    def read(self, window: tuple[tuple[int, int], ...]) -> Tensor:
        """Return the values inside of a window: first index and length along each dimension."""
        with self.file.open("rb", buffering=0) as file:
            if not window:
                return self._read(file.fileno(), 0, 1).reshape(())
            (start, length), inner = window[0], window[1:]
            full = tuple((0, size) for size in self.shape[1:])
            width = math.prod(self.shape[1:])
            if inner == full:
                return self._read(file.fileno(), start * width, length * width).view(
                    length, *self.shape[1:]
                )
            out = torch.empty([n for _, n in window], dtype=self.dtype, device="cpu")
            rows = max(1, _BLOCK // max(width * self.dtype.itemsize, 1))
            for first in range(0, length, rows):
                count = min(rows, length - first)
                read = self._read(file.fileno(), (start + first) * width, count * width)
                part = read.view(count, *self.shape[1:])
                for dim, (begin, kept) in enumerate(inner, 1):
                    part = part.narrow(dim, begin, kept)
                out[first : first + count] = part
            return out

    def _read(self, descriptor: int, first: int, count: int) -> Tensor:
        size = self.dtype.itemsize
        values = torch.empty(count * size, dtype=torch.uint8, device="cpu")
        memory, done = values.numpy().data, 0
        while done < count * size:
            got = os.preadv(descriptor, [memory[done:]], self.offset + first * size + done)
            if got == 0:
                raise ConfigError(f"{self.file}: ends before its last tensor does")
            done += got
        return values.view(self.dtype)


def stored_parts(directory: Path) -> dict[str, StoredPart]:
    """Return the tensors of a model directory by name.

    Raises:
        ConfigError: there are no safetensors files, or they are damaged.
    """
    if (directory / _SINGLE).is_file():  # transformers prefers it to an index beside it
        return _parts_of(directory / _SINGLE)
    index = directory / _INDEX
    if not index.is_file():
        raise ConfigError(
            f"{directory} has neither {_SINGLE} nor {_INDEX}; nearest valid: a directory that "
            "save_pretrained(DIR) of transformers wrote"
        )
    places: Mapping[str, str] = _json(index).get("weight_map") or {}
    names = sorted(set(places.values()))
    outside = [name for name in names if name != os.path.basename(name)]
    raise_if_any([f"{index}: {name!r} is not the name of a file beside it" for name in outside])
    files = {name: _parts_of(directory / name) for name in names}
    raise_if_any(
        [
            f"{index} says that {tensor} is in {name}, which does not hold it"
            for tensor, name in places.items()
            if tensor not in files[name]
        ]
    )
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _parts_of(file: Path) -> dict[str, StoredPart]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MOST_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(opened.read(size))
            end = opened.seek(0, os.SEEK_END) - 8 - size
        header.pop("__metadata__", None)
        parts = {}
        for name, entry in header.items():
            (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
            dtype = SAFETENSORS_DTYPES[entry["dtype"]]
            if not 0 <= first <= last <= end or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} is not inside of the file")
            parts[name] = StoredPart(file, 8 + size + first, shape, dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no safetensors file that can be read: {error}") from error
    return parts


def _config(directory: Path, given: str) -> Mapping[str, Any]:
    """Content of ``config.json``.

    Raises:
        ConfigError: there is none, or it is of a model that cannot be adopted so.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"adopt({given!r}): there is no such directory; nearest valid: one that "
            "save_pretrained(DIR) or `hf download NAME --local-dir DIR` made, or "
            "adopt(Model.from_pretrained(NAME))"
        )
    if (directory / _ADAPTER).is_file():
        raise ConfigError(
            f"adopt({given!r}) is a directory of adapters; nearest valid: "
            "PeftModel.from_pretrained(adopt(BASE_DIRECTORY), this one)"
        )
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"adopt({given!r}) has no config.json, so it is no model directory; nearest valid: a "
            "directory that save_pretrained(DIR) wrote"
        )
    config = _json(directory / "config.json")
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown")
        raise ConfigError(
            f"adopt({given!r}): its weights are quantised ({method}), and would be neither trained "
            "nor split; nearest valid: the directory of the unquantised model"
        )
    return config


def _json(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return data


def _class_of(
    transformers: Any,
    config: Any,
    named: Mapping[str, Any],
    given: type[Any] | None,
    directory: Path,
    trusted: bool,
) -> Any:
    """Class of the model: the given one, that of an auto class, or that of ``config.json``."""
    if given is not None:
        if hasattr(given, "config_class"):
            return given
        with torch.device("meta"):  # an auto class
            return type(given.from_config(config, trust_remote_code=trusted))
    name = (named.get("architectures") or [None])[0]
    found = None if name is None else getattr(transformers, name, None)
    if found is None:
        raise ConfigError(
            f"{directory / 'config.json'}: architectures names {name}, which transformers does "
            "not have; nearest valid: adopt(directory, model_class=AutoModelForCausalLM), or the "
            "class itself"
        )
    return found


def _generation_config(transformers: Any, directory: Path) -> Any:
    kind = transformers.GenerationConfig
    try:
        return kind.from_pretrained(directory)
    except OSError:
        return kind.from_pretrained(
            directory, config_file_name="config.json", _from_model_config=True
        )


def _unknown(name: str, config: Any) -> str:
    return (
        f"adopt(directory, {name}=...): neither an option of {type(config).__name__} nor one of "
        f"{', '.join(_OF_MODEL)}; nearest valid: leave it out"
    )


_OF_MODEL = (
    "dtype",
    "attn_implementation",
    "experts_implementation",
    "ignore_mismatched_sizes",
    "key_mapping",
)
_OF_DEVICES = (
    "device_map",
    "tp_plan",
    "tp_size",
    "device_mesh",
    "distributed_config",
    "max_memory",
)


_OF_DOWNLOADS = (
    "revision",
    "code_revision",
    "gguf_file",
    "cache_dir",
    "force_download",
    "proxies",
    "token",
    "return_unused_kwargs",
)
"""Arguments that ``AutoConfig`` takes without a word."""


def _refuse_idle(options: Mapping[str, Any]) -> None:
    """Refuse arguments that say on which device which weights are, or where to download them."""
    raise_if_any(
        [
            f"adopt(directory, {name}=...): MegatronStrategy(tp=, pp=, zero=) decides where "
            "weights are; nearest valid: leave it out"
            for name in _OF_DEVICES
            if options.get(name) is not None
        ]
        + [
            "adopt(directory, quantization_config=...): quantised weights are neither trained nor "
            "split; nearest valid: dtype=torch.bfloat16"
            for name in ("quantization_config", "load_in_8bit", "load_in_4bit")
            if options.get(name)
        ]
        + [
            f"adopt(directory, {name}={options[name]!r}): the configuration and safetensors files "
            f"of the directory are read as they are; nearest valid: leave it out, or give it to "
            "`hf download NAME --local-dir DIR`, and DIR to adopt"
            for name in options
            if name in _OF_DOWNLOADS or name.startswith("_")
        ]
    )
