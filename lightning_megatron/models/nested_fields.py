"""Configurations from mappings, as ``dataclasses.asdict``, YAML and command lines have them."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from lightning_megatron.errors import raise_if_any

Config = TypeVar("Config")


def from_fields(kind: type[Config], fields: Mapping[str, Any], prefix: str = "") -> Config:
    """Make a configuration from a mapping of its fields.

    Args:
        kind: its class, a dataclass.
        fields: values by name; those of fields that are dataclasses may be mappings as well.
        prefix: option that holds the mapping, for messages.

    Raises:
        ConfigError: a field is unknown or missing, or values do not fit each other.
    """
    raise_if_any(_problems(kind, fields, prefix))
    return _made(kind, fields)


def _made(kind: type[Config], fields: Mapping[str, Any]) -> Config:
    parts: dict[str, Any] = {
        name: _made(part, value)
        for name, value in fields.items()
        if isinstance(value, Mapping) and (part := _part(kind, name)) is not None
    }
    return kind(**{**fields, **parts})


def _problems(kind: type, fields: Mapping[str, Any], prefix: str) -> list[str]:
    known = {field.name: field for field in dataclasses.fields(kind)}
    problems = []
    for name, value in fields.items():
        head, dot, rest = str(name).partition(".")
        if dot and head in known and (part := _part(kind, head)) is not None:
            # The command line parser passes on what it could not make a value of.
            problems += _problems(part, {rest: value}, f"{prefix}{head}.") or [
                f"{prefix}{name}={value!r}: cannot be read as {_hint(part, rest)}"
            ]
        elif name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            problems.append(
                f"{prefix}{name}: {kind.__name__} has no such field; nearest valid: "
                f"{prefix}{near[0]}"
            )
        elif isinstance(value, Mapping) and (part := _part(kind, name)) is not None:
            problems += _problems(part, value, f"{prefix}{name}.")
    problems += [
        f"{prefix}{name}: {kind.__name__} needs a value of it"
        for name, field in known.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in fields
    ]
    return problems


def _hint(kind: type, name: str) -> str:
    """Type of a field, as it is written."""
    hint = typing.get_type_hints(kind)[name.partition(".")[0]]
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")


def _part(kind: type, name: str) -> type | None:
    """Dataclass that is the type of a field, or one of its types."""
    hint = typing.get_type_hints(kind)[name]
    for choice in (hint, *typing.get_args(hint)):
        if isinstance(choice, type) and dataclasses.is_dataclass(choice):
            return choice
    return None
