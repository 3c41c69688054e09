"""Precision plugins for sharded parameters.

``Trainer(precision=...)`` makes one of Lightning's plugins, which know one device: their clipping
takes the norm of the local shards. `sharded_precision` replaces it by the plugin of the same name
here, which keeps Lightning's contexts and conversions and clips by the true global norm.

==============  ==========  ==========  ============
precision       at rest     compute     reduction
==============  ==========  ==========  ============
``32-true``     float32     float32     float32
``64-true``     float64     float64     float64
``bf16-mixed``  float32     bfloat16    float32
``bf16-true``   bfloat16    bfloat16    float32
``16-mixed``    float32     float16     float32
==============  ==========  ==========  ============

Under ``bf16-mixed`` and ``16-mixed`` parameters are gathered in 16 bits and the step runs under
autocast, so that softmax, losses and norms stay in float32. Gradients are added up over
microbatches in the format of the reduction, and are in that of the parameters when the optimizer
sees them. float16 needs a loss scale (`precision.loss_scale`).
"""

from typing import Any

from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from lightning_megatron.errors import ConfigError
from lightning_megatron.precision.bf16 import HalfShardedPrecision, MixedShardedPrecision
from lightning_megatron.precision.fp16 import Fp16Precision
from lightning_megatron.precision.loss_scale import SMALLEST
from lightning_megatron.precision.sharded import ShardedPrecision

SUPPORTED = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed")


class FullShardedPrecision(ShardedPrecision):
    """Plugin of ``32-true``."""


class DoubleShardedPrecision(ShardedPrecision, DoublePrecision):
    """Plugin of ``64-true``."""


def _with_scale_of(scaler: Any) -> Fp16Precision:
    """Make the plugin with the options of a ``GradScaler``."""
    return Fp16Precision(
        initial_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        min_scale=min(SMALLEST, scaler.get_scale()),
    )


def sharded_precision(plugin: Precision) -> ShardedPrecision:
    """Return the plugin of this package that replaces one of Lightning's.

    Raises:
        ConfigError: the precision is not supported.
    """
    if isinstance(plugin, ShardedPrecision):
        return plugin
    if type(plugin) is Precision:
        return FullShardedPrecision()
    if type(plugin) is DoublePrecision:
        return DoubleShardedPrecision()
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return HalfShardedPrecision("bf16-true")
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return MixedShardedPrecision("bf16-mixed", plugin.device)
    if type(plugin) is MixedPrecision and plugin.precision == "16-mixed":
        return _with_scale_of(plugin.scaler)
    nearest = "bf16-true" if str(plugin.precision) == "16-true" else "bf16-mixed"
    raise ConfigError(
        f"precision={plugin.precision!r} ({type(plugin).__name__}): MegatronStrategy runs "
        f"{', '.join(SUPPORTED)}; nearest valid: precision={nearest!r}"
    )
