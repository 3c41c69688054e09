"""FP8 products by Transformer Engine, behind the same `Fp8Precision`.

Each layer has a ``transformer_engine.pytorch.Linear`` without weights, which gets the layer's
weight for each call and runs inside ``autocast`` with a recipe of Transformer Engine:

============  =======================  ===================
recipe        of Transformer Engine    sizes multiples of
============  =======================  ===================
tensorwise    ``Float8CurrentScaling`` 16
blockwise     ``Float8BlockScaling``   128
mxfp8         ``MXFP8BlockScaling``    32
============  =======================  ===================

It computes one rank's part; this package runs the collectives around it and decides when gradients
are computed, as for every other backend (`layers.linear_functions`). So its forward runs inside the
layer's autograd node and makes a small graph of its own, which the layer's backward runs. Both
gradients are then computed at once, also in a zero-bubble backward, and a recomputed block is
recomputed twice, once for each graph. Each rank has its own scales of tensors that tp splits, as in
Transformer Engine.

``DelayedScaling`` is not offered: Transformer Engine keeps its histories in pickled state, which
checkpoints of this package do not hold, and updates them when an autocast region ends, which
recomputation enters again. The ``torch`` backend has ``delayed``.

The calls are those of release 2.20.2, whose ``autocast`` takes ``recipe`` and
``amax_reduction_group``; releases without it have ``fp8_autocast``, with ``fp8_recipe`` and
``fp8_group``. Not run on a GPU yet.
"""

import importlib
import logging
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.nn import functional as F

log = logging.getLogger(__name__)

TE_RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
"""Classes in ``transformer_engine.common.recipe``."""

TE_ALIGNMENT = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Divisors of the sizes of operands."""


def missing() -> str | None:
    """Reason why Transformer Engine cannot be imported; None if it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # without its binaries it raises RuntimeError
        log.debug("transformer_engine.pytorch: %s", error)
        return (
            "transformer_engine cannot be imported; pip install --no-build-isolation "
            "'lightning-megatron[gpu]'"
        )
    return None


class Kept(NamedTuple):
    """Inputs and output of the graph of a forward."""

    output: GradientEdge
    x: GradientEdge
    weight: GradientEdge


class Gradients(NamedTuple):
    """Both gradients of a product."""

    x_ni: Tensor
    weight_oi: Tensor


class TransformerEngineGemm:
    """GemmBackend that Transformer Engine computes.

    Args:
        recipe: one of `TE_RECIPES`.
        out_features: rows of the weight on this rank.
        in_features: columns of the weight on this rank.
        group: process group over which Transformer Engine may reduce magnitudes; that of tp.
    """

    def __init__(
        self, recipe: str, out_features: int, in_features: int, group: dist.ProcessGroup | None
    ) -> None:
        self._te: Any = importlib.import_module("transformer_engine.pytorch")
        recipes: Any = importlib.import_module("transformer_engine.common.recipe")
        self._recipe = getattr(recipes, TE_RECIPES[recipe])()
        self._multiple = TE_ALIGNMENT[recipe]
        self._group = group
        self._linear = self._te.Linear(
            in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="meta"
        )

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, Kept]:
        """See `layers.gemm`."""
        missing_rows = -x_ni.shape[0] % self._multiple
        with torch.enable_grad(), self._autocast():
            x, weight = x_ni.detach().requires_grad_(), weight_oi.detach().requires_grad_()
            padded = F.pad(x, (0, 0, 0, missing_rows)) if missing_rows else x
            y = functional_call(self._linear, {"weight": weight}, (padded,))
            y = y[: x.shape[0]] if missing_rows else y
        kept = Kept(get_gradient_edge(y), get_gradient_edge(x), get_gradient_edge(weight))
        return y.detach(), kept

    def prepare_gradient(self, grad_no: Tensor, kept: Kept) -> Gradients:
        """See `layers.gemm`."""
        found = torch.autograd.grad([kept.output], [kept.x, kept.weight], [grad_no])
        return Gradients(*found)

    def input_gradient(self, gradient: Gradients, weight_oi: Tensor) -> Tensor:
        """See `layers.gemm`."""
        del weight_oi
        return gradient.x_ni

    def weight_gradient(self, gradient: Gradients, x_ni: Tensor) -> Tensor:
        """See `layers.gemm`."""
        del x_ni
        return gradient.weight_oi

    def _autocast(self) -> AbstractContextManager[Any]:
        region: AbstractContextManager[Any]
        if hasattr(self._te, "autocast"):
            region = self._te.autocast(
                enabled=True, recipe=self._recipe, amax_reduction_group=self._group
            )
        else:
            region = self._te.fp8_autocast(
                enabled=True, fp8_recipe=self._recipe, fp8_group=self._group
            )
        return region
