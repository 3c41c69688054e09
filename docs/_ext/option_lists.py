"""Lists of options with their defaults and meanings, from docstrings and parsers."""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

from public_names import public_objects

from lightning_megatron import cli

_CODE_OR_NAME = re.compile(r"``(.+?)``|`([^`]+)`")


def options_of(argument: str) -> str:
    """Fields of a configuration, or parameters of a class; a second word is put before each name.

    The class is given by its public name.
    """
    name, _, prefix = argument.partition(" ")
    cls = public_objects()[name]
    texts = _field_docs(cls) if dataclasses.is_dataclass(cls) else _parameter_docs(cls)
    parameters = inspect.signature(cls).parameters
    missing = parameters.keys() - texts.keys()
    assert not missing, f"{name}: no word about {missing}"
    return _list(
        (f"`{prefix.strip()}{field}`", _default(parameters[field].default), text)
        for field, text in texts.items()
        if field in parameters
    )


def command(name: str) -> str:
    """Arguments and options of a command of `lightning-megatron`, by its own parser."""
    parser = _parser(name)
    lines = [_sentence(parser.description), "", *_usage(parser), "", *_arguments(parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each, sub in action.choices.items():
                lines += ["", f"### {name} {each}", "", _sentence(sub.description)]
                lines += ["", *_usage(sub), "", *_arguments(sub)]
    return "\n".join(lines)


def commands(_: str) -> str:
    """All commands, in a table."""
    rows = {**cli._TRAINER_COMMANDS, **cli._COMMANDS}
    return "\n".join(
        ["| command | what it does |", "|---|---|"]
        + [f"| [`{name}`](#{name}) | {text} |" for name, text in rows.items()]
    )


def other_commands(_: str) -> str:
    """A section for each command that is not Lightning's."""
    return "\n\n".join(f"## {name}\n\n{command(name)}" for name in cli._COMMANDS)


def markdown(text: str) -> str:
    """A docstring as Markdown: public names link to the API reference."""
    last = {name.rpartition(".")[2]: name for name in public_objects()}

    def written(found: re.Match[str]) -> str:
        code, name = found.groups()
        if name in last:
            return f"{{py:obj}}`~{last[name]}`"
        return f"`{code or name}`"

    return _CODE_OR_NAME.sub(written, " ".join(text.split()))


def _list(options: Any) -> str:
    parts = []
    for name, default, text in options:
        head = f"{name}, default `{default}`" if default else name
        parts.append(f"{head}\n: {markdown(text)}" if text else head)
    return "\n\n".join(parts)


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, int | float | tuple | None) else type(value).__name__


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field, those of base classes first."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            texts = (ast.AnnAssign, ast.Expr)
            if isinstance(field, texts[0]) and isinstance(below, texts[1]):
                found[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def _parameter_docs(cls: type) -> dict[str, str]:
    """Section ``Args:`` of the docstring."""
    section = re.search(r"\nArgs:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(cls) or "", re.DOTALL)
    assert section, cls
    return dict(
        re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section[1], re.DOTALL | re.MULTILINE)
    )


class _Found(Exception):
    """Carries the parser out of a command."""


def _parser(name: str) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Found(self)

    function = getattr(import_module(f"lightning_megatron.cli.{name}"), name)
    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            function([])
        except _Found as found:
            parser: argparse.ArgumentParser = found.args[0]
            return parser
    raise AssertionError(f"{name} parses no arguments")


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    with mock.patch.dict("os.environ", {"COLUMNS": "98"}):
        usage = parser.format_usage().rstrip().replace("[-h] ", "")
    yield from ["```text", usage.removeprefix("usage: ").replace("\n" + 7 * " ", "\n"), "```"]


def _sentence(text: str | None) -> str:
    found = markdown(text or "").removesuffix(".")
    return f"{found[:1].upper()}{found[1:]}." if found else ""


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    return _list(
        (_spelling(action), _shown_default(action), _meaning(action))
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        and action.help is not argparse.SUPPRESS
    ).split("\n")


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    suffix = f" {value}" if action.nargs != 0 and action.choices is None else ""
    return ", ".join(f"`{option}{suffix}`" for option in action.option_strings)


def _shown_default(action: argparse.Action) -> str:
    default = action.default
    if default in (None, False, argparse.SUPPRESS) or "default" in (action.help or ""):
        return ""
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").removesuffix(".")
    if action.choices is None or not action.option_strings:
        return text
    return f"{text}; one of {', '.join(f'``{choice}``' for choice in action.choices)}"
