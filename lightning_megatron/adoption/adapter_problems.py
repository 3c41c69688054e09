"""Refusals of what PEFT has and no layout has a rule for, before any process group forms."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_megatron.adoption.adapters import (
    base_layer,
    has_split_rows,
    is_lora,
    is_split,
    is_summed,
    is_tuner,
)
from lightning_megatron.adoption.classes import own_class
from lightning_megatron.adoption.own_layers import is_own_linear
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.degrees import Degrees

_BETWEEN_LAYERS = frozenset({"ADAPTION_PROMPT", "CARTRIDGE", "XLORA"})
"""Methods of PEFT that change what the model computes between its layers."""

_QUANTIZED = ("aqlm", "awq", "bitsandbytes", "eetq", "gptqmodel", "hqq", "torchao")
"""Packages whose layers and tensors have quantized weights."""


def adapter_problems(module: nn.Module, degrees: Degrees) -> list[str]:
    """Sentences about adapters of PEFT that the layout has no rule for."""
    if "peft" not in sys.modules or degrees.world_size == 1:
        return []
    problems: list[str] = []
    for name, layer in module.named_modules():
        if is_tuner(layer):
            fault = _fault(layer, base_layer(layer), degrees)
            problems += [f"{name}: {fault}"] if fault else []
        elif isinstance(configs := getattr(layer, "peft_config", None), Mapping):
            found = (_of_config(config, degrees) for config in configs.values())
            problems += [f"{name}: {fault}" for fault in found if fault]
    return list(dict.fromkeys(problems))


def quantization_problems(model: nn.Module) -> list[str]:
    """Sentences about layers of a model whose weights are quantized."""
    return [
        f"{name}: {fault}" for name, layer in model.named_modules() if (fault := _quantized(layer))
    ][:1]  # the others are like it


def _quantized(layer: nn.Module) -> str | None:
    """Problem of a layer whose weight is quantized; None for any other."""
    weight = layer._parameters.get("weight")
    kinds = [*type(layer).__mro__, *([] if weight is None else type(weight).__mro__)]
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    by = next((package for package in _QUANTIZED if package in packages), None)
    if by is None and (weight is None or weight.is_floating_point()):
        return None
    what = f"by {by}" if by else f"to {weight.dtype}"  # type: ignore[union-attr]
    return (
        f"the weight of {own_class(layer).__name__} is quantized {what}, and packed numbers cannot "
        "be split or sharded; nearest valid: the model in bfloat16, of which zero=3 or tp leaves "
        "each rank a part"
    )


def _fault(layer: Any, base: nn.Module, degrees: Degrees) -> str | None:
    if fault := _quantized(base):
        return fault
    split = [m for m in base.modules() if isinstance(m, ParallelLayer)]
    # The tokens of experts are divided over tp, too.
    axes = {"tp": degrees.tp} if split else {}
    if any(m.shard_axis == "ep" for m in split):
        axes["ep"] = degrees.ep
    over = ", ".join(f"{axis}={degree}" for axis, degree in axes.items() if degree > 1)
    if not over:
        return None
    kind, what = type(layer).__name__, f"{own_class(base).__name__}, which {over} splits"
    method = type(layer).__module__.split(".")[2].upper()
    if is_lora(layer, "Linear") and is_own_linear(base):
        variants = {type(v).__name__ for v in layer.lora_variant.values()}
    elif is_lora(layer, "Linear") and (is_split(base) or is_summed(base)):
        variants = {type(v).__name__ for v in layer.lora_variant.values()} - {"DoraLinearVariant"}
    elif is_lora(layer, "Embedding") and has_split_rows(base):
        variants = {type(v).__name__ for v in layer.lora_variant.values()}
    else:
        return f"{kind} of PEFT's {method} on {what}, has no rule; {_NEAREST}"
    if variants:
        return f"{', '.join(sorted(variants))} of PEFT on {what}, has no rule; {_NEAREST}"
    return None


_NEAREST = "nearest valid: LoRA of linear layers and embeddings, DoRA of linear layers, or tp=ep=1"


def _of_config(config: Any, degrees: Degrees) -> str | None:
    """Problems of a method of PEFT as a whole."""
    given = {axis: getattr(degrees, axis) for axis in ("tp", "pp", "cp")}
    layout = ", ".join(f"{axis}={degree}" for axis, degree in given.items() if degree > 1)
    method = config.peft_type.value
    if (config.is_prompt_learning or method in _BETWEEN_LAYERS) and layout:
        return (
            f"PEFT's {method} under {layout} has no rule, as it changes what the model computes "
            "between its layers; nearest valid: LoRA, or zero=3 alone"
        )
    if method == "ADALORA":
        return (
            f"PEFT's {method} on {degrees.world_size} processes has no rule, as it compares "
            "gradients of all layers, of which each process has parts; nearest valid: LoRA"
        )
    if getattr(config, "layer_replication", None) and degrees.pp > 1:
        return (
            f"PEFT's layer_replication={config.layer_replication} under {layout} has no rule, as "
            "it gives one layer several places in a pipeline; nearest valid: pp=1"
        )
    if tied := getattr(config, "target_modules_to_tie", None):
        return (
            f"PEFT's ensure_weight_tying=True, which lets adapters of {sorted(tied)} and of the "
            "embedding share memory under two parameters, has no rule on several processes; "
            "nearest valid: ensure_weight_tying=False"
        )
    return None
