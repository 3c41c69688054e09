"""A file as ``torch.save`` writes it, whose numbers come later, one tensor after the other.

``torch.save`` needs all tensors at once, and the whole model may not fit into the memory of one
rank. But it can leave room for numbers (``torch.serialization.skip_data``), which are stored
uncompressed, each storage in a record of the zip archive. So a `TensorFile` is written in three
steps: everything but numbers, in which a placeholder stands for each tensor that comes later; the
numbers of each, as they arrive; and the CRC-32 of every record, which ``torch.save`` without
numbers cannot know. A reader checks them (`checkpoint.load.file_reader`), as ``unzip -t`` does.

The layout of zip archives: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_megatron._torch.saved_files import (
    FakeTensor,
    begin_of_record,
    write_without_numbers,
)

_ENTRY = struct.Struct("<4s12xL8xHHH12x")
"""Entry of the central directory: signature, CRC-32, lengths of name, extra field and comment."""
_CRC_AT = 16
_BLOCK = 1 << 24
"""Bytes that are read at once."""


class TensorFile:
    """A file with a checkpoint, under construction.

    Args:
        path: the file.
        content: what ``torch.save`` would get, with placeholders for the tensors that come later
            (`_torch.saved_files.placeholder`), each in one piece.

    Raises:
        Exception: an object cannot be pickled; whatever it raises.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, content: Any) -> None:
        storages = write_without_numbers(content, os.fspath(path))
        self._file: BinaryIO = path.open("r+b")
        with zipfile.ZipFile(self._file) as archive:
            self._records = {r.filename.partition("/")[2]: r for r in archive.infolist()}
            self._directory: int = archive.start_dir
        numbered = sum(name.startswith("data/") for name in self._records)
        if numbered != len(storages):  # a storage outside of any tensor
            raise ValueError(f"{numbered} storages are to be written, of {len(storages)} tensors")
        self._sums: dict[str, int] = {}
        self._names = {id(tensor): f"data/{number}" for number, tensor in enumerate(storages)}
        for tensor in storages:
            if not isinstance(tensor, FakeTensor):
                with torch.no_grad():
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    self._put(tensor, whole.set_(tensor.untyped_storage()).cpu())
        self._keep = storages  # or other tensors could get their ids

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    def put(self, placeholder: Tensor, value: Tensor) -> None:
        """Write the numbers of a tensor.

        Args:
            placeholder: stands for it in the content.
            value: of the same shape and dtype, on any device.
        """
        assert (value.shape, value.dtype) == (placeholder.shape, placeholder.dtype)
        flat = value.detach().cpu().contiguous().reshape(-1)
        self._put(placeholder, flat.view(torch.uint8))

    def _put(self, tensor: Tensor, numbers: Tensor) -> None:
        name = self._names[id(tensor)]
        record = self._records[name]
        assert numbers.numel() == record.file_size
        data: Any = numbers.numpy().data
        self._file.seek(begin_of_record(self._file, record))
        self._file.write(data)
        self._sums[name] = zlib.crc32(data)

    def finish(self) -> None:
        """Write the sums of all records, and wait until the file is on disk."""
        missing = [n for n in self._names.values() if n not in self._sums]
        assert not missing, missing
        at = self._directory
        for name, record in self._records.items():
            crc = self._sums[name] if name in self._sums else self._sum(record)
            self._file.seek(at)
            _, _, *lengths = _ENTRY.unpack(self._file.read(_ENTRY.size))
            self._file.seek(at + _CRC_AT)
            self._file.write(struct.pack("<L", crc))
            at += _ENTRY.size + sum(lengths)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _sum(self, record: zipfile.ZipInfo) -> int:
        self._file.seek(begin_of_record(self._file, record))
        left, crc = record.file_size, 0
        while left:
            data = self._file.read(min(left, _BLOCK))
            crc, left = zlib.crc32(data, crc), left - len(data)
        return crc

    def close(self) -> None:
        """Close the file."""
        self._file.close()
