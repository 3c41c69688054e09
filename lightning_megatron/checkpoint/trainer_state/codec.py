"""The codec of ``state.json``: plain data and tensors to JSON and back.

A checkpoint holds more than weights: loop counters, states of schedulers and callbacks,
hyper-parameters. Stock checkpoints pickle them, and a pickle runs any code of its author. Here such
a tree becomes JSON, and its tensors go into a table that is stored as a safetensors file:

* ``None``, booleans, integers, finite floats, strings, lists and dicts with string keys are written
  as they are;
* everything else becomes ``{"$type": tag, "value": ...}``, with a fixed list of tags: tuples, sets,
  bytes, tensors, numpy values, ``torch.dtype``, paths, times and so on;
* members of enums are looked up by name in classes that are already imported, and the frozen
  dataclasses of this package by class name; decoding never imports or calls anything else.

A value without a tag is kept as an object beside the JSON, by its place in the tree
(``callbacks.EMA.shadow``), for a pickle of its own, which is read only if its author is trusted. A
value that cannot be pickled is a fault. Faults are collected, so that one error names all of them.
"""

import base64
import dataclasses
import importlib
import logging
import math
import re
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.saved_files import pickling_fault
from lightning_megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

_TYPE, _VALUE = "$type", "value"

# Storage formats of safetensors.
_TENSOR_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "complex64"),
    )
)
_ARRAY_KINDS = frozenset("biufc")
_FACTORIES: Mapping[str, type] = {t.__name__: t for t in (list, dict, set, int, float, str)}
_CONFIG_CLASS = re.compile(r"(lightning_megatron(?:\.[a-z]\w*)+):([A-Z]\w*)")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch.dtype {name!r}")
    return dtype


# tag -> (exact type, to plain data, from plain data)
_LEAVES: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
    "complex": (complex, repr, complex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "torch.Size": (torch.Size, list, torch.Size),
    "torch.dtype": (torch.dtype, lambda v: str(v).removeprefix("torch."), _dtype_of),
    "torch.device": (torch.device, str, torch.device),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (
        timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: timedelta(*v),
    ),
}
_LEAF_TAGS = {kind: tag for tag, (kind, _, _) in _LEAVES.items()}
_SEQUENCES: Mapping[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SEQUENCE_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TYPE: tag, _VALUE: value}


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class Encoder:
    """Turns values into plain JSON data; tensors and faults are collected beside it.

    Attributes:
        tensors: detached CPU copies of the tensors, by their place in the tree.
        objects: values that only a pickle can hold, by their place in the tree.
        problems: one sentence per value that cannot be stored, with its place.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.problems: list[str] = []

    def encode(self, value: Any, path: str) -> Any:
        """Return ``value`` as JSON data; ``path`` is its place in the tree."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else _tagged("float", repr(value))
        if type(value) is list:
            return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if (tag := _SEQUENCE_TAGS.get(type(value))) is not None:
            return _tagged(tag, [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)])
        if (tag := _LEAF_TAGS.get(type(value))) is not None:
            return _tagged(tag, _LEAVES[tag][1](value))
        return self._encode_object(value, path)

    def _encode_dict(self, value: dict[Any, Any], path: str) -> Any:
        """Encode a dict; an unknown subclass (like Lightning's AttributeDict) becomes a dict."""
        keys = list(value)
        if all(type(k) is str for k in keys) and _TYPE not in value:
            plain: Any = {k: self.encode(v, f"{path}.{k}") for k, v in value.items()}
            whole = plain
        else:
            plain = [
                [self.encode(k, f"{path} (a key)"), self.encode(v, f"{path}.{k}")]
                for k, v in value.items()
            ]
            whole = _tagged("dict", plain)
        if type(value) is Counter:
            return _tagged("Counter", whole)
        if type(value) is OrderedDict:
            return _tagged("OrderedDict", whole)
        if isinstance(value, defaultdict) and value.default_factory is not None:
            factory = getattr(value.default_factory, "__name__", "")
            if _FACTORIES.get(factory) is value.default_factory:
                return _tagged("defaultdict", [factory, whole])
        return whole

    def _encode_object(self, value: Any, path: str) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_array(value, path)
        if isinstance(value, Enum):
            return _tagged("enum", [_class_name(kind), value.name, self.encode(value.value, path)])
        if isinstance(value, PurePath):
            return _tagged("path", str(value))
        if kind is Namespace:
            return _tagged("Namespace", self.encode(vars(value), path))
        if dataclasses.is_dataclass(kind) and _CONFIG_CLASS.fullmatch(_class_name(kind)):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if f.init}
            return _tagged("config", [_class_name(kind), self.encode(fields, path)])
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> Any:
        if (fault := pickling_fault(value)) is not None:
            return self._problem(value, path, f"cannot be pickled ({fault})")
        key = _free_key(path, self.objects)
        self.objects[key] = value
        return _tagged("object", key)

    def _encode_tensor(self, value: Tensor, path: str) -> Any:
        if isinstance(value, DTensor):
            return self._problem(value, path, "is spread over ranks: store value.full_tensor()")
        if value.is_meta or value.layout is not torch.strided or value.dtype not in _TENSOR_DTYPES:
            return self._object(value, path)
        return _tagged("tensor", self._keep(value.detach(), path))

    def _encode_array(self, value: Any, path: str) -> Any:
        if value.dtype.kind not in _ARRAY_KINDS:
            return self._object(value, path)
        if isinstance(value, np.generic):
            raw = base64.b64encode(value.tobytes()).decode()
            return _tagged("numpy scalar", [value.dtype.str, raw])
        raw_bytes = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)
        key = self._keep(raw_bytes[: value.nbytes], path)
        return _tagged("ndarray", [value.dtype.str, list(value.shape), key])

    def _keep(self, value: Tensor, path: str) -> str:
        key = _free_key(path, self.tensors)
        self.tensors[key] = value.cpu().contiguous().clone()
        return key

    def _problem(self, value: Any, path: str, reason: str) -> None:
        kind = type(value)
        origin = _ORIGINS.get(re.split(r"[.\[]", path)[0], _OTHER_ORIGINS)
        self.problems.append(
            f"{path}: a {kind.__module__}.{kind.__qualname__} {reason}, from {origin} a plain "
            "value, a tensor, or an object of a class of a module in its place"
        )


def pickling_problems(state: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each value of a checkpoint, or of a part, that no pickle can hold."""
    encoder = Encoder()
    for key, value in state.items():
        if pickling_fault(value) is not None:
            encoder.encode(value, key)
    return encoder.problems


_ORIGINS = {
    "hyper_parameters": "save_hyperparameters; nearest valid: ignore=[...] there, or",
    "datamodule_hyper_parameters": "save_hyperparameters; nearest valid: ignore=[...] there, or",
    "callbacks": "state_dict of the callback; nearest valid:",
    "state_dict": "get_extra_state or state_dict of the module; nearest valid:",
    "optimizers": "the optimizer's state; nearest valid:",
    "lr_schedulers": "the schedule's state_dict; nearest valid:",
}
"""Hook or option that puts a value into a checkpoint, by the first key of its place."""
_OTHER_ORIGINS = (
    "on_save_checkpoint of the module or a callback, or, under the name of its class, state_dict "
    "of the data module; nearest valid:"
)


def _free_key(path: str, used: Mapping[str, Any]) -> str:
    key, number = path, 1
    while key in used:
        number += 1
        key = f"{path}#{number}"
    return key


_GONE = object()
"""Stands for an object that was not read."""


class Decoder:
    """Turns the data of an `Encoder` into values.

    Args:
        tensors: the tensors of the encoder.
        objects: the objects of the encoder, as far as they were read. The others are absent in
            dictionaries, and None elsewhere.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], objects: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors = tensors
        self._objects = objects or {}

    def decode(self, data: Any) -> Any:
        """Return the value of encoded data.

        Raises:
            CheckpointError: the data is not that of an `Encoder`.
        """
        try:
            return self._whole(data)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"the stored state is damaged: {error!r}") from error

    def _decode(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self._whole(v) for v in data]
        if not isinstance(data, dict):
            return data
        if _TYPE not in data:
            return self._dict(data.items())
        return self._decode_tagged(data[_TYPE], data[_VALUE])

    def _whole(self, data: Any) -> Any:
        value = self._decode(data)
        return None if value is _GONE else value

    def _dict(self, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        decoded = ((key, self._decode(item)) for key, item in items)
        return {key: item for key, item in decoded if item is not _GONE}

    def _decode_tagged(self, tag: str, value: Any) -> Any:
        if tag in _LEAVES:
            return _LEAVES[tag][2](value)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self._whole(v) for v in value)
        rules: Mapping[str, Callable[[Any], Any]] = {
            "float": float,
            "path": Path,
            "dict": lambda v: self._dict((self._whole(key), item) for key, item in v),
            "object": lambda v: self._objects.get(v, _GONE),
            "Counter": lambda v: Counter(self._decode(v)),
            "OrderedDict": lambda v: OrderedDict(self._decode(v)),
            "defaultdict": lambda v: defaultdict(_FACTORIES[v[0]], self._decode(v[1])),
            "Namespace": lambda v: Namespace(**self._decode(v)),
            "tensor": lambda v: self._tensors[v],
            "numpy scalar": lambda v: _array(v[0], (), base64.b64decode(v[1]))[()],
            "ndarray": lambda v: _array(v[0], v[1], self._tensors[v[2]].numpy().tobytes()),
            "enum": lambda v: _enum_member(v[0], v[1], self._decode(v[2])),
            "config": lambda v: _config_class(v[0])(**self._decode(v[1])),
        }
        if tag not in rules:
            raise CheckpointError(f"the stored state is damaged: unknown type tag {tag!r}")
        return rules[tag](value)


def _array(dtype: str, shape: Any, raw: bytes) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _ARRAY_KINDS:
        raise ValueError(f"array dtype {dtype!r}")
    return np.frombuffer(raw, dtype=kind).reshape(shape).copy()


def _enum_member(name: str, member: str, value: Any) -> Any:
    """Return the member of an enum if it is already imported, else its plain value."""
    module, _, qualname = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in qualname.split("."):
        kind = getattr(kind, part, None)
    if isinstance(kind, type) and issubclass(kind, Enum) and member in kind.__members__:
        return kind.__members__[member]
    logger.warning("%s.%s is not imported here: its value %r stands in", name, member, value)
    return value


def config_class(name: str) -> Any:
    """Return one of this package's frozen dataclasses, ``module:Class``; None for other names."""
    match = _CONFIG_CLASS.fullmatch(name)
    if match is None:
        return None
    try:
        kind = getattr(importlib.import_module(match[1]), match[2], None)
    except ImportError:  # of another version of this package
        return None
    parameters = getattr(kind, "__dataclass_params__", None)
    return kind if isinstance(kind, type) and parameters is not None and parameters.frozen else None


def _config_class(name: str) -> Any:
    if (kind := config_class(name)) is None:
        ours = "a frozen dataclass" if _CONFIG_CLASS.fullmatch(name) else "a class of this package"
        raise CheckpointError(f"the stored state refers to {name!r}, not {ours}")
    return kind
