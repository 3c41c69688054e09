"""Checkpoints to damage, and ways to do it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from lightning_megatron.checkpoint.chunks import model_chunks, parameter_names
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE, Manifest, read_manifest
from lightning_megatron.checkpoint.directory.rank_manifest import (
    ChunkEntry,
    RankManifest,
    entry_of,
    part_file,
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


def part_at(directory: Path, number: int = 0) -> RankManifest:
    """The part that a rank has written."""
    name = part_file(number)
    return RankManifest.from_json((directory / name).read_text(), name)


def place_of(directory: Path, name: str) -> ChunkEntry:
    """Where the only chunk of a tensor is."""
    parts = (part_at(directory, p.number) for p in read_manifest(directory).parts.values())
    (place,) = [chunk for part in parts for chunk in part.tensors.get(name, ())]
    return place


def rewrite_part(directory: Path, rank: int = 0, **changes: Any) -> None:
    """Forge a part: its seal is right, and so is its hash in the root."""
    content = replace(part_at(directory, rank), **changes).to_json()
    forge(directory, part_file(rank), content.encode())


def change_chunk(directory: Path, name: str, **changes: Any) -> None:
    """Forge the only chunk of a tensor that the first rank has written, in the part alone."""
    tensors = dict(part_at(directory).tensors)
    tensors[name] = (replace(place_of(directory, name), **changes),)
    rewrite_part(directory, tensors=tensors)


def forge(directory: Path, name: str, content: bytes) -> None:
    """Replace a file and its hashes, as one who wants to be believed does."""
    (directory / name).write_bytes(content)
    manifest, entry = read_manifest(directory), entry_of(content)
    rewrite_manifest(directory, files={**manifest.files, name: entry})
    for part in manifest.parts.values():
        if name in part.files:
            files = {**part_at(directory, part.number).files, name: entry}
            rewrite_part(directory, part.number, files=files)
