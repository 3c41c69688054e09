"""Kernels without a public name, the threads that they use, and the history of allocations."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.devices import in_host_memory


def foreach_functions() -> dict[Any, str]:
    """Functions of lists of tensors, and the name of what each does to one (2.11-2.13)."""
    prefix = "_foreach_"
    names = (name for name in dir(torch) if name.startswith(prefix))
    return {getattr(torch, name): name.removeprefix(prefix) for name in names}


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Euclidean norm of each tensor, in one kernel where the device has one (2.11-2.13)."""
    norms: Any = torch._foreach_norm(list(tensors), 2, dtype=dtype) if tensors else []
    return list(norms)


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors in place by a scalar (2.11-2.13)."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def foreach_lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Interpolation between tensors and ``ends``, a part ``weight`` of the way (2.11-2.13)."""
    return list(torch._foreach_lerp(list(tensors), list(ends), weight))


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move all tensors towards ``ends`` by a part ``weight`` of the way (2.11-2.13)."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


def foreach_sub_signs_(tensors: Sequence[Tensor], others: Sequence[Tensor], by: float) -> None:
    """Move all tensors by ``by`` against the signs of ``others`` (2.11-2.13)."""
    torch._foreach_add_(list(tensors), list(torch._foreach_sign(list(others))), alpha=-by)


def foreach_clamp_(tensors: Sequence[Tensor], low: float, high: float) -> None:
    """Clamp all tensors in place (2.11-2.13)."""
    if tensors:
        torch._foreach_clamp_min_(list(tensors), low)
        torch._foreach_clamp_max_(list(tensors), high)


def unscale_(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply all in place by ``inverse``; 1 in ``found`` if any is not finite (2.11-2.13).

    Args:
        gradients: of any formats.
        found: a float32 scalar, left alone when all are finite; gradients may lie elsewhere.
        inverse: a float32 scalar.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), same in alike.items():
        here = found if device == found.device else torch.zeros_like(found, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(same, here, inverse.to(device))
        if here is not found:
            found.copy_(torch.maximum(found, here.to(found.device)))


def in_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor that nobody else holds, in another shape, but not as a view of it (2.11-2.13).

    torch's own linear operator ends like this. What is a view FSDP2 warns of, as its hooks would be
    lost if somebody changed it in place.
    """
    reshaped: Tensor = torch.ops.aten._unsafe_view(tensor, list(shape))
    return reshaped


def scaled_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """Product of two FP8 matrices times their scales (2.11-2.13).

    Args:
        left: ``[m, k]``, stored by rows.
        right: ``[k, n]``, stored by columns.
        scale_left: float32, a scalar or ``[m, 1]``.
        scale_right: float32, a scalar or ``[1, n]``.
        dtype: of the result.
        fast: add up within the tensor cores alone, which hold fewer bits of a sum; on Hopper the
            other way, which moves partial sums out, costs a good part of what FP8 gains.
    """
    # On CPUs autocast reaches inside and rounds to bfloat16 what is not scaled yet, but not below a
    # dispatch mode: what selective recomputation repeats would differ from what it repeats.
    with torch.autocast("cpu", enabled=False):
        if in_host_memory(left.device) and max(scale_left.numel(), scale_right.numel()) > 1:
            # Kernels of CPUs take one scale for all: in 2.11, and in oneDNN later (pytorch 179118).
            one = scale_left.new_ones(())
            plain: Tensor = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32)
            return (plain * scale_left * scale_right).to(dtype)
        product: Tensor = torch._scaled_mm(
            left, right, scale_left, scale_right, out_dtype=dtype, use_fast_accum=fast
        )
    return product


def record_allocations(on: bool) -> None:
    """Keep, or no longer keep, the history of allocations on GPUs (documented, 2.11-2.13)."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_allocations(path: str) -> None:
    """Write the kept history to a file, for torch's memory viewer (documented, 2.11-2.13)."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


_HARD = 2
"""``omp_pause_hard`` of OpenMP 5: end the threads and forget them."""


def end_kernel_threads() -> None:
    """End the threads that kernels on the CPU share out work to; the next kernel starts new ones.

    A fork has none of them, but GNU's OpenMP, which torch's wheels for Linux bring along, would
    wait for them in its first kernel, for ever (https://gcc.gnu.org/PR58378). torch has no function
    for this (2.11-2.13). Other implementations of OpenMP see to forks themselves.
    """
    with suppress(OSError, AttributeError):
        loaded = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libgomp" in line
        }
        for path in loaded:
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention ``[b, n, s, d]`` on CPUs, and its log-sum-exp ``[b, n, s]`` (2.11-2.13).

    ``scaled_dot_product_attention`` calls it, but does not return the log-sum-exp. Keys and values
    may have fewer heads. Rows that see nothing have output and log-sum-exp 0.
    """
    run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = run(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def cpu_attention_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs of `cpu_attention` (2.11-2.13)."""
    run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dq, dk, dv = run(grad, *inputs, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Flash attention ``[b, n, s, d]`` on CUDA, and its log-sum-exp (2.11-2.13)."""
    run: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = run(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs of `flash_attention` (2.11-2.13)."""
    run: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    q, k, _ = inputs
    # Of random numbers, of which there are none without dropout.
    seed, offset = (torch.empty(0, dtype=torch.int64, device=q.device) for _ in range(2))
    longest = q.shape[2], k.shape[2]
    none = None, None  # lengths of packed sequences
    dq, dk, dv = run(
        grad,
        *inputs,
        out,
        lse.contiguous(),
        *none,
        *longest,
        0.0,
        causal,
        seed,
        offset,
        scale=scale,
    )
    return dq, dk, dv


_EFFICIENT_ALIGN = 32
"""Rows to a multiple of which the log-sum-exp of `efficient_attention` is filled up."""
_BIAS_ALIGN = 16
"""Bytes at which its rows of addends begin."""


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention ``[b, n, s, d]`` on CUDA, and its log-sum-exp (2.11-2.13)."""
    run: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = run(q, k, v, _aligned_bias(bias, q, k), True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def efficient_attention_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs of `efficient_attention` (2.11-2.13)."""
    run: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    q, k, _ = inputs
    missing = -q.shape[2] % _EFFICIENT_ALIGN
    lse = torch.nn.functional.pad(lse, (0, missing), value=torch.inf).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]
    added = _aligned_bias(bias, q, k)
    dq, dk, dv, _ = run(
        grad, *inputs, added, out, lse, seed, seed, 0.0, wanted, causal, scale=scale
    )
    return dq, dk, dv


def _aligned_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The addend for every head, in memory as the kernel reads it."""
    if bias is None:
        return None
    t = k.shape[2]
    missing = -t % (_BIAS_ALIGN // bias.element_size())
    filled = torch.nn.functional.pad(bias, (0, missing))[..., :t]
    return filled.expand(*q.shape[:3], t)


def host_attention_operators() -> tuple[Any, Any]:
    """Operators of fused attention on the host, forward and backward (2.11-2.13)."""
    aten: Any = torch.ops.aten
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return getattr(aten, name), getattr(aten, f"{name}_backward")


def grouped_mm_operator() -> Any:
    """Operator behind `torch.nn.functional.grouped_mm` (2.11-2.13)."""
    aten: Any = torch.ops.aten
    return aten._grouped_mm
