"""The reader of a tensor's archive in a shard, without unpickling.

torch.distributed.checkpoint stores each chunk as `torch.save` makes it: a zip archive of a pickle,
which names shape and strides, and a record with the numbers. `torch.save` writes exactly one
program for a plain tensor. This reader accepts that program only, calls nothing, and takes the
numbers from the record; memory is bounded by the size of the file. As a record is not compressed,
some rows of a tensor are a range of its bytes: one expert of a stack is read without the others.

`torch.load(weights_only=True)` is not used. It runs no foreign code, but does what the pickle says
within its list of allowed calls (torch 2.13): 521 bytes that say ``bytearray(2**30)`` take 1 GiB,
and a deflated record of 0.5 MB is inflated to 512 MiB before its size is checked. A good tensor of
256 MiB takes another 512 MiB, as archives lie one after the other in a shard and ``mmap=True``
needs a file for each.
"""

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import DamagedCheckpointError

_REBUILDERS = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LARGEST_PICKLE = 1 << 16


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _Storage:
    description: Any


@dataclass(frozen=True)
class _Call:
    function: Any
    arguments: Any


def read_tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of an archive that ``torch.save`` wrote; it shares the archive's memory.

    Args:
        content: the archive.
        dtype: dtype of the tensor.
        shape: shape of the tensor.

    Raises:
        DamagedCheckpointError: the content is no such archive.
    """
    return _read(_Memory(content), dtype, shape, None)


def read_rows(
    file: BinaryIO,
    begin: int,
    length: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    rows: tuple[int, int],
) -> Tensor:
    """Return some rows of the tensor of an archive, without reading the others.

    Args:
        file: file with the archive.
        begin: first byte of the archive.
        length: number of its bytes.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        rows: first row (index of dimension 0), and the one behind the last.

    Raises:
        DamagedCheckpointError: the content is no such archive.
    """
    return _read(_Part(file, begin, length), dtype, shape, rows)


def _read(
    source: "_Memory | _Part",
    dtype: torch.dtype,
    shape: tuple[int, ...],
    rows: tuple[int, int] | None,
) -> Tensor:
    try:
        entries = _entries(source)
        pickled = source.part(*_extent(source, entries["data.pkl"], _LARGEST_PICKLE))
        key, offset, found, strides = _describe(pickled)
        if found != shape:
            raise ValueError(f"shape {found}, not {shape}")
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        begin, end = _extent(source, entries[f"data/{key}"])
        count, rest = divmod(end - begin, dtype.itemsize)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if rest or last >= count:
            raise ValueError(f"{end - begin} bytes for element {last} of {dtype}")
        if rows is not None and strides == _strides_in_order(shape):
            first = begin + (offset + rows[0] * strides[0]) * dtype.itemsize
            end = begin + (offset + rows[1] * strides[0]) * dtype.itemsize
            begin, offset, shape = first, 0, (rows[1] - rows[0], *shape[1:])
            rows = None
        numbers = source.part(begin, end)
        if _address(numbers) % dtype.itemsize:
            numbers = memoryview(bytearray(numbers))
        tensor = torch.frombuffer(numbers, dtype=dtype).as_strided(shape, strides, offset)
        return tensor if rows is None else tensor[rows[0] : rows[1]]
    except (ValueError, TypeError, LookupError, AttributeError, struct.error, zipfile.BadZipFile,
            OverflowError, NotImplementedError, UnicodeDecodeError, EOFError) as error:  # fmt: skip
        raise DamagedCheckpointError(f"not the archive of a tensor: {error!r}") from error


def _strides_in_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose elements lie in the order of their indices."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def _entries(source: "_Memory | _Part") -> dict[str, zipfile.ZipInfo]:
    """Return the records of an archive by name, without the folder of all of them."""
    with zipfile.ZipFile(_File(source)) as archive:
        found = archive.infolist()
    entries = {entry.filename.partition("/")[2]: entry for entry in found}
    if len(entries) < len(found):
        raise ValueError("two records of one name")
    return entries


def _extent(
    source: "_Memory | _Part", entry: zipfile.ZipInfo, largest: int | None = None
) -> tuple[int, int]:
    """Return the place of a record's content, which must be uncompressed."""
    name = entry.filename
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name} is compressed")
    if largest is not None and entry.file_size > largest:
        raise ValueError(f"a description of {entry.file_size} bytes")
    begin = entry.header_offset + _LOCAL_HEADER.size
    header = source.part(entry.header_offset, begin)
    magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    begin += name_length + extra_length
    end = begin + entry.file_size
    if magic != b"PK\3\4" or end > source.size:
        raise ValueError(f"{name} exceeds the archive")
    return begin, end


def _describe(pickled: memoryview) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """Return storage key, offset, shape and strides of the tensor that a pickle describes."""
    call = _interpret(bytes(pickled))
    if call.function.name not in _REBUILDERS:
        raise ValueError(f"made by {call.function.name}")
    storage, offset, shape, strides, *_ = call.arguments
    kind, _, key, _, _ = storage.description
    numbers = (offset, *shape, *strides)
    if kind != "storage" or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"described by {kind!r}, {numbers}")
    return key, offset, shape, strides


def _interpret(pickled: bytes) -> Any:
    """Interpret a pickle as tuples, numbers and names; nothing is looked up or called.

    Raises:
        ValueError: the pickle has opcodes that no tensor needs.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop(count: int) -> tuple[Any, ...]:
        if count > len(stack):
            raise ValueError("the description ends early")
        taken = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return taken

    def call(_: Any) -> None:
        function, arguments = pop(2)
        stack.append(_Call(function, arguments))

    def put(number: Any) -> None:
        memo[number] = stack[-1]

    rules: Mapping[str, Callable[[Any], None]] = {
        "GLOBAL": lambda name: stack.append(_Global(name)),
        "MARK": lambda _: marks.append(len(stack)),
        "TUPLE": lambda _: stack.append(pop(len(stack) - marks.pop())),
        "BINPERSID": lambda _: stack.append(_Storage(*pop(1))),
        "REDUCE": call,
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), put),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: stack.append(memo[number])),
        **dict.fromkeys(("NEWTRUE", "NEWFALSE", "NONE"), lambda _: stack.append(None)),
        **dict.fromkeys(("PROTO", "STOP"), lambda _: None),
        "EMPTY_TUPLE": lambda _: stack.append(()),
        **{f"TUPLE{n}": lambda _, n=n: stack.append(pop(n)) for n in (1, 2, 3)},  # type: ignore[misc]
        **dict.fromkeys(
            ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
            stack.append,
        ),
    }
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in rules:
            raise ValueError(f"opcode {opcode.name}")
        rules[opcode.name](argument)
    (result,) = stack
    return result


class _Memory:
    """Archive in memory."""

    def __init__(self, content: bytearray) -> None:
        self._view = memoryview(content)
        self.size = len(self._view)

    def part(self, begin: int, end: int) -> memoryview:
        """Return the bytes of a range, as far as there are any, without a copy."""
        return self._view[begin:end]


class _Part:
    """Archive that lies in a file."""

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        self._file = file
        self._begin = begin
        self.size = size

    def part(self, begin: int, end: int) -> memoryview:
        """Read the bytes of a range, as far as there are any."""
        content = bytearray(max(min(end, self.size) - begin, 0))
        self._file.seek(self._begin + begin)
        if self._file.readinto(content) < len(content):  # type: ignore[attr-defined]
            raise ValueError("the file ends early")
        return memoryview(content)


class _File(io.RawIOBase):
    """An archive as a file."""

    def __init__(self, source: _Memory | _Part) -> None:
        self._source = source
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
        start = (0, self._position, self._source.size)[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._position = start + offset
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        part = self._source.part(self._position, self._position + len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
