"""What callbacks ask of the strategy they run under."""

import lightning.pytorch as pl

from lightning_megatron.errors import ConfigError


def need_megatron(callback: pl.Callback, trainer: pl.Trainer, why: str) -> None:
    """Refuse every other strategy than `MegatronStrategy`, which callbacks do not import.

    Args:
        callback: who asks.
        trainer: with the strategy.
        why: what it needs of it, as in "it needs the gradients".

    Raises:
        ConfigError: the strategy is another.
    """
    if not hasattr(type(trainer.strategy), "parallel_gradients"):
        raise ConfigError(
            f"{type(callback).__name__} under {type(trainer.strategy).__name__}: {why} of a "
            "MegatronStrategy; nearest valid: strategy=MegatronStrategy()"
        )
