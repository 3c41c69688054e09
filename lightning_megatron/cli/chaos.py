"""`lightning-megatron chaos`: run a training command while faults are injected into it.

    lightning-megatron chaos --faults "kill:rank=1,step=20" -- torchrun ... train.py
    lightning-megatron chaos --mean 60 --duration 600 -- torchrun --max-restarts 100 ... train.py

The script needs no change and may use any strategy. A run that is to survive restarts needs
``torchrun --max-restarts`` and ``fit(ckpt_path="auto")``.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.chaos.faults import KINDS, Fault, parse_faults, random_faults
from lightning_megatron.testing.chaos.runner import read_result, run_command, table

_KINDS = "kill segfault abort exception slow:steps=5"
_DURATION_S = 600.0


def chaos(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `chaos`.

    Returns:
        The exit code of the command; 1 if it is 0 but the run did not recover from some fault; 2
        for a mistake of the user.
    """
    parser = _parser()
    ours, command = _split(list(args))
    options = parser.parse_args(ours)
    if options.list:
        print("\n".join(f"{name:<13} {kind.does}" for name, kind in KINDS.items()))
        return 0
    try:
        if not command:
            raise ConfigError("no command is given; nearest valid: chaos ... -- torchrun train.py")
        faults = _faults(options)
    except ConfigError as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    directory = options.directory or Path(f"chaos-{time.strftime('%Y%m%d-%H%M%S')}")
    if (directory / "started").exists():
        print(
            f"lightning-megatron: {directory} is of another run; nearest valid: a new one",
            file=sys.stderr,
        )
        return 2
    listed = "\n".join(f"  {fault}" for fault in faults)
    print(f"CHAOS: {shlex.join(command)}\nseed {options.seed}, kept in {directory}\n{listed}")
    sys.stdout.flush()
    try:
        code = run_command(command, faults, directory, limit_s=options.duration)
    except OSError as error:
        print(f"lightning-megatron: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2
    result = read_result(directory)
    print(f"\n{table(result)}\n{_ending(code)}; seed {options.seed}")
    if code:
        return code if code > 0 else 128 - code
    return 0 if result.recovered else 1


def _ending(code: int | None) -> str:
    return "the time was over" if code is None else f"the command ended with exit code {code}"


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    place = args.index("--") if "--" in args else len(args)
    return args[:place], args[place + 1 :]


def _faults(options: argparse.Namespace) -> list[Fault]:
    if options.mean is None:
        faults = parse_faults(options.faults or "kill:step=5")
        return [f if f.seed else replace(f, seed=options.seed + i) for i, f in enumerate(faults)]
    kinds = options.faults or _KINDS
    length = options.duration or _DURATION_S
    return random_faults(kinds, mean_s=options.mean, duration_s=length, seed=options.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron chaos",
        usage="%(prog)s [options] -- COMMAND...",
        description="Run a training command with injected faults, and print whether it detected "
        "and survived each.",
    )
    add = parser.add_argument
    add(
        "--faults",
        help="such as 'kill:rank=1,step=5,section=backward; slow:rank=0,amount=50,steps=20'; with "
        f"--mean, the faults to choose from ('{_KINDS}')",
    )
    add("--list", action="store_true", help="list the kinds of faults")
    add(
        "--mean", type=float, metavar="S", help="inject at random times, every S seconds on average"
    )
    add("--seed", type=int, default=0, help="seed of the random choices")
    add("--duration", type=float, metavar="S", help="end the command after S seconds")
    add("--directory", type=Path, help="directory of the records; default: chaos-DATE-TIME")
    return parser
