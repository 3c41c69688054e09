"""Options of one axis, of which a file or an earlier option gives the number alone.

``pp: 2`` in a recipe and ``--trainer.strategy.pp.schedule zbv`` on the command line mean two ranks
under another schedule. jsonargparse would put a config that knows nothing but the schedule in the
place of the number, so the number becomes a part of the config before it sees the options.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.strategy.data.batch_shares import MeasuredShares
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.expert_layout import ExpertConfig
from lightning_megatron.zero.data_parallel import ShardingConfig

STRATEGY = "--trainer.strategy"
NUMBERS = {"pp": "degree", "cp": "degree", "ep": "degree", "zero": "stage"}
"""Field of the config that holds the number, by axis."""


def help_of_axis(args: Sequence[str]) -> str | None:
    """Help for the config of an axis, if a command line asks for it; else None.

    jsonargparse offers ``--trainer.strategy.pp.help``, but does not accept it inside of a class.

    >>> "--trainer.strategy.pp.schedule" in help_of_axis(["fit", "--trainer.strategy.pp.help"])
    True
    """
    configs = {
        "pp": PipelineConfig,
        "cp": ContextConfig,
        "ep": ExpertConfig,
        "zero": ShardingConfig,
        "batch_shares": MeasuredShares,
    }
    for axis, config in configs.items():
        option = f"{STRATEGY}.{axis}"
        if any(arg.partition("=")[0] == f"{option}.help" for arg in args):
            parser = ArgumentParser(prog="lightning-megatron fit", usage="%(prog)s [options]")
            parser.add_class_arguments(config, option.lstrip("-"))
            return str(parser.format_help())
    return None


def with_degrees(args: Sequence[str]) -> list[str]:
    """Return a command line in which a number is an option beside the others of its axis.

    >>> with_degrees(["fit", "--trainer.strategy.pp=2", "--trainer.strategy.pp.schedule=zbv"])
    ['fit', '--trainer.strategy.pp.degree=2', '--trainer.strategy.pp.schedule=zbv']
    >>> with_degrees(["fit", "--trainer.strategy.pp", "2"])
    ['fit', '--trainer.strategy.pp', '2']
    """
    found = list(args)
    for axis, number in NUMBERS.items():
        option = f"{STRATEGY}.{axis}"
        others = [i for i, arg in enumerate(found) if arg.startswith(f"{option}.")]
        if not others:
            continue
        plain = [i for i, arg in enumerate(found) if arg.partition("=")[0] == option]
        for i in plain:
            found[i] = f"{option}.{number}{found[i][len(option) :]}"
        given = _number_in_files(found, axis)
        if given is not None:
            found.insert(min(others + plain), f"{option}.{number}={given}")
    return found


def _number_in_files(args: Sequence[str], axis: str) -> int | None:
    """The number that the last file with a word about the axis gives; None if it is a config."""
    given: Any = None
    for path in _files(args):
        try:
            node = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            continue  # of which the parser tells
        for key in ("trainer", "strategy", "init_args", axis):
            node = node.get(key) if isinstance(node, dict) else None
        given = given if node is None else node
    return given if isinstance(given, int) else None


def _files(args: Sequence[str]) -> Iterator[Path]:
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        option, equals, value = arg.partition("=")
        if option in ("-c", "--config"):
            yield Path(value if equals else following)
