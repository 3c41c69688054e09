"""What workers of the pool do with blocks: each rank is as one that torchrun has started."""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from lightning_megatron.cli import main
from tests.docs.command_lines import our_commands
from tests.docs.pages import Block


class BlockError(Exception):
    """A block failed; the message names its page and line."""


def run_in_page(blocks: Sequence[Block], source: str) -> None:
    """Run blocks of a page, one after the other in one namespace."""
    module = _main_module(source)
    with _as_main(module):
        for block in blocks:
            if block.language == "console":
                run_commands(block)
            else:
                _execute(block, module)


def run_program(block: Block, source: str) -> None:
    """Run one block as a program of its own."""
    module = _main_module(source)
    with _as_main(module):
        _execute(block, module)


def run_commands(block: Block) -> None:
    """Run each command of ours in this process; others are left out."""
    for line, arguments in our_commands(block.text):
        sys.argv = ["lightning-megatron", *arguments]
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception as error:
            raise BlockError(block.problem(line, f"{type(error).__name__}: {error}")) from error
        if code:
            raise BlockError(block.problem(line, f"exit code {code}, see the output"))


def _main_module(source: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = source  # inspect reads classes of it there
    return module


@contextmanager
def _as_main(module: ModuleType) -> Iterator[None]:
    """As of a script in the current folder: its neighbours can be imported."""
    before, argv = sys.modules["__main__"], sys.argv
    sys.modules["__main__"] = module
    sys.argv = [str(module.__file__)]
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = before, argv
        forget_modules_of(os.getcwd())


def forget_modules_of(folder: str) -> None:
    """Another page may have files of the same names."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder + os.sep):
            del sys.modules[name]


def _execute(block: Block, module: ModuleType) -> None:
    source = str(module.__file__)
    try:
        exec(compile(block.padded, source, "exec"), vars(module))
    except BaseException as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == source
        ]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        line = (lines[-1] if lines else None) or block.line
        text = f"{type(error).__name__}: {error}"
        raise BlockError(block.problem(line - block.line + 1, text)) from error
