"""Checkpoints to damage, and ways to do it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from lightning_megatron.checkpoint.chunks import model_chunks, parameter_names
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.directory.hashed_files import entry_of
from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    ChunkEntry,
    Manifest,
    Part,
    part_file,
    part_text,
    read_manifest,
)
from lightning_megatron.checkpoint.optimizer_state import capture_optimizer


def filled(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def save(path: Path, value: float = 1.0, step: int = 0, *, optimizer: bool = True) -> Manifest:
    """Write a checkpoint of `filled(value)`, of an optimizer, and of state with a tensor."""
    module = filled(value)
    chunks, snapshots = model_chunks(module), []
    if optimizer:
        chosen = SGD(module.parameters(), lr=0.1, momentum=0.9)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        chosen.step()
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)
        snapshots.append(capture_optimizer(chosen, parameter_names(module), chunks))
    state = {"global_step": step, "callbacks": {"best": torch.tensor(value)}}
    return save_directory(path, chunks, state, optimizers=snapshots)


def value_of(module: nn.Module) -> float:
    """The one value of all parameters; they must agree."""
    values = {float(v) for p in module.parameters() for v in p.detach().flatten()}
    (value,) = values
    return value


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def bits(directory: Path) -> list[tuple[Path, int]]:
    """Every file of a checkpoint with its number of bits."""
    return [(file, 8 * file.stat().st_size) for file in sorted(directory.iterdir())]


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """Forge a manifest: its seal is right."""
    manifest = replace(read_manifest(directory), **changes)
    (directory / MANIFEST_FILE).write_text(manifest.to_json())


def part_at(directory: Path, number: int = 0) -> Part:
    """The part that a rank has written."""
    return read_manifest(directory).part(directory, number)


def place_of(directory: Path, name: str) -> ChunkEntry:
    """Where the only chunk of a tensor is."""
    (number,) = [run.part for run in read_manifest(directory).tensors[name].runs]
    (place,) = part_at(directory, number)[name]
    return place


def rewrite_part(directory: Path, number: int, part: Part) -> None:
    """Forge a part: its hash in the manifest is right."""
    forge(directory, part_file(number), part_text(part).encode())


def change_chunk(directory: Path, name: str, **changes: Any) -> None:
    """Forge the only chunk of a tensor that the first rank has written, in the part alone."""
    chunk = replace(place_of(directory, name), **changes)
    rewrite_part(directory, 0, {**part_at(directory), name: (chunk,)})


def forge(directory: Path, name: str, content: bytes) -> None:
    """Replace a file and its hash, as one who wants to be believed does."""
    (directory / name).write_bytes(content)
    rewrite_manifest(directory, files={**read_manifest(directory).files, name: entry_of(content)})
