"""The reader of pickles that runs no code of their author.

A pickle names classes and functions and calls them. Here it gets those that
``torch.load(weights_only=True)`` allows, values of numpy, paths and times, the frozen dataclasses
of this package, and classes that the user has registered with
``torch.serialization.add_safe_globals``. Any other name gets a `LeftOut`, which takes whatever the
pickle does with it. So one object of an unknown class does not keep the rest of a checkpoint from
being read: it is left out of the dictionaries that hold it, and its place is told.
"""

import datetime
import importlib
import logging
import os
import pathlib
import pickle
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from lightning_megatron._torch.saved_files import plain_globals, restricted_pickle
from lightning_megatron.checkpoint.trainer_state.codec import config_class
from lightning_megatron.errors import summary

logger = logging.getLogger(__name__)

_PLAIN: dict[str, Any] = {
    **{f"datetime.{kind.__name__}": kind for kind in (datetime.datetime, datetime.date)},
    "datetime.timedelta": datetime.timedelta,
    **{
        f"{home}.{name}": pathlib.Path
        for home in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath")
    },
    **{
        f"{home}.{name}": kind
        for home in ("pathlib", "pathlib._local")
        for name, kind in (("PurePosixPath", pathlib.PurePosixPath),)
    },
    "collections.defaultdict": defaultdict,
    **{f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, str, range, slice)},
    **{f"__builtin__.{kind.__name__}": kind for kind in (list, dict, int, float, str, slice)},
    **{f"builtins.{kind.__name__}": kind for kind in (set, frozenset, complex, bytes, bytearray)},
    **{f"__builtin__.{kind.__name__}": kind for kind in (set, frozenset, complex, bytearray)},
    "__builtin__.xrange": range,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
}
"""Values without behaviour. A pickle of protocol 2, which torch writes, has names of Python 2."""

_NUMPY = frozenset({"scalar", "_reconstruct"})
"""Functions that make values of numpy, in the modules where pickles find them."""
_NUMPY_HOMES = ("numpy.core.multiarray", "numpy._core.multiarray")


class LeftOut:
    """Stands for an object of a class that is not trusted, and accepts anything.

    Attributes:
        kind: full name of the class or function.
    """

    kind = "?"

    def __new__(cls, *_: Any, **__: Any) -> "LeftOut":
        """Take any arguments."""
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> "LeftOut":
        """Stand for the result, too."""
        return self

    def append(self, *_: Any) -> None:
        """Take an element."""

    extend = add = update = append


def load_plain(file: str | os.PathLike[str] | Any, **options: Any) -> tuple[Any, dict[str, str]]:
    """Load what ``torch.save`` wrote without code of its author.

    Args:
        file: path or open file.
        options: as for ``torch.load``.

    Returns:
        The content, and what is left out of it: the class of each object by its place. In
        dictionaries it is absent, in lists and tuples None.

    Raises:
        pickle.UnpicklingError: an object cannot be left out, as something plain is made of it.
    """
    known = {**plain_globals(), **_PLAIN}

    def find(module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in known:
            return known[full]
        if (config := config_class(f"{module}:{name}")) is not None:
            return config
        if module in _NUMPY_HOMES and name in _NUMPY:
            return getattr(importlib.import_module(_NUMPY_HOMES[-1]), name)
        if module == "numpy.dtypes" and name.isidentifier():
            return getattr(np.dtypes, name)
        return type(name, (LeftOut,), {"kind": full})

    try:
        content = torch.load(
            file, pickle_module=restricted_pickle(find), weights_only=False, **options
        )
    except (TypeError, AttributeError) as error:  # something plain was made of one
        raise pickle.UnpicklingError(f"not only tensors and plain values: {error}") from error
    left_out: dict[str, str] = {}
    return _without(content, "", left_out), left_out


def tell_left_out(what: str, left_out: dict[str, str]) -> None:
    """Say what was not read of a checkpoint, and how it is read; on the rank that calls it."""
    if not left_out:
        return
    kinds = sorted(set(left_out.values()))
    logger.warning(
        "%s: %d objects are left out, as reading them may run any code: %s. If you trust its "
        "author: torch.serialization.add_safe_globals([%s]), or weights_only=False "
        "(CheckpointConfig(weights_only=False) for ckpt_path)",
        what,
        len(left_out),
        summary([f"{place} ({kind})" for place, kind in left_out.items()]),
        ", ".join(kind.rpartition(".")[2] for kind in kinds),
    )


def _is_left_out(value: Any) -> bool:
    return isinstance(value, LeftOut) or (isinstance(value, type) and issubclass(value, LeftOut))


def _without(value: Any, path: str, left_out: dict[str, str]) -> Any:
    """Return a tree without the objects that are left out, and note their places."""
    if _is_left_out(value):
        left_out[path] = value.kind
        return None
    if isinstance(value, dict):
        for key, item in list(value.items()):
            place = f"{path}.{key}" if path else str(key)
            if _is_left_out(key) or _is_left_out(item):
                left_out[place] = (item if _is_left_out(item) else key).kind
                del value[key]
            else:
                value[key] = _without(item, place, left_out)
        return value
    if isinstance(value, list):
        value[:] = [_without(v, f"{path}[{i}]", left_out) for i, v in enumerate(value)]
    elif type(value) is tuple:
        return tuple(_without(v, f"{path}[{i}]", left_out) for i, v in enumerate(value))
    return value
