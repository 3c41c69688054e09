"""`fit`, `validate`, `test` and `predict` through LightningCLI."""

import logging
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

# Imported so that their short class names are known to the parser.
from lightning_megatron.callbacks.fault_tolerance import FaultTolerance as FaultTolerance
from lightning_megatron.callbacks.monitor import Monitor as Monitor
from lightning_megatron.cli.report import Outcome, report
from lightning_megatron.data.text import TextDataModule as TextDataModule
from lightning_megatron.module import LanguageModel as LanguageModel
from lightning_megatron.strategies.megatron import MegatronStrategy


def is_main_process() -> bool:
    """Return whether this process may speak for all."""
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    return rank == 0


class MegatronCLI(LightningCLI):
    """LightningCLI for any module and datamodule, with the classes of this package known by name.

    Args:
        args: the command line without the program's name; `sys.argv` by default.
    """

    def __init__(self, args: ArgsType = None) -> None:
        self._args = list(args) if isinstance(args, list) else sys.argv[1:]
        _quieten()
        super().__init__(
            # Any subclass; the default is what the recipes use.
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # A rerun into the same folder is no mistake.
            save_config_kwargs={"overwrite": True},
            seed_everything_default=1,
            # A module's own hyperparameters go into the checkpoint, not the parser's view of them.
            load_from_checkpoint_support=False,
            # Modules configure their optimizers; LightningCLI would replace what they configure.
            auto_configure_optimizers=False,
            parser_kwargs={"prog": "lightning-megatron"},
            args=args,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"model": {"class_path": "lightning_megatron.module.LanguageModel"}})
        parser.set_defaults({"data": {"class_path": "lightning_megatron.data.text.TextDataModule"}})

    def after_fit(self) -> None:
        """Say where things are; LightningCLI calls this when `fit` is done."""
        if is_main_process():
            print("\n" + report(self._args, _outcome(self.trainer)))


def _outcome(trainer: pl.Trainer) -> Outcome:
    callback = trainer.checkpoint_callback
    checkpoint = None
    if isinstance(callback, ModelCheckpoint):
        checkpoint = callback.last_model_path or callback.best_model_path or None
    strategy = trainer.strategy
    layout = strategy.options if isinstance(strategy, MegatronStrategy) else None
    config: Any = getattr(trainer.lightning_module, "config", None)
    return Outcome(
        log_dir=trainer.loggers[0].log_dir if trainer.loggers else None,
        checkpoint=checkpoint,
        step=trainer.global_step,
        tp=layout.tp if layout else None,
        pp=layout.pp if layout else None,
        max_pp=getattr(config, "num_layers", 1),
    )


def _quieten() -> None:
    """Keep advertisements and Lightning's notes to itself off the screen."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    # Lightning 2.6 with torch 2.13; both are right and the user can do nothing about it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    # A resumed run has a folder of its own; Lightning says so from every rank.
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    # Whether a second loader process pays off is the user's decision, taken in the datamodule.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
