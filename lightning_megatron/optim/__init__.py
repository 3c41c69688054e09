"""Optimizers, and their companions: gradient clipping, parameter groups, learning rates.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.optim.adafactor import Adafactor as Adafactor
    from lightning_megatron.optim.adamw import AdamW as AdamW
    from lightning_megatron.optim.build import make_optimizer as make_optimizer
    from lightning_megatron.optim.build import make_schedule as make_schedule
    from lightning_megatron.optim.clip_rules import PercentileClip as PercentileClip
    from lightning_megatron.optim.clip_rules import UnitClip as UnitClip
    from lightning_megatron.optim.clip_rules import ZScoreClip as ZScoreClip
    from lightning_megatron.optim.layerwise_lr import layerwise_groups as layerwise_groups
    from lightning_megatron.optim.lion import Lion as Lion
    from lightning_megatron.optim.lr_schedules import WarmupCosine as WarmupCosine
    from lightning_megatron.optim.lr_schedules import WarmupInverseSqrt as WarmupInverseSqrt
    from lightning_megatron.optim.lr_schedules import WarmupStableDecay as WarmupStableDecay
    from lightning_megatron.optim.lr_schedules import warmup_cosine as warmup_cosine
    from lightning_megatron.optim.muon import Muon as Muon
    from lightning_megatron.optim.param_groups import decay_groups as decay_groups
    from lightning_megatron.optim.param_groups import muon_groups as muon_groups

_HOMES = {
    "Adafactor": "adafactor",
    "AdamW": "adamw",
    "Lion": "lion",
    "Muon": "muon",
    "PercentileClip": "clip_rules",
    "UnitClip": "clip_rules",
    "WarmupCosine": "schedule",
    "WarmupInverseSqrt": "schedule",
    "WarmupStableDecay": "schedule",
    "ZScoreClip": "clip_rules",
    "decay_groups": "groups",
    "layerwise_groups": "depth",
    "make_optimizer": "choice",
    "make_schedule": "choice",
    "muon_groups": "groups",
    "warmup_cosine": "schedule",
}

__all__ = [
    "Adafactor",
    "AdamW",
    "Lion",
    "Muon",
    "PercentileClip",
    "UnitClip",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupStableDecay",
    "ZScoreClip",
    "decay_groups",
    "layerwise_groups",
    "make_optimizer",
    "make_schedule",
    "muon_groups",
    "warmup_cosine",
]

__getattr__ = lazy_names(__name__, _HOMES)
