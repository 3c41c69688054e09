"""Peak performance of devices, from their makers' data sheets.

Figures are dense: those "with sparsity", twice as high, need weights of which half are zero.
"""

_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
"""Names and dense bfloat16 matrix products in 1e12 operations per second; the first match counts.
(H100 is the SXM model.)"""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a device; None for an unknown device.

    Args:
        device_name: name that ``torch.cuda.get_device_name`` returns.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> peak_flops("a laptop")
    """
    for part, tera in _PEAK_TFLOPS:
        if part in device_name:
            return tera * 1e12
    return None
