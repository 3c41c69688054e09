"""Options that have to be the same on all ranks, by the names that a user gives them.

Each process of a run is given its own copy of them: a configuration file that was changed on one
node only, or an old version of the script there, would have the ranks call different collectives
and wait for each other. So the ranks compare them when they meet (`launch.rendezvous`).
"""

from dataclasses import fields, is_dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron import env
from lightning_megatron.strategy.preflight.checks import LayoutOptions

_OF_TRAINER = (
    "max_steps",
    "max_epochs",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "limit_train_batches",
    "limit_val_batches",
)
"""Options that decide which collectives ranks call, and when."""


def named_options(trainer: Trainer, layout: LayoutOptions, **groups: Any) -> dict[str, str]:
    """Return all options that ranks compare, as text by name.

    Args:
        trainer: of the run.
        layout: options of the strategy itself.
        groups: its groups of options, by the name of the argument.
    """
    options = _flat("", layout)
    for name, group in groups.items():
        options |= _flat(f"{name}.", group)
    options |= {name: repr(getattr(trainer, name, None)) for name in _OF_TRAINER}
    options["precision"] = repr(trainer.precision)
    options["seed_everything"] = repr(env.global_seed())
    return options


def _flat(prefix: str, group: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(value):
            found |= _flat(f"{prefix}{field.name}.", value)
        else:
            found[f"{prefix}{field.name}"] = repr(value)
    return found
