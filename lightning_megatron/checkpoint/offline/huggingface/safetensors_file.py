"""safetensors files, one tensor at a time.

The format is eight bytes with the length of a JSON header, the header (name to dtype, shape, first
and last byte) and the numbers. The library of that name reads a tensor at a time too, but through a
memory map, whose pages count as memory of the process, and writes only what is in memory as a
whole. Here both directions hold one tensor.

A header comes from anybody, so everything in it is checked before memory is taken: the tensors must
fill the file without gap or overlap, which also bounds them by its size.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the format."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0
    """First byte in the file."""

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file to read from; opened anew for every tensor.

    Args:
        path: the file.

    Attributes:
        tensors: what it holds, by name.

    Raises:
        DamagedCheckpointError: it is not a safetensors file.
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.tensors = _read_header(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{path.name} is not a safetensors file: {error}"
            ) from error

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: it cannot be read.
        """
        info = self.tensors[name]
        content = torch.empty(info.size, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(info.begin)
                got = file.readinto(content.numpy().data) if info.size else 0
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        if got != info.size:
            raise DamagedCheckpointError(f"{self.path} is shorter than it was")
        return content.view(info.dtype).view(info.shape)


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorInfo], value: Callable[[str], Tensor]
) -> None:
    """Write a new file, and wait until its content is on disk.

    Args:
        path: the file.
        tensors: names, dtypes and shapes of what is in it, in this order.
        value: returns a tensor by its name; called once for each, in the order of the file.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.items():
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [end, end + info.size],
        }
        end += info.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in tensors.items():
            tensor = value(name).to(info.dtype).contiguous()
            assert tuple(tensor.shape) == info.shape, name
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _read_header(file: BinaryIO, size: int) -> dict[str, TensorInfo]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(file.read(length), object_pairs_hook=_without_repetition)
    header.pop("__metadata__", None)
    infos: dict[str, TensorInfo] = {}
    expected = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"{name}: sizes that are no counts")
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name}: unknown dtype {entry['dtype']!r}")
        info = TensorInfo(dtype=DTYPES[entry["dtype"]], shape=shape, begin=8 + length + begin)
        if begin != expected or end - begin != info.size:
            raise ValueError(f"{name}: the tensors do not fill the file")
        infos[name] = info
        expected = end
    if 8 + length + expected != size:
        raise ValueError(f"the tensors end at byte {8 + length + expected} of {size}")
    return infos


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands there twice")
    return result
