"""A recipe as the command line reads it, up to the moment at which processes would connect."""

from pathlib import Path
from typing import Any

from lightning_megatron.cli.train import MegatronCLI
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.strategy.preflight.checks import examine

RECIPES = Path(__file__).parents[2] / "recipes"


class DryRun(MegatronCLI):
    """Instantiates everything, with the real parser, and trains nothing."""

    def fit(self, **_: Any) -> None:
        """In place of the Trainer's."""

    def after_fit(self) -> None:
        """Nothing was trained."""


def dry_run(recipe: str, *options: str) -> DryRun:
    """What a recipe names, instantiated."""
    return DryRun(["fit", "--config", str(RECIPES / f"{recipe}.yaml"), *options])


def problems(cli: DryRun) -> list[str]:
    """Everything that the strategy would refuse before processes connect."""
    trainer, module, strategy = cli.trainer, cli.model, cli.trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    module.trainer = trainer
    trainer.datamodule = cli.datamodule
    strategy._lightning_module = module
    found = [*strategy._connection.problems(strategy.options.zero.offload_parameters)]
    found += strategy.checkpoints.problems(strategy.checkpoint_io)
    return [*found, *examine(trainer, module, strategy.options, trainer.world_size).problems]
