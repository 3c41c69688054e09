"""Reading what users have written in modules and callbacks, as far as code tells.

What a run has to prepare for (somebody looks at gradients; a hook reads what steps have filled) is
found by the names that functions mention. A name says little, so whoever asks does too much rather
than too little where it is there.
"""

import dis
from collections.abc import Collection, Iterator, Mapping, Sequence
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


def names_on_both_sides(
    methods: Mapping[str, Sequence[FunctionType]], start: str, call: Collection[str]
) -> frozenset[str]:
    """Names that code mentions before a call, its arguments included, and behind it.

    Args:
        methods: functions that call each other by name.
        start: name of the one that is read, with those that it calls.
        call: names by which the code reaches what is called.
    """
    before: set[str] = set()
    behind: set[str] = set()
    _sort_names(methods, start, call, before, behind, set())
    return frozenset(before & behind)


def _sort_names(
    methods: Mapping[str, Sequence[FunctionType]],
    name: str,
    call: Collection[str],
    before: set[str],
    behind: set[str],
    seen: set[str],
) -> None:
    """Add the names in a method to those before and behind the call."""
    seen.add(name)
    for function in methods.get(name, ()):
        reaching = [m for m in methods if m not in seen and _reaches(methods, m, call)]
        first, second = _sides(function, {*call, *reaching})
        before |= first
        behind |= second
        for mentioned, side in ((first, before), (second, behind)):
            for method in (mentioned & methods.keys()) - {*reaching, *seen}:
                side |= _all_names(methods, method)
        for method in reaching:
            if method in first | second:
                _sort_names(methods, method, call, before, behind, seen)


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


def _all_names(methods: Mapping[str, Sequence[FunctionType]], start: str) -> frozenset[str]:
    return frozenset[str]().union(*map(names_in, functions_from(methods, start)))


def _reaches(
    methods: Mapping[str, Sequence[FunctionType]], start: str, call: Collection[str]
) -> bool:
    return bool(_all_names(methods, start) & set(call))


def _sides(function: FunctionType, call: Collection[str]) -> tuple[set[str], set[str]]:
    """Names before the end of the statement with the last mention of ``call``, and after that."""
    instructions = list(dis.get_instructions(function))
    loads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")  # locals may have the same name
    mentions = [
        i for i, step in enumerate(instructions) if step.opname in loads and step.argval in call
    ]
    if not mentions:
        return set(names_in(function)), set()
    ends = ("STORE_", "RETURN_", "POP_TOP")
    rest = range(mentions[-1] + 1, len(instructions))
    end = next((i for i in rest if instructions[i].opname.startswith(ends)), len(instructions))
    known = names_in(function)
    sides: tuple[set[str], set[str]] = set(), set()
    for i, step in enumerate(instructions):
        codes = [step.argval] if isinstance(step.argval, CodeType) else []
        names = {name for code in codes for name in _names_of(code)}
        if isinstance(step.argval, str) and step.argval in known:
            names.add(step.argval)
        sides[i >= end].update(names)
    return sides


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
