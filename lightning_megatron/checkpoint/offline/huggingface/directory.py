"""A model directory of the Hugging Face library, opened for reading.

::

    config.json                      sizes
    model.safetensors.index.json     which tensor lies in which file; absent with a single file
    model-00001-of-00003.safetensors ...

Only these files are read. ``pytorch_model.bin`` and the like are pickles, which run code when they
are loaded, and are never opened. Names of files come from the index, so they must be plain names:
files outside the directory are out of reach. (A file may be a link, as in the library's cache.)
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_megatron.checkpoint.directory.hashed_files import is_file_name, read_text
from lightning_megatron.checkpoint.directory.manifest import local_path
from lightning_megatron.checkpoint.offline.huggingface.safetensors_file import (
    SafetensorsFile,
    TensorInfo,
)
from lightning_megatron.errors import CheckpointError, ConfigError, raise_if_any

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class HuggingFaceDirectory:
    """A model directory; only names and shapes are in memory.

    Args:
        path: the directory.

    Attributes:
        path: the directory.
        config: the content of ``config.json``.
        tensors: the file of every tensor, by name.

    Raises:
        ConfigError: the path is no such directory, is incomplete, or has weights in another form.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        self.config = read_config(self.path, os.fspath(path))
        index, problems = self._index()
        opened: dict[str, SafetensorsFile] = {}
        for name in dict.fromkeys(index.values()):
            try:
                opened[name] = SafetensorsFile(self.path / name)
            except CheckpointError as error:
                problems.append(f"{self.path}: {error}")
        problems += [
            f"{tensor}: {INDEX_FILE} says that it is in {name}, which does not hold it"
            for tensor, name in index.items()
            if name in opened and tensor not in opened[name].tensors
        ]
        raise_if_any(problems)
        self.tensors = {tensor: opened[name] for tensor, name in index.items()}

    def info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor."""
        return self.tensors[name].tensors[name]

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return self.tensors[name].read(name)

    def _index(self) -> tuple[dict[str, str], list[str]]:
        """Return the name of the file of every tensor, and faults."""
        if (self.path / INDEX_FILE).is_file():
            index = read_json(self.path / INDEX_FILE).get("weight_map")
            if not isinstance(index, dict):
                return {}, [f"{self.path / INDEX_FILE} has no weight_map"]
            wrong = [
                f"{INDEX_FILE}: {name!r} is not the name of a safetensors file of this directory"
                for name in dict.fromkeys(map(str, index.values()))
                if not is_file_name(name) or not name.endswith(".safetensors")
            ]
            return ({}, wrong) if wrong else (index, [])
        if (self.path / SINGLE_FILE).is_file():
            try:
                names = SafetensorsFile(self.path / SINGLE_FILE).tensors
            except CheckpointError as error:
                return {}, [f"{self.path}: {error}"]
            return dict.fromkeys(names, SINGLE_FILE), []
        pickled = sorted(p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            return {}, [
                f"{self.path} has its weights in {', '.join(pickled[:3])}: pickles run code when "
                "they are loaded, and are never read; nearest valid: where you trust the files, "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) of the "
                "transformers library writes safetensors"
            ]
        return {}, [f"{self.path} has neither {INDEX_FILE} nor {SINGLE_FILE}"]


def read_config(directory: Path, given: str = "") -> dict[str, Any]:
    """Return the content of the ``config.json`` of a directory.

    Args:
        directory: the directory.
        given: the directory as the user wrote it.

    Raises:
        ConfigError: the file is missing, or not JSON.
    """
    if not directory.is_dir():
        remedy = ""
        if _HUB_NAME.fullmatch(given):
            remedy = f"; nearest valid: hf download {given} --local-dir DIR, and then DIR"
        raise ConfigError(f"{directory}: there is no such directory{remedy}")
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{directory} has no {CONFIG_FILE}, so it is no model directory of Hugging Face; "
            "nearest valid: a directory that save_pretrained(DIR) wrote"
        )
    return read_json(directory / CONFIG_FILE)


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which must be an object.

    Raises:
        ConfigError: the file is no such file.
    """
    try:
        data = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return data


def is_hugging_face(path: Path) -> bool:
    """Return whether a directory is a model directory of Hugging Face with safetensors."""
    return (path / CONFIG_FILE).is_file() and any(
        (path / name).is_file() for name in (INDEX_FILE, SINGLE_FILE)
    )
