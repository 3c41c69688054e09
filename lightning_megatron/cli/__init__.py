"""The `lightning-megatron` command.

`fit`, `validate`, `test` and `predict` are LightningCLI's subcommands: everything a Trainer, a
module and a datamodule take can be set in a YAML file and overridden on the command line, the
layout included (`--trainer.strategy.tp=4`). `python -m lightning_megatron` is the same command.
Modules of the current folder are found (`fit --model my_file.MyModule`).

A mistake in the options, or a checkpoint that cannot be read, ends the command with exit code 2 and
the message alone: the stack of our own calls would hide it (see `lightning_megatron.errors`).
"""

import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from lightning_megatron.errors import EXIT_CODE, ConfigError, MegatronError, tell

_TRAINER_COMMANDS = {
    "fit": "train a module on a layout, from a YAML file and options",
    "validate": "run its validation on a checkpoint",
    "test": "run its test on a checkpoint",
    "predict": "run its predictions on a checkpoint",
}
"""Commands of LightningCLI."""
_COMMANDS = {
    "init": "write a recipe into this folder, or list the recipes",
    "generate": "continue a text with the model of a checkpoint",
    "convert": "take weights to and from Hugging Face, Lightning and one file",
    "adopt": "say how a model of another library would be split",
    "data": "show and verify tokens on disk",
    "ckpt": "list, show and verify checkpoints",
    "preprocess": "turn text into tokens on disk",
    "schedule": "draw a pipeline schedule and say what it costs",
    "report": "make an HTML page of a run from the events it left",
    "dashboards": "write files for Prometheus and Grafana",
    "doctor": "say whether this machine is fit to train",
}
"""Each is a function of its name."""

_ALIASES = {"train": "fit", "evaluate": "validate", "sample": "generate", "new": "init"}
"""Other names that users may try, with the right one, which the error then tells them."""

_NEEDED = ("torch", "lightning", "jsonargparse", "numpy", "safetensors", "torchmetrics")
"""Packages without which most commands do not run; `doctor` does."""

_READER_GONE = 128 + signal.SIGPIPE
"""Exit code of a program whose output nobody reads any more, as a shell reports it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: the command line without the program's name; `sys.argv` by default.

    Returns:
        The exit code: 0, or 2 for a mistake of the user or a checkpoint that cannot be read (`ckpt
        verify` and `doctor` have their own).
    """
    given = sys.argv[1:] if args is None else list(args)
    name = given[0] if given else ""
    if name in ("-h", "--help", ""):
        print(_help(), file=sys.stdout if name else sys.stderr)
        return 0 if name else EXIT_CODE
    if name == "--version":
        print(_versions())
        return 0
    try:
        if name in _COMMANDS:
            return _run(name, given[1:])
        if name not in _TRAINER_COMMANDS and not name.startswith("-"):
            raise ConfigError(_unknown(name))
        return _run_trainer(args if args is None else given)
    except (ValueError, MegatronError, ModuleNotFoundError) as error:
        mistake = error_in(error)
        if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED:
            mistake = ConfigError(
                f"{error.name} is not installed; `lightning-megatron doctor` says what is missing"
            )
        if mistake is None:
            raise
        tell(mistake)
        return EXIT_CODE


def _run_trainer(args: list[str] | None) -> int:
    # `python -m` puts the current folder there, a console script its own.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    # Late, so that `--help` of a broken installation and tests of this file do not pay for torch.
    from lightning_megatron._lightning.package_names import unite_names
    from lightning_megatron.cli.train import MegatronCLI

    unite_names()  # for modules of projects that import pytorch_lightning
    MegatronCLI(args=args)
    return 0


def _run(name: str, args: Sequence[str]) -> int:
    command = getattr(import_module(f"lightning_megatron.cli.{name}"), name)
    try:
        code: int = command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`; what is left to be flushed at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    return code


def error_in(error: BaseException) -> MegatronError | None:
    """Return the error of this package that is the cause of `error`, however deep, if there is one.

    jsonargparse wraps what a constructor raises into a `ValueError` of its own, one for each level
    of the configuration.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MegatronError):
        cause = cause.__cause__
    return cause


def _help() -> str:
    commands = {**_TRAINER_COMMANDS, **_COMMANDS}
    width = max(map(len, commands)) + 2
    lines = "\n".join(f"  {name:<{width}}{text}" for name, text in commands.items())
    return f"""\
usage: lightning-megatron COMMAND [options]

Train any LightningModule with tensor, pipeline and ZeRO data parallelism.

commands:
{lines}

options:
  -h, --help   show this
  --version    show the versions of this package, torch, lightning and Python

`lightning-megatron COMMAND --help` lists the options of a command, and
`lightning-megatron fit --trainer.strategy.help MegatronStrategy` those of the layout."""


def _versions() -> str:
    found = []
    for package in ("lightning-megatron", "torch", "lightning"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join([*found, f"Python {python_version()}"])


def _unknown(name: str) -> str:
    commands = [*_TRAINER_COMMANDS, *_COMMANDS]
    close = get_close_matches(name, [*commands, *_ALIASES], n=1)
    meant = [_ALIASES.get(known, known) for known in close]
    hint = f"did you mean `{meant[0]}`?" if meant else f"there are {', '.join(commands)}"
    return f"no command `{name}`; {hint}"
