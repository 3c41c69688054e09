"""What a checkpoint directory contains, and the JSON file that says so.

::

    epoch=0-step=500.ckpt/
        manifest.json       this file's `Manifest`; written last, so a directory without it is torn
        state.json          Lightning's state and optimizer options (codec.py)
        state.safetensors   tensors of that state; absent when it has none
        .metadata           index of the shards, written by torch.distributed.checkpoint
        __0_0.distcp ...    shards: ``model.<name>``, ``optimizer.<i>.<name>.<key>``

The directory is flat and the manifest lists every other file with its size, so that a truncated,
missing or foreign file is found before anything is read, and no name can leave the directory. The
entry of a file has room for a content hash.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CheckpointError, ConfigError

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
STATE_TENSORS_FILE = "state.safetensors"
METADATA_FILE = ".metadata"

SCHEMA = 1
"""Raised when older readers can no longer read what is written."""

_FILE_NAME = re.compile(r"(?!\.\.?$)[\w.=+-]{1,255}")
_LIBRARIES = ("torch", "lightning", "lightning-megatron")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the checkpoint."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """Hash of the content, where one was taken."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Summary of a checkpoint."""

    schema: int = SCHEMA
    """Version of the format."""
    step: int | None = None
    """Optimizer steps taken."""
    epoch: int | None = None
    """Epoch of the training loop."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Degrees under which it was written; for information, any other can read it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every other file of the directory."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of shared parameters, and the name under which each is stored."""
    optimizers: int = 0
    """Number of optimizers whose state is stored."""

    def to_json(self) -> str:
        """Return the content of ``manifest.json``."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the content of ``manifest.json``; fields of later versions are ignored.

        Raises:
            CheckpointError: it is not a manifest, or one of a newer schema.
        """
        try:
            data = json.loads(text)
            if not isinstance(data["schema"], int) or data["schema"] > SCHEMA:
                raise CheckpointError(
                    f"schema {data['schema']!r}: this version reads schemas up to {SCHEMA}; "
                    f"written by {data.get('versions')}"
                )
            known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
            known["files"] = {name: _entry(name, e) for name, e in data["files"].items()}
            manifest = cls(**known)
            _check_mappings(manifest)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST_FILE} is not a manifest: {error!r}") from error
        return manifest


def _entry(name: str, data: Mapping[str, Any]) -> FileEntry:
    if not is_file_name(name) or type(data["size"]) is not int or data["size"] < 0:
        raise ValueError(f"entry {name!r}: {data!r}")
    return FileEntry(size=data["size"], sha256=data.get("sha256"))


def _check_mappings(manifest: Manifest) -> None:
    names = (*manifest.aliases.items(), *manifest.versions.items())
    if not all(isinstance(part, str) for pair in names for part in pair):
        raise TypeError("a name is not a string")


def is_file_name(name: str) -> bool:
    """Whether ``name`` can be a file of a checkpoint: a plain name without directories."""
    return _FILE_NAME.fullmatch(name) is not None


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a checkpoint depends on."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as an absolute path of this machine's file system.

    Raises:
        ConfigError: it is the URL of a remote file system.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(
            f"checkpoint path {text!r}: checkpoints are directories of a shared file system; "
            "nearest valid: a path without a scheme"
        )
    return Path(os.path.abspath(text))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a complete checkpoint directory (its content is not verified)."""
    return "://" not in os.fspath(path) and Path(path, MANIFEST_FILE).is_file()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint directory.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    directory = local_path(path)
    try:
        text = (directory / MANIFEST_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory}: {_why_no_manifest(directory, error)}") from error
    try:
        return Manifest.from_json(text)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def _why_no_manifest(directory: Path, error: Exception) -> str:
    if not directory.exists():
        return "there is no such checkpoint"
    if not directory.is_dir():
        return "this is a file, not a checkpoint directory"
    if isinstance(error, FileNotFoundError):
        return f"no {MANIFEST_FILE}: not a checkpoint of this library, or one that was not finished"
    return f"{MANIFEST_FILE} cannot be read: {error}"


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare the directory with its manifest.

    Raises:
        CheckpointError: a file is missing, is not a file inside the directory, or has another size.
    """
    faults = []
    root = directory.resolve()
    for name, entry in manifest.files.items():
        path = directory / name
        if path.is_symlink() and path.resolve().parent != root:
            faults.append(f"{name} is a link out of the checkpoint")
        elif not path.is_file():
            faults.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.size:
            faults.append(f"{name} has {size} bytes, not the {entry.size} that were written")
    required = {STATE_FILE, METADATA_FILE} - manifest.files.keys()
    faults += [f"{name} is not in the manifest" for name in sorted(required)]
    if faults:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(faults)}")
