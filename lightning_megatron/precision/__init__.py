"""Number formats of training, as precision plugins of Lightning.

* bfloat16: `Bf16MixedPrecision`, `Bf16TruePrecision`
* float16 with a scaled loss: `Fp16Precision`
* FP8 matrix products: `Fp8Precision`

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.precision.bf16 import Bf16MixedPrecision, Bf16TruePrecision
    from lightning_megatron.precision.fp8 import Fp8Precision
    from lightning_megatron.precision.fp16 import Fp16Precision

_HOMES = {
    "Bf16MixedPrecision": "bf16",
    "Bf16TruePrecision": "bf16",
    "Fp16Precision": "fp16",
    "Fp8Precision": "fp8",
}

__all__ = [
    "Bf16MixedPrecision",
    "Bf16TruePrecision",
    "Fp16Precision",
    "Fp8Precision",
]

__getattr__ = lazy_names(__name__, _HOMES)
