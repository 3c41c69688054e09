"""Plans that models of transformers carry themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_megatron.adoption.own_plans import OWN_PLANS
from lightning_megatron.adoption.plan import AdoptionPlan, expanded
from lightning_megatron.adoption.styles import splits_rows

_LEFT_OUT = {
    "cohere": {
        "layers.*.self_attn.q_norm": "per_head",
        "layers.*.self_attn.k_norm": "per_head",
    },
}
"""Styles that the plans of transformers lack, by ``config.model_type``."""


def is_huggingface(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


def plan_of(model: nn.Module) -> AdoptionPlan:
    """Plan of a model of transformers: ours, else that from its ``tp_plan`` and ``pp_plan``."""
    own = OWN_PLANS.get(getattr(model.config, "model_type", ""))
    if own is not None:
        return own(model)
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    config: Any = model.config
    base_plan = {**(config.base_model_tp_plan or {}), **_LEFT_OUT.get(config.model_type, {})}
    patterns = {f"{prefix}{k}": v for k, v in base_plan.items()}
    patterns |= getattr(type(model), "_tp_plan", None) or {}
    for name, style in (getattr(config, "base_model_ep_plan", None) or {}).items():
        if style == "ep_dispatch_experts":
            patterns.setdefault(prefix + name, style)
    styles = expanded(model, patterns)
    items: list[str] = []
    blocks: list[str] = []
    for name in _item_names(model, prefix):
        part = model.get_submodule(prefix + name)
        if isinstance(part, nn.ModuleList):
            blocks += [f"{prefix}{name}.{i}" for i in range(len(part))]
            items += blocks
        else:
            items.append(prefix + name)
        if _may_split_rows(model, part, styles):
            styles.setdefault(prefix + name, "embedding_rowwise")
    if items:
        items += list(getattr(type(model), "_pp_plan", None) or {})
    return AdoptionPlan(styles=styles, items=items, blocks=blocks)


def _item_names(model: nn.Module, prefix: str) -> Sequence[str]:
    """Names of the parts of a pipeline in the base model: its plan's, else the usual ones.

    None if the plan names parts that it does not have. That the usual ones are called in this order
    shows when the model runs.
    """
    base = model.get_submodule(prefix.rstrip("."))
    children = dict(base.named_children())
    planned = getattr(model.config, "base_model_pp_plan", None)
    if planned:
        return list(planned) if planned.keys() <= children.keys() else []
    lists = {n: len(part) for n, part in children.items() if isinstance(part, nn.ModuleList)}
    if not lists:
        return []
    blocks = max(lists, key=lambda name: lists[name])
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    before = [name for name, part in children.items() if part is embedding]
    names = list(children)
    after = [name for name in names[names.index(blocks) :] if "norm" in name]
    return [*before, blocks, *after]


def _may_split_rows(model: nn.Module, module: nn.Module, styles: Mapping[str, str]) -> bool:
    """Whether the rows of an embedding can be split, and those of all that share its weight."""
    if not styles or not splits_rows(module):
        return False
    sharing = (
        name
        for name, other in model.named_modules()
        if other is not module and getattr(other, "weight", None) is module.weight
    )
    return all(styles.get(name, "").startswith(("colwise", "embedding_row")) for name in sharing)
