"""Forward in a wider format, for layers of torch that cannot run with 16-bit parameters.

Under mixed precision a layer's forward sees 16-bit copies of its parameters. Autocast converts the
operands of a matrix product to one format, but it does not cover every operation: torch refuses a
batch norm in bfloat16 beside running statistics in float32 and, on CPUs, a layer norm in bfloat16
of a residual stream in float32. Parametrizations of 16-bit weights (the singular value of
`torch.nn.utils.parametrizations.spectral_norm`, the exponential of ``orthogonal``) are too rough or
not implemented. One device under autocast has float32 parameters in all of these layers.

So these layers see their parameters widened while they run, to the widest format of their inputs
and buffers. Nothing more is gathered or kept; the cost is ``4 P`` bytes for the ``P`` elements of
the layer until it is done, and nothing where all formats agree.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from typing_extensions import override

from lightning_megatron.parallel.forward_wrapper import BlockForward

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
OTHERS = (nn.LayerNorm, nn.GroupNorm, nn.Bilinear, ParametrizationList)
LAYERS = (*BATCH_NORMS, *INSTANCE_NORMS, *OTHERS)
"""Layers whose operations autocast does not convert, at least on CPUs."""


class WideForward(BlockForward):
    """Forward of a layer with parameters as wide as its inputs and buffers."""

    stays = True

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        own: dict[str, Any] = self._block._parameters
        wide = self._widest((*args, *kwargs.values(), *self._block._buffers.values()))
        narrow = {
            name: parameter
            for name, parameter in own.items()
            if parameter is not None
            and wide is not None
            and parameter.is_floating_point()
            and parameter.itemsize < wide.itemsize
        }
        if not narrow:
            return self._forward(*args, **kwargs)
        own.update({name: parameter.to(wide) for name, parameter in narrow.items()})
        try:
            return self._forward(*args, **kwargs)
        finally:
            own.update(narrow)

    def _widest(self, used: tuple[Any, ...]) -> torch.dtype | None:
        """Widest format of the layer's inputs and buffers."""
        if isinstance(self._block, ParametrizationList):  # nothing goes in
            return torch.float32
        formats = [x.dtype for x in used if isinstance(x, Tensor) and x.is_floating_point()]
        return max(formats, key=lambda dtype: dtype.itemsize, default=None)


def widen_where_needed(module: nn.Module) -> None:
    """Give the layers inside ``module`` that need it wide parameters while they run."""
    for layer in module.modules():
        held = getattr(layer.__dict__.get("forward"), "__self__", None)
        if isinstance(layer, LAYERS) and not isinstance(held, WideForward):
            WideForward(layer)
