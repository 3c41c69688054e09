"""The reader of a tensor that ``torch.save`` wrote into a shard.

torch.distributed.checkpoint stores each chunk as a zip archive, one behind the other in a file,
where ``torch.load(mmap=True)`` needs a file for each. So ``torch.load(weights_only=True)`` loads
the tensor to the meta device, which reads no numbers and says where they lie. Their record is not
compressed: the numbers that are wanted are a range of its bytes, and are read into the tensor that
is returned. One expert of a stack is read without the others.

The archive is checked for what would be wrong or take memory without an error: a record that is
compressed, numbers in the byte order of another machine, and a tensor that exceeds the archive.
"""

import io
import pickle
import sys
import zipfile
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.state_dicts import describe_saved
from lightning_megatron.errors import DamagedCheckpointError


def read_tensor(
    file: BinaryIO,
    begin: int,
    length: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Return the tensor of an archive, or some of its rows without reading the others.

    Args:
        file: file with the archive.
        begin: first byte of the archive.
        length: number of its bytes.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        rows: first row (index of dimension 0), and the one behind the last; all if None.

    Raises:
        DamagedCheckpointError: the content is no such archive.
        OSError: the file cannot be read.
    """
    part = _Part(file, begin, length)
    try:
        _check_records(part)
        part.seek(0)
        described, offset = describe_saved(cast(BinaryIO, part))
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(
            "not the archive of a tensor: its pickle needs more than tensors"
        ) from error
    except Exception as error:  # whatever a reader makes of damage
        if isinstance(error.__context__, OSError):  # zipfile says that this is no zip file
            raise error.__context__ from None
        reason = str(error).partition("\n")[0]
        raise DamagedCheckpointError(
            f"not the archive of a tensor: {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(described, Tensor) or (described.dtype, described.shape) != (dtype, shape):
        raise DamagedCheckpointError(
            f"not the archive of a tensor of {dtype} and shape {shape}: {_what(described)}"
        )
    wanted = described if rows is None else described[rows[0] : rows[1]]
    elements = sum((n - 1) * s for n, s in zip(wanted.shape, wanted.stride(), strict=True)) + 1
    elements = elements if wanted.numel() else 0
    first = offset + int(wanted.storage_offset()) * dtype.itemsize
    if first + elements * dtype.itemsize > length:
        raise DamagedCheckpointError(
            f"not the archive of a tensor: {elements} elements of {dtype} from byte {first} on "
            f"exceed its {length} bytes"
        )
    numbers = torch.empty(elements, dtype=dtype)
    part.seek(first)
    if part.readinto(numbers.view(torch.uint8).numpy()) < elements * dtype.itemsize:
        raise DamagedCheckpointError("the file is shorter than when it was verified")
    return numbers.as_strided(wanted.shape, wanted.stride())


def _what(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"it holds {found.dtype} of shape {tuple(found.shape)}"
    return f"it holds a {type(found).__name__}"


def _check_records(part: "_Part") -> None:
    """Refuse records that take more memory than bytes, or that hold bytes in another order."""
    with zipfile.ZipFile(cast(BinaryIO, part)) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record.filename} is compressed")
            if record.filename.endswith("/byteorder"):
                order = archive.read(record).decode()
                if order != sys.byteorder:
                    raise ValueError(f"its numbers are {order}-endian")


class _Part(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file = file
        self._begin = begin
        self._length = length
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._position, self._length)[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._position = start + offset
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._position, 0)]
        self._file.seek(self._begin + self._position)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count
