"""The `lightning-megatron` command.

`fit`, `validate`, `test` and `predict` are LightningCLI's subcommands: everything a Trainer, a
module and a datamodule take can be set in a YAML file and overridden on the command line, the
layout included (`--trainer.strategy.tp=4`). `python -m lightning_megatron` is the same command.

`convert` takes the weights of a checkpoint directory to one file or to Hugging Face, or brings them
from there; `generate` has them continue a text. `ckpt` lists checkpoints, shows what one contains
and verifies them. `schedule` draws a pipeline schedule and says what it costs.

A mistake in the configuration ends the command with exit code 2 and the message alone: the stack of
our own calls would hide it.
"""

import sys
from collections.abc import Sequence

from lightning_megatron.errors import ConfigError


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: the command line without the program's name; `sys.argv` by default.

    Returns:
        The exit code: 0, or 2 for a mistake in the configuration (`ckpt verify` has its own).
    """
    given = sys.argv[1:] if args is None else list(args)
    if given[:1] == ["convert"]:
        from lightning_megatron.cli.convert import convert

        return convert(given[1:])
    if given[:1] == ["ckpt"]:
        from lightning_megatron.cli.ckpt import ckpt

        return ckpt(given[1:])
    if given[:1] == ["generate"]:
        from lightning_megatron.cli.generate import generate

        return generate(given[1:])
    if given[:1] == ["schedule"]:
        from lightning_megatron.cli.schedule import schedule

        return schedule(given[1:])
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


def config_error_in(error: BaseException) -> ConfigError | None:
    """Return the `ConfigError` that is the cause of `error`, however deep, if there is one.

    jsonargparse wraps what a constructor raises into a `ValueError` of its own, one for each level
    of the configuration.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__
    return cause
