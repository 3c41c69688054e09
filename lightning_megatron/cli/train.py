"""`fit`, `validate`, `test` and `predict` through LightningCLI.

*Options of one axis*, of which a file or an earlier option gives the number alone: ``pp: 2`` in a
recipe and ``--trainer.strategy.pp.schedule zbv`` on the command line mean two ranks under another
schedule. jsonargparse would put a config that knows nothing but the schedule in the place of the
number, so the number becomes a part of the config before it sees the options.
"""

import logging
import os
import shlex
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_megatron._lightning.cli import BaseCLI
from lightning_megatron.callbacks.fault_tolerance import FaultTolerance as FaultTolerance
from lightning_megatron.cli.init import RECIPES
from lightning_megatron.cli.option_errors import explain, unknown_strategy

# With "as", classes that are imported so that the parser knows their short names.
from lightning_megatron.data.text import TextDataModule as TextDataModule
from lightning_megatron.data.tokens.token_data import TokenData as TokenData
from lightning_megatron.errors import ConfigError
from lightning_megatron.module import LanguageModel as LanguageModel
from lightning_megatron.monitoring.monitor import Monitor as Monitor
from lightning_megatron.monitoring.profiler_window import ProfilerWindow as ProfilerWindow
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.precision.fp8 import Fp8Precision as Fp8Precision
from lightning_megatron.strategy.data.batch_shares import MeasuredShares
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.expert_layout import ExpertConfig
from lightning_megatron.zero.data_parallel import ShardingConfig

_DEFAULTS = {
    "model": "lightning_megatron.module.LanguageModel",
    "data": "lightning_megatron.data.text.TextDataModule",
    "trainer.strategy": "lightning_megatron.strategy.megatron.MegatronStrategy",
}
"""Classes that are used where neither a file nor an option names others."""

_WRAPPED = "Does not validate against any of the Union subtypes"
"""Beginning of jsonargparse's message about an error of a constructor."""

_LIMITS = ("max_steps", "max_epochs")
"""Options of the Trainer that end a run."""


def is_main_process() -> bool:
    """Return whether this process may speak for all."""
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    return rank == 0


class _Parser(LightningArgumentParser):
    """Raises what is wrong, and takes no option for the beginning of another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, "allow_abbrev": False, **kwargs})


class MegatronCLI(BaseCLI):
    """LightningCLI for any module and datamodule, with the classes of this package known by name.

    Args:
        args: the command line without the program's name; `sys.argv` by default.

    Raises:
        ConfigError: an option, a class or a value is not known, or a file cannot be read; or the
            Trainer does not take what it is given.
    """

    @override
    def read_checkpoint_path(self) -> None:
        """Leave ``ckpt_path`` to the strategy: of a file Lightning would read hyper-parameters."""

    def __init__(self, args: ArgsType = None) -> None:
        self._args = list(args) if isinstance(args, list) else sys.argv[1:]
        _quieten()
        # What stands below the fields of a configuration is read for its help only: it takes time.
        wants_help = any(arg == "-h" or "help" in arg.partition("=")[0] for arg in self._args)
        set_parsing_settings(docstring_parse_attribute_docstrings=wants_help)
        self._began = _Began()
        super().__init__(
            # Any subclass; the default is what the recipes use.
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # A rerun into the same folder is no mistake.
            save_config_kwargs={"overwrite": True},
            seed_everything_default=1,
            trainer_defaults={"callbacks": [self._began]},
            # A module's own hyperparameters go into the checkpoint, not the parser's view of them.
            load_from_checkpoint_support=False,
            # Modules configure their optimizers; LightningCLI would replace what they configure.
            auto_configure_optimizers=False,
            parser_class=_Parser,
            parser_kwargs={"prog": "lightning-megatron", **_help_of(self.subcommands())},
            args=args,
        )

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The given one alone: parsers of the others take time and are not asked."""
        known = BaseCLI.subcommands()
        given = self._args[0] if self._args else ""
        return {given: known[given]} if given in known else known

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for option, class_path in _DEFAULTS.items():
            parser.set_defaults({option: {"class_path": class_path}})
        whole_numbers_first(parser)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if (told := help_of_axis(self._args)) is not None:
            print(told)
            sys.exit(0)
        try:
            self.config = parser.parse_args(with_degrees(_with_recipes(self._args)))
        except ArgumentError as error:
            commands = self.subcommands()
            known = self.parser_of(next((c for c in commands if c in self._args), "fit"))
            message = explain(str(error), known, _DEFAULTS, self._args)
            raise ConfigError(message) from error

    @override
    def before_instantiate_classes(self) -> None:
        """Let a CSVLogger stand in for TensorBoard's where that is not installed.

        The recipes name TensorBoardLogger, and have to run without any extra.
        """
        if not any(map(find_spec, ("tensorboard", "tensorboardX"))):
            without_tensorboard(self.config[str(self.subcommand)])

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            # jsonargparse tells of what a constructor raised in a message of its own, which hides
            # the user's line behind fifty others.
            cause: BaseException = error
            while cause.__cause__ is not None and _WRAPPED in str(cause):
                cause = cause.__cause__
            raise cause from None

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        problem = unknown_strategy(self.option("trainer.strategy"))
        if problem:
            raise ConfigError(problem)
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise ConfigError(f"trainer: {error}") from error

    def after_fit(self) -> None:
        """Say where things are; LightningCLI calls this when `fit` is done."""
        if not is_main_process():
            return
        if self._began.training:
            print("\n" + ending(self._args, self.trainer))
            return
        limits = (f"trainer.{name}={getattr(self.trainer, name)}" for name in _LIMITS)
        print(
            f"\nTrained nothing: the run is at step {self.trainer.global_step}, and "
            f"{' and '.join(limits)} let it go no further."
        )


def whole_numbers_first(parser: LightningArgumentParser) -> None:
    """Have options that take a whole number or a fraction read ``1`` as a whole number.

    For the Trainer ``limit_val_batches=1`` is one batch, and ``1.0`` all of them. jsonargparse
    tries the types of a union in their order, and typing gives ``Optional[Union[int, float]]`` the
    order in which some module was the first to write it, so that what else is installed decides.
    """
    for action in parser._actions:
        types = get_args(hint := getattr(action, "_typehint", None))
        if get_origin(hint) is Union and {int, float} <= set(types):
            ordered = sorted(types, key=lambda kind: (kind is float) - (kind is int))
            action._typehint = Union[tuple(ordered)]  # type: ignore[attr-defined]  # noqa: UP007


def without_tensorboard(config: Any) -> None:
    """Replace TensorBoardLogger by CSVLogger in the options of a subcommand, with a warning."""
    logger = config.get("trainer.logger")
    for given in logger if isinstance(logger, list) else [logger]:
        if str(getattr(given, "class_path", "")).endswith(".TensorBoardLogger"):
            rank_zero_warn(
                "tensorboard is not installed: metrics go to metrics.csv (CSVLogger); for curves "
                "`pip install tensorboard`, or the extra `monitor`"
            )
            given.class_path = "lightning.pytorch.loggers.CSVLogger"
            kept = ("save_dir", "name", "version", "prefix")
            for name in [name for name in vars(given.init_args) if name not in kept]:
                del given.init_args[name]


class _Began(Callback):
    """Knows whether there was anything to train."""

    training = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.training = True


def _with_recipes(args: Sequence[str]) -> list[str]:
    """A command line in which recipes stand with their paths: `NAME` or `NAME.yaml`.

    A file of the current folder counts for more than a recipe of this package. Modules that lie
    beside a configuration are found, so that a recipe may name one of its own.
    """
    replaced = list(args)
    for index, arg in enumerate(replaced):
        option, equals, name = arg.partition("=")
        if option not in ("-c", "--config"):
            continue
        place = index if equals else index + 1
        path = config_file(name if equals else "".join(replaced[place : place + 1]))
        if path is not None:
            replaced[place] = f"{option}={path}" if equals else str(path)
            if (folder := str(path.resolve().parent)) not in sys.path:
                sys.path.append(folder)
    return replaced


def config_file(name: str) -> Path | None:
    """File that a configuration's name stands for; None if there is none."""
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    candidates = [Path(name), Path(file)]
    if os.sep not in name:
        candidates.append(RECIPES / file)
    return next((path for path in candidates if path.is_file()), None)


def _help_of(commands: Iterable[str]) -> dict[str, Any]:
    """Options of the parsers by command: Lightning's usage lists every option without a word."""
    return {
        name: {
            "usage": f"lightning-megatron {name} [options]",
            "description": (
                f"{name.capitalize()} with the options of a YAML file (--config FILE; --config "
                "quickstart is a recipe of this package) and those given here, which count for "
                "more. Classes have options of their own: `lightning-megatron "
                f"{name} --trainer.strategy.help MegatronStrategy` shows those of the layout, "
                "--trainer.callbacks.help Monitor those of a callback."
            ),
        }
        for name in commands
    }


def ending(args: Sequence[str], trainer: pl.Trainer) -> str:
    """Return the last lines of `fit`: where its files are, and the command to train as long again.

    Args:
        args: the command line of the run, without the program's name.
        trainer: the trainer after `fit`.
    """
    lines = [f"Trained to step {trainer.global_step}."]
    if trainer.loggers and trainer.loggers[0].log_dir:
        lines.append(f"  log         {trainer.loggers[0].log_dir}")
    checkpoint = _newest_checkpoint(trainer)
    if checkpoint is not None:
        layout = _other_layout(trainer)
        # The last of several values of an option counts.
        further = ["--trainer.max_steps", str(2 * trainer.global_step), "--ckpt_path", checkpoint]
        lines += [
            f"  checkpoint  {checkpoint}",
            f"\nGo on {'under another layout' if layout else 'from here'}:",
            f"  {shlex.join(['lightning-megatron', *args, *layout, *further])}",
        ]
    return "\n".join(lines)


def _newest_checkpoint(trainer: pl.Trainer) -> str | None:
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint):
        return None
    path = callback.last_model_path or callback.best_model_path
    # A run that went on from another folder may name a file of that one.
    return path if "://" in path or os.path.exists(path) else None


def _other_layout(trainer: pl.Trainer) -> list[str]:
    """Options of a layout that splits the model over as many ranks: by layers if there are enough.

    Empty if there is none.
    """
    if not isinstance(trainer.strategy, MegatronStrategy):
        return []
    given = trainer.strategy.options
    ranks = given.tp * given.pp.degree
    layers = getattr(getattr(trainer.lightning_module, "config", None), "num_layers", 1)
    for tp, pp in ((1, ranks), (ranks, 1)):
        if (tp, pp) != (given.tp, given.pp.degree) and pp <= layers:
            return ["--trainer.strategy.tp", str(tp), "--trainer.strategy.pp", str(pp)]
    return []


def _quieten() -> None:
    """Keep advertisements and Lightning's notes to itself off the screen."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    # A resumed run has a folder of its own; Lightning says so from every rank.
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    # Whether a second loader process pays off is the user's decision, taken in the datamodule.
    warnings.filterwarnings("ignore", message=".*does not have many workers")


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
