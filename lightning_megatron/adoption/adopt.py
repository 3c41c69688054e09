"""`adopt`: a model of another library under tp, pp and ZeRO, as it is."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

from torch import nn

from lightning_megatron.adoption.adapter_problems import quantization_problems
from lightning_megatron.adoption.adapters import (
    base_model,
    copied,
    with_copies,
    without_adapters,
)
from lightning_megatron.adoption.classes import become
from lightning_megatron.adoption.directory import open_directory
from lightning_megatron.adoption.generation import AdoptedGenerator
from lightning_megatron.adoption.huggingface import is_huggingface, plan_of
from lightning_megatron.adoption.own_layers import as_linears, is_own
from lightning_megatron.adoption.plan import AdoptionPlan, given_items, given_styles
from lightning_megatron.adoption.propose import propose
from lightning_megatron.adoption.saving import save_whole
from lightning_megatron.adoption.styles import STYLES, apply_styles
from lightning_megatron.adoption.torch_layers import guard_torch_layers
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.errors import ConfigError, raise_if_any

M = TypeVar("M", bound=nn.Module)


@overload
def adopt(
    model: M,
    *,
    tp_plan: Mapping[str, str] | None = None,
    trunk: Sequence[str] | None = None,
) -> M: ...


@overload
def adopt(
    model: str | os.PathLike[str],
    *,
    tp_plan: Mapping[str, str] | None = None,
    trunk: Sequence[str] | None = None,
    model_class: type[Any] | None = None,
    **options: Any,
) -> Any: ...


def adopt(
    model: nn.Module | str | os.PathLike[str],
    *,
    tp_plan: Mapping[str, str] | None = None,
    trunk: Sequence[str] | None = None,
    model_class: type[Any] | None = None,
    **options: Any,
) -> Any:
    """Change a model in place so that a strategy can split it, and return it.

    Args:
        model: model of transformers, or any module; or a model directory, whose weights each rank
            reads when the model has been divided: only its own, unit by unit. In a model made of
            this library's layers, linear layers become ``nn.Linear`` for PEFT, and nothing else
            changes.
        tp_plan: style of modules by pattern of their names; the model's own when None.
        trunk: names of the items of the pipeline, in the order of their calls, in which ``*``
            stands for a part of a name; the model's own when None.
        model_class: for a directory, the class of transformers or an auto class; the one that
            ``config.json`` names when None.
        options: for a directory, further arguments of ``from_pretrained`` (``dtype``,
            ``attn_implementation``, ...).

    Raises:
        ConfigError: a style, an item or a directory is not what it has to be; the model
            is then as before.
    """
    if isinstance(model, str | os.PathLike):
        model = open_directory(model, model_class, **options)
    elif model_class is not None or options:
        given = ", ".join([*(["model_class"] if model_class is not None else []), *options])
        raise ConfigError(
            f"adopt(model, {given}): these say how a directory is opened, and this is a "
            f"{type(model).__name__}; nearest valid: give them to its constructor"
        )
    base = base_model(model)
    raise_if_any(quantization_problems(base))
    if is_own(base) and tp_plan is None and trunk is None:
        as_linears(base)
        return model
    with without_adapters(base):
        is_given = tp_plan is not None and trunk is not None
        plan = AdoptionPlan() if is_given else plan_or_proposal(base)
        styles = plan.styles if tp_plan is None else given_styles(base, tp_plan)
        items, blocks = (plan.items, plan.blocks) if trunk is None else given_items(base, trunk)
        problems: Sequence[str] = ()
        try:
            apply_styles(base, styles)
        except ConfigError as error:
            if tp_plan is not None or not items:
                raise
            styles, problems = {}, error.problems  # of a plan that only tp needs
        guard_torch_layers(base, pipelined=bool(items))
        if items:
            become(base, AdoptedTrunk).name_items(items, blocks)
            base.__dict__["tp_problems"] = tuple(problems)
        if hasattr(base, "generate"):
            become(base, AdoptedGenerator)
    for adapter in copied(base):
        with with_copies(base, adapter) as names:
            _adopt_copies(base, styles, names)
    save_whole(base)
    return model


def plan_or_proposal(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a model; a proposal for one that carries none."""
    if is_huggingface(model):
        plan = plan_of(model)
        if plan.styles:
            return plan
    return propose(model).plan


def _adopt_copies(model: nn.Module, styles: Mapping[str, str], names: Sequence[str]) -> None:
    """Adopt copies of modules of a model that is adopted itself, whatever is in them included."""
    for name in names:
        if name in styles:  # of an attention that has been examined as a whole
            STYLES[styles[name]](model, name)
        apply_styles(model, {n: s for n, s in styles.items() if n.startswith(f"{name}.")})
