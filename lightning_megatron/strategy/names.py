"""Names of the strategy: ``Trainer(strategy="megatron_tp2_pp2_zero1")``.

A name is ``megatron`` with the degrees of the layout behind it, in any order; what it leaves out is
1, and zero as for `MegatronStrategy`. ``megatron`` and ``megatron_zero_0`` to ``megatron_zero_3``
are registered with Lightning, so that lists of strategies show them; the others are made from their
name. They are looked up wherever Lightning looks for a string: ``Trainer(strategy=)``, its command
line and the environment variable ``PL_TRAINER_STRATEGY``.

Fabric and the package ``pytorch_lightning`` have registries of their own, which refuse these names
and a `MegatronStrategy` in words that say what to write.
"""

import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from lightning_megatron._lightning.package_names import UNITING, other_package
from lightning_megatron._lightning.registry import open_registry
from lightning_megatron.errors import ConfigError
from lightning_megatron.strategy.value import StrategyValue

NAME = "megatron"

_DEGREE = re.compile(r"_(tp|pp|cp|ep|zero)_?(\d+)(?=_|$)")
_STAGES = range(4)
_DESCRIPTION = "Tensor, pipeline and ZeRO data parallelism for any LightningModule"


def options_of(name: str) -> dict[str, int] | None:
    """Options of the strategy that a name stands for; None if it is no name of this strategy.

    >>> options_of("megatron_tp2_pp2_zero1")
    {'tp': 2, 'pp': 2, 'zero': 1}
    >>> options_of("megatron_zero_3"), options_of("megatron"), options_of("ddp")
    ({'zero': 3}, {}, None)

    Raises:
        ConfigError: it is nearly one.
    """
    head, underscore, tail = name.lower().partition("_")
    if not get_close_matches(head, [NAME], cutoff=0.75):
        return None
    found = _DEGREE.findall(underscore + tail)
    nearest: dict[str, int] = {}
    for axis, digits in found:
        number = min(int(digits), _STAGES[-1]) if axis == "zero" else int(digits)
        if number or axis == "zero":
            nearest.setdefault(axis, number)
    given = [(axis, int(digits)) for axis, digits in found]
    rest = _DEGREE.sub("", underscore + tail)
    if head == NAME and not rest and given == list(nearest.items()):
        return nearest
    best = "_".join([NAME, *(f"{axis}{number}" for axis, number in nearest.items())])
    raise ConfigError(
        f"strategy={name!r}: a name of MegatronStrategy is {NAME} with degrees behind it, as in "
        "megatron_tp2_pp2_zero1: each of tp, pp, cp and ep at most once and at least 1, zero 0 to "
        f"3; nearest valid: {best!r}, or MegatronStrategy(...), which has the other options"
    )


def register(registry: Any, make: Callable[..., Any]) -> None:
    """Have Lightning know the names, and tell a strategy that a further Trainer takes it.

    Args:
        registry: Lightning's ``StrategyRegistry``.
        make: makes a strategy of its options.
    """
    for name in (NAME, *(f"{NAME}_zero_{stage}" for stage in _STAGES)):
        registry.register(name, make, _DESCRIPTION, override=True, **(options_of(name) or {}))
    open_registry(registry, _takes, lambda name: make(**(options_of(name) or {})))
    refuse_elsewhere()


def _takes(given: object) -> bool:
    """Whether ``given`` is a name of ours; a strategy of ours begins anew."""
    if isinstance(given, str):
        return options_of(given) is not None
    if isinstance(given, StrategyValue):
        given.begin_anew()
    return False


_FABRIC = (
    "Fabric(strategy={given}): Fabric calls parts of your loop, and MegatronStrategy runs a whole "
    "step, so that it needs a Trainer; nearest valid: a LightningModule of six lines around your "
    "model, and Trainer(strategy={given}) ('From Fabric' in the page 'Migrating from another "
    "strategy'), or Fabric(strategy='fsdp')"
)
_OTHER_PACKAGE = (
    "Trainer(strategy={given}): this Trainer is of the package pytorch_lightning, and "
    "MegatronStrategy is for that of lightning.pytorch, whose classes are others; nearest valid: "
    + UNITING
)
_ELSEWHERE = (
    ("lightning", "fabric.strategies", "STRATEGY_REGISTRY", _FABRIC),
    ("lightning_fabric", "strategies", "STRATEGY_REGISTRY", _FABRIC),
    ("pytorch_lightning", "strategies", "StrategyRegistry", _OTHER_PACKAGE),
)
"""Registries that refuse us: package, module, name, text."""


def refuse_elsewhere() -> None:
    """Have the registries that cannot take the strategy say what to write instead.

    It holds for those that have been imported, so that it is called whenever a strategy is made.
    """
    for package, submodule, registry, text in _ELSEWHERE:
        name = f"{package}.{submodule}"
        module = sys.modules.get(name) if package == "lightning" else other_package(name)
        if module is not None:
            open_registry(getattr(module, registry), partial(_refuse, text))


def _refuse(text: str, given: object) -> bool:
    """Raise ``text`` for a name or a strategy of ours."""
    name = isinstance(given, str) and given.lower().startswith(NAME)
    if name or isinstance(given, StrategyValue):
        raise ConfigError(text.format(given=repr(given) if name else given))
    return False
