"""Command lines and configurations in pages, parsed by the parser that the command has."""

import argparse
import io
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from lightning_megatron.cli import _TRAINER_COMMANDS, main
from lightning_megatron.cli.train import MegatronCLI
from lightning_megatron.errors import MegatronError
from tests.docs.pages import ROOT, Block

_OPERATORS = re.compile(r"[|&;]+|\d*[<>]+.*")


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Commands of a console block, each with the line on which it begins."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        begin, line = number, lines[number]
        number += 1
        if not line.startswith("$ "):
            continue
        while line.endswith("\\") and number < len(lines):
            line = line[:-1] + lines[number].lstrip("> ")
            number += 1
        yield begin + 1, line[2:]


def our_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Arguments of every `lightning-megatron`, also behind torchrun or srun."""
    for number, line in commands(text):
        words = shlex.split(line, comments=True)
        for index, word in enumerate(words):
            module = word == "lightning_megatron" and words[index - 1] == "-m"
            if module or Path(word).name == "lightning-megatron":
                rest = words[index + 1 :]
                ends = [i for i, each in enumerate(rest) if _OPERATORS.fullmatch(each)]
                yield number, rest[: ends[0]] if ends else rest


def problems_of_console(block: Block) -> Iterator[str]:
    if not any(True for _ in commands(block.text)):
        yield block.problem(1, "no line begins with `$ `; write ```text for an output")
    for number, line in commands(block.text):
        yield from (block.problem(number, text) for text in _problems_of_others(line))
    for number, arguments in our_commands(block.text):
        error = parse(tuple(arguments))
        if error:
            line = shlex.join(["lightning-megatron", *arguments])
            yield block.problem(number, f"{line}\n    {error}")


def _problems_of_others(line: str) -> Iterator[str]:
    words = shlex.split(line, comments=True)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if words[:1] == ["make"]:
        for word in words[1:]:
            if not word.startswith("-") and "=" not in word and word not in targets:
                yield f"no target `{word}` in the Makefile"
    for before, word in zip(["", *words], words, strict=False):
        if re.match(r"(recipes|examples)/", word) and not (ROOT / word).exists():
            yield f"no file `{word}`"
        if before == "-m" and word.startswith("benchmarks") and find_spec(word) is None:
            yield f"no module `{word}`"


def problems_of_yaml(block: Block, folder: Path) -> Iterator[str]:
    """A configuration that lacks a section gets it from the quickstart."""
    try:
        content: Any = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        yield block.problem(1, f"YAML: {error}")
        return
    if not isinstance(content, dict):
        yield block.problem(1, "a configuration is a mapping; mark other YAML `test: none`")
        return
    file = folder / "block.yaml"
    file.write_text(block.text)
    whole = {"model", "data", "trainer"} <= content.keys()
    first = () if whole else ("--config", "quickstart")
    error = _parse_trainer(["fit", *first, "--config", str(file)])
    file.unlink()
    if error:
        yield block.problem(1, error)


@cache
def parse(arguments: tuple[str, ...]) -> str | None:
    """Parse a command line, run nothing, and return what is wrong with it."""
    if arguments[:1] and arguments[0] in _TRAINER_COMMANDS:
        return _parse_trainer(list(arguments))
    stopped: Callable[..., Any] = mock.Mock(side_effect=_Parsed)
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: Any, *args: Any, **options: Any) -> None:
        parse_args(self, *args, **options)
        stopped()

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        return _outcome(lambda: main(list(arguments)))


class _Parsed(Exception):
    """The end of what is looked at."""


def _outcome(call: Callable[[], Any]) -> str | None:
    printed = io.StringIO()
    code: Any = 0
    try:
        with redirect_stderr(printed), redirect_stdout(printed):
            code = call()
    except _Parsed:
        return None
    except SystemExit as end:
        code = end.code
    except (MegatronError, ValueError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return printed.getvalue().strip() or f"exit code {code}" if code else None


class _Parser(MegatronCLI):
    """Parses, again and again: to build the parser takes longer than to use it."""

    made: Any = None

    def parse_arguments(self, parser: Any, args: Any) -> None:
        if self.made is None:
            self.made = parser
            raise _Parsed
        super().parse_arguments(parser, args)

    def parse(self, arguments: list[str]) -> None:
        self._args = arguments
        self.parse_arguments(self.made, arguments)


@cache
def _parser(command: str) -> _Parser:
    made = _Parser.__new__(_Parser)
    try:
        made.__init__(args=[command])  # type: ignore[misc]
    except _Parsed:
        return made
    raise AssertionError("LightningCLI parses its arguments when it is made")


def _parse_trainer(arguments: list[str]) -> str | None:
    found = _outcome(lambda: _parser(arguments[0]).parse(arguments))
    missing = found is not None and re.search("no module|No such file|does not exist", found)
    hint = "\n    (an earlier block of the page may be that file: `<!-- test: file NAME -->`)"
    return found + hint if found and missing else found
