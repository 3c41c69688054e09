"""safetensors files, one tensor at a time.

The format is eight bytes with the length of a JSON header, the header (name to dtype, shape, first
and last byte) and the numbers. Reading is that of the library, whose parser checks the header: the
tensors must fill the file without gap or overlap. It maps the file into memory, and mapped pages
count as memory of the process, so a file is opened anew for every tensor. Writing is here, as the
library writes only what is in memory as a whole.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_megatron._torch.safetensors_dtypes import SAFETENSORS_DTYPES
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of one tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file to read from.

    Args:
        path: the file.

    Attributes:
        tensors: shape and dtype of its tensors, by name.

    Raises:
        DamagedCheckpointError: the file is not a safetensors file, or has another dtype.
        CheckpointError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        with self._opened() as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                entry = file.get_slice(name)
                dtype = entry.get_dtype()
                if dtype not in SAFETENSORS_DTYPES:
                    raise DamagedCheckpointError(
                        f"{path.name}: {name} has dtype {dtype!r}; dtypes that are read: "
                        f"{', '.join(SAFETENSORS_DTYPES)}"
                    )
                shape = tuple(entry.get_shape())
                self.tensors[name] = TensorInfo(dtype=SAFETENSORS_DTYPES[dtype], shape=shape)

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with self._opened() as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise DamagedCheckpointError(
                f"{self.path.name} is not a safetensors file: {error}"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.path.name} cannot be read: {error}") from error


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorInfo], value: Callable[[str], Tensor]
) -> None:
    """Write a new file, and wait until its content is on disk.

    Args:
        path: the file.
        tensors: names, dtypes and shapes of its tensors, in this order.
        value: function that returns a tensor by its name; called once for each, in this order.

    Raises:
        OSError: the file cannot be written.
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
