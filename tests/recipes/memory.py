"""The formulas of docs/recipes.md for the memory of a GPU, under `bf16-mixed` and with AdamW."""

from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.layers import ParallelLayer
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.parallel.plan import ModulePlan
from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.topology.degrees import Degrees

GIB = 2**30


def parameters_of_fullest_rank(
    module: LightningModule, options: LayoutOptions, degrees: Degrees
) -> int:
    """Elements that the largest pipeline rank holds of its stages and tp parts, before ZeRO."""
    plan = ModulePlan(module, degrees, options.pp, options.stage_ranks)
    cut = {
        f"{prefix}.{name}"
        for prefix, layer in module.named_modules()
        if isinstance(layer, ParallelLayer)
        for name in layer.shard_dims()
    }
    held = [0] * degrees.pp
    for name, parameter in module.named_parameters():
        rank = plan.stage_ranks[plan.stage_of.get(name, 0)]
        held[rank] += parameter.numel() // (degrees.tp if name in cut else 1)
    return max(held)


def state_gib(module: LightningModule, options: LayoutOptions, degrees: Degrees) -> float:
    """GiB of weights, gradients and optimizer state."""
    count = parameters_of_fullest_rank(module, options, degrees)
    if options.zero.stage == 3:
        return 16 * count / degrees.dp / GIB
    return (6 * count + 16 * count / degrees.dp) / GIB


def activation_gib(config: TransformerConfig, tokens: int, options: LayoutOptions) -> float:
    """GiB of the activations of a rank's blocks, with the microbatches that 1F1B keeps alive."""
    h, m = config.hidden_size, config.mlp_width
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    kept = {"none": 4 * h + 2 * q + 2 * kv + 3 * m, "selective": 3 * h + 2 * q + 2 * kv + 2 * m}
    per_token = 2 * kept[options.activations.recompute] / options.tp
    blocks = config.num_layers / options.pp.degree
    return per_token * tokens * blocks * options.pp.degree / GIB


def meta(module: LightningModule) -> nn.Module:
    """The module with its network, on the meta device."""
    import torch

    with torch.device("meta"):
        module.configure_model()
    return module
