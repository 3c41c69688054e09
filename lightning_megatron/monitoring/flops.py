"""FLOPs of a training step: those of the model, and those that the devices do.

*Model* FLOPs are those of forward and backward as the network is written, whatever the machine does
to save memory: the numerator of MFU (PaLM, arXiv 2204.02311, appendix B). For a network described
by a `TransformerConfig` there is a formula (`models.flops`, all attention scores counted). A module
may also tell its own: Lightning's ``flops_per_batch``, an attribute or property, for the batch of
one data-parallel rank, backward included.

*Hardware* FLOPs are what really runs, recomputed activations included: the numerator of HFU
(Korthikanti et al., arXiv 2205.05198). They are counted: while one training batch runs, every
matrix product, convolution and attention of this rank passes through `OperationCounter`. Where
nothing is recomputed they are the model's own, so that any network has an MFU.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_megatron._torch.graphs import CallersMode, DisableTorchFunctionSubclass, tree_flatten
from lightning_megatron._torch.kernels import grouped_mm_operator, host_attention_operators
from lightning_megatron.layers.context_attention.operator import Options
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.flops import training_flops_per_token

PALM = "forward and backward of the matrix products, all attention scores counted (PaLM, app. B)"
OWN = "the module's own flops_per_batch"
COUNTED = "matrix products, convolutions and attention, counted as they ran"


class ModelFlops(NamedTuple):
    """Model FLOPs of one token, and how they are known."""

    per_token: float
    formula: str


class OperationCounter(CallersMode):
    """Counts the floating-point operations that run while it is entered, backward included.

    Attributes:
        flops: counted so far, of plain tensors on this rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        forward, backward = host_attention_operators()
        self._formulas: dict[Any, Any] = {
            **FlopCounterMode(display=False).flop_registry,
            forward: _fused_forward,
            backward: _fused_backward,
            torch.ops.lightning_megatron.context_attention: _context_forward,
            torch.ops.lightning_megatron.context_attention_backward: _context_backward,
            grouped_mm_operator(): _grouped,
        }

    def start(self) -> None:
        """Count from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Count no longer."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # The operator of a tensor class is under way: its function is not asked for a second time.
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        return result


def _fused_forward(q: Tensor, k: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Operations of fused attention on CPUs, which torch does not count: all scores."""
    b, n, s, d = q.shape
    return 4 * b * n * s * k.shape[2] * d


def _fused_backward(
    gradient: Tensor, q: Tensor, k: Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> int:
    """Operations of its backward: the scores once more, and four products."""
    return _fused_forward(q, k, out_val=out_val) * 5 // 2


def _context_forward(q: Tensor, *args: Any, out_val: Any) -> int:
    """Operations of this rank in attention over cp: two products of its queries with all keys.

    All scores count, as torch counts them in attention that is not split.
    """
    b, s, n, d = q.shape
    return 4 * b * s * n * d * Options.decoded(*args[-3:]).key_length


def _context_backward(gradient: Tensor, *args: Any, out_val: Any) -> int:
    """Operations of its backward."""
    return _context_forward(gradient, *args, out_val=out_val) * 5 // 2


def _grouped(left: Tensor, right: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Operations of a product of groups of rows with a stack, or of the gradient of the stack."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


def model_flops(module: Any, batch: Any, tokens: int) -> ModelFlops | None:
    """Model FLOPs of a token of this batch; None where no formula is known.

    Args:
        module: the user's.
        batch: of this data-parallel rank.
        tokens: in it.
    """
    own = getattr(module, "flops_per_batch", None)
    if own is not None and tokens:
        return ModelFlops(float(own() if callable(own) else own) / tokens, OWN)
    config = getattr(module, "config", None)
    length = sequence_length(batch)
    if isinstance(config, TransformerConfig) and length:
        return ModelFlops(training_flops_per_token(config, length), PALM)
    return None


def token_tensor(batch: Any) -> Tensor | None:
    """The first tensor of whole numbers in a batch: the tokens."""
    return _tokens(_tensors(batch))


def _tensors(batch: Any) -> list[Tensor]:
    """Tensors with at least one dim, in order."""
    kind = type(batch)
    leaves = list(batch) if kind in (tuple, list) else [batch]
    leaves = list(batch.values()) if kind is dict else leaves
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        leaves = tree_flatten(batch)[0]  # nested
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]


def _tokens(tensors: list[Tensor]) -> Tensor | None:
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            return tensor
    return None


def sequence_length(batch: Any) -> int:
    """Tokens per sample; 0 for a batch without tokens."""
    tokens = token_tensor(batch)
    return 0 if tokens is None or tokens.ndim < 2 else tokens.shape[-1]


def count_tokens(batch: Any) -> int:
    """The number of tokens in a batch.

    The tokens are the elements of the batch's first integer tensor; a batch without one counts the
    samples of its first tensor.
    """
    return count_both(batch)[0]


def count_both(batch: Any) -> tuple[int, int]:
    """The numbers of tokens and of samples in a batch; these are its first tensor's first dim."""
    tensors = _tensors(batch)
    samples = tensors[0].shape[0] if tensors else 0
    tokens = _tokens(tensors)
    return samples if tokens is None else tokens.numel(), samples


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
(H100 is the SXM model.) Figures "with sparsity", twice as high, need sparse weights."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a device; None for an unknown device.

    Args:
        device_name: name that ``get_device_name`` of the device's module returns.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> peak_flops("a laptop")
    """
    for part, tera in _PEAK_TFLOPS:
        if part in device_name:
            return tera * 1e12
    return None
