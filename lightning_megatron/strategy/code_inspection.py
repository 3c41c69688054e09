"""Reading what users have written in modules and callbacks, as far as code tells.

What a run has to prepare for (somebody looks at gradients) is found by the names that functions
mention. A name says little, so whoever asks does too much rather
than too little where it is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_megatron.", "torch.", "builtins")


def own_functions(observer: object) -> Iterator[tuple[str, FunctionType]]:
    """Functions of an object, of its class and of the bases of that, that no library has written.

    Hooks may be set on the object, as ``LambdaCallback`` does. What anybody has added to a class of
    a library, such as ``nn.Module``, is nobody's code for this object, and not on every rank.
    """
    classes = (c for c in type(observer).__mro__ if not f"{c.__module__}.".startswith(_LIBRARIES))
    for holder in (vars(observer), *map(vars, classes)):
        for name, value in holder.items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType) and not _is_of_library(function):
                yield name, function


def methods_of(observer: object) -> dict[str, list[FunctionType]]:
    """`own_functions` by name; several where classes override each other's."""
    methods: dict[str, list[FunctionType]] = {}
    for name, function in own_functions(observer):
        methods.setdefault(name, []).append(function)
    return methods


def functions_from(
    methods: Mapping[str, Sequence[FunctionType]], start: str
) -> Iterator[FunctionType]:
    """Functions of a method, and of those that it calls by name."""
    to_read, seen = [start], set[str]()
    while to_read:
        if (name := to_read.pop()) not in seen:
            seen.add(name)
            for function in methods.get(name, ()):
                yield function
                to_read += names_in(function) & methods.keys()


def names_in(function: FunctionType) -> frozenset[str]:
    """Names of attributes and globals in a function and in those that it calls as globals."""
    seen: set[FunctionType] = set()
    found: set[str] = set()
    to_read = [function]
    while to_read:
        reading = to_read.pop()
        if reading in seen:
            continue
        seen.add(reading)
        names = set(_names_of(reading.__code__))
        found |= names
        called = (reading.__globals__.get(name) for name in names)
        to_read += [f for f in called if isinstance(f, FunctionType) and not _is_of_library(f)]
    return frozenset(found)


def _is_of_library(function: FunctionType) -> bool:
    return f"{function.__module__}.".startswith(_LIBRARIES)


def _names_of(code: CodeType) -> Iterator[str]:
    """Names in a function and those defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
