"""Insides of the files of ``torch.save``: their records, and which names a safe reader knows.

Private: ``torch._subclasses`` (FakeTensor, which torch's notes on serialization document for
``skip_data``), ``_cdata`` of a storage, ``_checkpoint_offset`` of a storage that was loaded to the
meta device, and the table of names that ``torch.load(weights_only=True)`` allows (2.11-2.13).
"""

import io
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, BinaryIO
from zipfile import ZipInfo

import torch
from torch import Tensor, _weights_only_unpickler
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from typing_extensions import override

_LOCAL_HEADER = 30
"""Bytes of a record's header."""


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory, in whose place a file gets numbers later."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def write_without_numbers(content: Any, file: str) -> list[Tensor]:
    """Write what ``torch.save`` does, with room for the numbers of tensors instead of these.

    Returns:
        A tensor for each storage; the n-th has the numbers of the record ``data/n``.
    """
    found: dict[int, Tensor] = {}

    class NotingPickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Tensor) and _has_numbers(value):
                found.setdefault(value.untyped_storage()._cdata, value)
            return NotImplemented

    class NotingPickle:
        Pickler = NotingPickler

    with skip_data(materialize_fake_tensors=True):
        torch.save(content, file, pickle_module=NotingPickle)
    return list(found.values())


def _has_numbers(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_meta or isinstance(value, FakeTensor)


def pickling_fault(value: Any) -> str | None:
    """Return why ``torch.save`` cannot write a value; None if it can. Writes nothing."""

    class TryingPickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            is_storage = isinstance(value, torch.storage.TypedStorage) or torch.is_storage(value)
            return "storage" if is_storage else None

    try:
        with skip_data(materialize_fake_tensors=True):
            TryingPickler(_Nowhere(), protocol=2).dump(value)
    except Exception as error:  # objects raise whatever they like
        return f"{type(error).__name__}: {error}"
    return None


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    @override
    def write(self, data: Any) -> int:
        return len(data)


def begin_of_record(file: BinaryIO, record: ZipInfo) -> int:
    """Return where the bytes of a record of the archive begin.

    A header, the name and an extra field stand in front, whose lengths the header's end says.
    """
    file.seek(record.header_offset + _LOCAL_HEADER - 4)
    name, extra = struct.unpack("<HH", file.read(4))
    return record.header_offset + _LOCAL_HEADER + int(name) + int(extra)


def begin_of_numbers(tensor: Tensor) -> int | None:
    """Return where the storage of a tensor begins in the file that it was loaded from.

    The tensor was loaded to the meta device.
    """
    begin: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return begin


def plain_globals() -> Mapping[str, Any]:
    """Return what ``torch.load(weights_only=True)`` lets a file name, by full name.

    Classes that the user has registered with ``torch.serialization.add_safe_globals`` are in it.
    """
    return {
        **_weights_only_unpickler._get_allowed_globals(),
        **_weights_only_unpickler._get_user_allowed_globals(),  # type: ignore[no-untyped-call]
    }


def restricted_pickle(find: Callable[[str, str], Any]) -> Any:
    """Return a ``pickle_module`` for ``torch.load`` that takes classes and functions from ``find``.

    A pickle may set attributes of what it names, so functions are handed out wrapped.
    """

    class RestrictedUnpickler(pickle.Unpickler):
        @override
        def find_class(self, module: str, name: str) -> Any:
            found = find(module, name)
            return partial(found) if isinstance(found, FunctionType) else found

    class RestrictedPickle:
        Unpickler = RestrictedUnpickler
        load = None  # of formats before torch 1.6, which are not read

    return RestrictedPickle
