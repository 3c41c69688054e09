"""Options that have to be the same on all ranks, by the names that a user gives them.

Each process of a run is given its own copy of them: a configuration file that was changed on one
node only, or an old version of the script there, would have the ranks call different collectives
and wait for each other. So the ranks compare them when they meet (`launch.rendezvous`).
"""

import re
from collections.abc import Mapping
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
    options |= {name: _text(getattr(trainer, name, None)) for name in _OF_TRAINER}
    options["precision"] = _text(trainer.precision)
    options["seed_everything"] = repr(env.global_seed())
    return options


def _flat(prefix: str, group: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            found |= _flat(f"{prefix}{field.name}.", value)
        else:
            found[f"{prefix}{field.name}"] = _text(value)
    return found


def _text(value: Any, within: tuple[int, ...] = ()) -> str:
    """Text that is the same for equal values in every process.

    ``repr`` gives the items of a set in the order of their hashes, which Python draws anew for each
    process, and addresses of functions and of objects whose class has no ``__repr__``.
    """
    if id(value) in within:
        return "..."
    within = (*within, id(value))
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text(item, within) for item in value))}}}"
    if isinstance(value, Mapping):
        items = (f"{_text(key, within)}: {_text(item, within)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if type(value) in (list, tuple):
        text = ", ".join(_text(item, within) for item in value)
        return f"[{text}]" if type(value) is list else f"({text}{',' * (len(value) == 1)})"
    if isinstance(name := getattr(value, "__qualname__", None), str):
        return f"{value.__module__}.{name}"  # a class or a function
    kind: Any = type(value)
    if kind.__repr__ is not object.__repr__ and not is_dataclass(value):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    public = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
    arguments = (f"{name}={_text(item, within)}" for name, item in public.items())
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(arguments)})"
