"""Lightning's callbacks that average weights, and when they would average nothing.

`StochasticWeightAveraging` and `WeightAveraging` copy the module before its weights are spread over
ranks, and later walk through the parameters of both side by side, or exchange them. The copy has
whole weights, or, of a module that is built in ``configure_model``, none at all: averages would be
wrong, or left out without a word. And averages that are exchanged with narrow parameters, as those
are under mixed precision, would be rounded each time.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden


def averages(trainer: Trainer) -> bool:
    """Whether a callback averages weights, which then keep their format at rest."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(c, (StochasticWeightAveraging, WeightAveraging)) for c in callbacks)


def averaging_problems(trainer: Trainer, module: LightningModule, *, whole: bool) -> list[str]:
    """Return what stands against the callbacks that average weights.

    Args:
        trainer: has the callbacks.
        module: what is trained.
        whole: every rank holds all weights.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    problems = []
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and not whole:
            problems.append(
                f"callbacks=[{name}]: it averages a copy of the whole module, but this layout "
                "spreads the weights over ranks; nearest valid: zero of at most 2 with tp=1, ep=1 "
                f"and pp=1, or no {name}"
            )
        elif isinstance(callback, StochasticWeightAveraging) and is_overridden(
            "configure_model", module
        ):
            problems.append(
                f"callbacks=[{name}]: it copies the module before configure_model has built it, "
                "and would average nothing; nearest valid: layers built in __init__, or "
                "WeightAveraging"
            )
    return problems


def leave_schedulers_to_averages(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Let `StochasticWeightAveraging` restore the schedule that it has put in place of the user's.

    It does so in ``on_fit_start``, where callbacks are restored before the module is set up.

    Args:
        trainer: has the callbacks.
        states: of callbacks, in the checkpoint that training goes on from.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            state = states.get(callback.state_key, {})
            if state.get("scheduler_state") is not None:
                trainer.strategy.lr_scheduler_configs.clear()
