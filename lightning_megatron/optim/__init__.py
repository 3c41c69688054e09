"""Optimizers that step on shards, gradient clipping, parameter groups and learning rates.

* Optimizers: `AdamW`, `Lion`, `Adafactor`, `Muon`; by name: `make_optimizer`
* Parameter groups: `decay_groups`, `muon_groups`, `layerwise_groups`
* Learning rates: `WarmupCosine`, `WarmupStableDecay`, `WarmupInverseSqrt`; by name:
  `make_lr_schedule`
* Rules of gradient clipping, for `GradientMonitor`: `PercentileClip`, `ZScoreClip`, `UnitClip`

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.optim.adafactor import Adafactor
    from lightning_megatron.optim.adamw import AdamW
    from lightning_megatron.optim.build import make_lr_schedule, make_optimizer
    from lightning_megatron.optim.clip import PercentileClip, UnitClip, ZScoreClip
    from lightning_megatron.optim.layerwise_lr import layerwise_groups
    from lightning_megatron.optim.lion import Lion
    from lightning_megatron.optim.lr_schedules import (
        WarmupCosine,
        WarmupInverseSqrt,
        WarmupStableDecay,
    )
    from lightning_megatron.optim.muon import Muon
    from lightning_megatron.optim.param_groups import decay_groups, muon_groups

_HOMES = {
    "Adafactor": "adafactor",
    "AdamW": "adamw",
    "Lion": "lion",
    "Muon": "muon",
    "PercentileClip": "clip",
    "UnitClip": "clip",
    "WarmupCosine": "lr_schedules",
    "WarmupInverseSqrt": "lr_schedules",
    "WarmupStableDecay": "lr_schedules",
    "ZScoreClip": "clip",
    "decay_groups": "param_groups",
    "layerwise_groups": "layerwise_lr",
    "make_optimizer": "build",
    "make_lr_schedule": "build",
    "muon_groups": "param_groups",
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
    "make_lr_schedule",
    "muon_groups",
]

__getattr__ = lazy_names(__name__, _HOMES)
