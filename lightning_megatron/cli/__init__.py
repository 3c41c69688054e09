"""The `lightning-megatron` command.

`fit`, `validate`, `test` and `predict` are LightningCLI's subcommands: everything a Trainer, a
module and a datamodule take can be set in a YAML file and overridden on the command line, the
layout included (`--trainer.strategy.tp=4`). `python -m lightning_megatron` is the same command.

`convert` takes the weights of a checkpoint directory to one file or to Hugging Face, or brings them
from there or from Lightning's other strategies; `generate` has them continue a text. `ckpt` lists
checkpoints, shows what one contains and verifies them. `schedule` draws a pipeline schedule and
says what it costs.

`report` makes an HTML page of a run, from the events that it left behind.

A mistake in the configuration ends the command with exit code 2 and the message alone: the stack of
our own calls would hide it.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_megatron.errors import ConfigError

_SUBCOMMANDS = ("chaos", "ckpt", "convert", "doctor", "generate", "report", "schedule")
"""Each is a function of its name; the others are those of LightningCLI."""

_FILES = {"report": "run_report"}
"""Where a subcommand is, if not in a file of its name."""

_READER_GONE = 128 + signal.SIGPIPE
"""Exit code of a program whose output nobody reads any more, as a shell reports it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: the command line without the program's name; `sys.argv` by default.

    Returns:
        The exit code: 0, or 2 for a mistake in the configuration (`ckpt verify` has its own).
    """
    given = sys.argv[1:] if args is None else list(args)
    if given and given[0] in _SUBCOMMANDS:
        return _run(given[0], given[1:])
    # Late, so that `--help` of a broken installation and tests of this file do not pay for torch.
    from lightning_megatron.cli.train import MegatronCLI, is_main_process

    try:
        MegatronCLI(args=None if args is None else given)
    except ValueError as error:
        mistake = config_error_in(error)
        if mistake is None:
            raise
        if is_main_process():
            print(f"lightning-megatron: {mistake}", file=sys.stderr)
        return 2
    return 0


def _run(name: str, args: Sequence[str]) -> int:
    command = getattr(import_module(f"lightning_megatron.cli.{_FILES.get(name, name)}"), name)
    try:
        code: int = command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`; what is left to be flushed at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    return code


def config_error_in(error: BaseException) -> ConfigError | None:
    """Return the `ConfigError` that is the cause of `error`, however deep, if there is one.

    jsonargparse wraps what a constructor raises into a `ValueError` of its own, one for each level
    of the configuration.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__
    return cause
