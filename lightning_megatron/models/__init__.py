"""Decoder-only transformers made of the parallel layers.

* The network: `TransformerConfig`, with `MixtureConfig` in it, `Transformer`, `TransformerBlock`;
  names of the presets: `preset_names`
* Text from a network: `generate`
* Size and cost: `count_parameters`, `training_flops_per_token`

Names are imported when they are first used: configuration and arithmetic need no torch.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.models.config import TransformerConfig, preset_names
    from lightning_megatron.models.flops import count_parameters, training_flops_per_token
    from lightning_megatron.models.generation import generate
    from lightning_megatron.models.mixture_config import MixtureConfig
    from lightning_megatron.models.transformer import Transformer, TransformerBlock

_HOMES = {
    "MixtureConfig": "mixture_config",
    "Transformer": "transformer",
    "TransformerBlock": "transformer",
    "TransformerConfig": "config",
    "count_parameters": "flops",
    "generate": "generation",
    "preset_names": "config",
    "training_flops_per_token": "flops",
}

__all__ = [
    "MixtureConfig",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "count_parameters",
    "generate",
    "preset_names",
    "training_flops_per_token",
]

__getattr__ = lazy_names(__name__, _HOMES)
