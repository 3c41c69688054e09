"""Plan of an adoption: which modules are split how, and what a pipeline is made of."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from lightning_megatron.errors import lists_of_names, raise_if_any


@dataclass(frozen=True, kw_only=True)
class AdoptionPlan:
    """Plan by which `adopt` changes a model."""

    styles: Mapping[str, str] = field(default_factory=dict)
    """Style (`adoption.styles`) of each module that is split, by its name in the model."""
    items: Sequence[str] = ()
    """Names of the items of the pipeline, in the order of their calls; none: no pipeline."""
    blocks: Sequence[str] = ()
    """Names of the items between whose ends sequences may be split (over tp and cp)."""


def expanded(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Styles by name, from styles by pattern, in which ``*`` stands for a part of a name.

    A pattern names modules, or parameters. The last one that fits a name counts.
    """
    return {
        name: style
        for name in names_in(model)
        for pattern, style in patterns.items()
        if matches(name, pattern)
    }


def given_styles(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Styles by name, from the patterns of a user.

    Raises:
        ConfigError: a pattern fits nothing, or two fit one name and disagree.
    """
    names, problems = names_in(model), []
    found: dict[str, str] = {}
    for pattern, style in patterns.items():
        fitting = [name for name in names if matches(name, pattern)]
        if not fitting:
            problems.append(_nothing("tp_plan", pattern, names))
        for name in fitting:
            if found.setdefault(name, style) != style:
                problems.append(
                    f"tp_plan: {name} has the styles {found[name]!r} and {style!r}, by two "
                    f"patterns; nearest valid: tp_plan without {pattern!r}"
                )
    raise_if_any(problems)
    return found


def given_items(model: nn.Module, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of the items that a user gives, and of those that came by a ``*``.

    Raises:
        ConfigError: a name fits no module, fits one that holds or is another item, or one without
            a forward.
    """
    raise_if_any(lists_of_names(trunk=patterns))
    names = [name for name, _ in model.named_modules() if name]
    items: list[str] = []
    blocks: list[str] = []
    problems = []
    for pattern in patterns:
        fitting = [name for name in names if matches(name, pattern)]
        if not fitting:
            problems.append(_nothing("trunk", pattern, names))
        items += fitting
        blocks += fitting if "*" in pattern else []
    problems += _item_problems(model, items)
    raise_if_any(problems)
    return items, blocks


def _item_problems(model: nn.Module, items: Sequence[str]) -> Iterable[str]:
    known: dict[int, str] = {}
    for name in items:
        module = model.get_submodule(name)
        before = known.setdefault(id(module), name)
        if items.count(name) > 1:
            yield f"trunk: {name!r} is given twice; nearest valid: once, where it is called"
        elif before != name:
            yield (
                f"trunk: {before!r} and {name!r} are one module, but an item is called once; "
                "nearest valid: a trunk without it"
            )
        outer = next((other for other in items if name.startswith(f"{other}.")), None)
        if outer is not None:
            yield f"trunk: {name!r} is a part of the item {outer!r}; nearest valid: one of the two"
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield (
                f"trunk: {name!r} is a {type(module).__name__}, which has no forward; "
                f"nearest valid: {name + '.*'!r}"
            )


def names_in(model: nn.Module) -> list[str]:
    """Names of all modules and parameters of a model."""
    modules = [name for name, _ in model.named_modules() if name]
    return modules + [name for name, _ in model.named_parameters()]


def matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nothing(option: str, pattern: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
    nearest = f"; nearest valid: {close[0]!r}" if close else ""
    return f"{option}: {pattern!r} names nothing in the model{nearest}"
