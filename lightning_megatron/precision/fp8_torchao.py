"""FP8 products by torchao (https://github.com/pytorch/ao), behind the same `Fp8Precision`.

torchao replaces ``nn.Linear`` by a module of its own, which knows neither tp nor a zero-bubble
backward. This backend uses its components: a *recipe* of torchao says how each operand of the three
products is scaled, `hp_tensor_to_float8_dynamic` scales and casts it (with scales reduced over tp
where an operand is part of a tensor), and ``torch._scaled_mm`` multiplies with the options of the
recipe. CPU kernels take no scales of rows: there torchao emulates such products, in float32.

============  ====================  =================================================
recipe        torchao's name        differs from the ``torch`` backend's
============  ====================  =================================================
tensorwise    ``tensorwise``        scales are computed in float64
rowwise       ``rowwise``           scales are powers of two; gradients are e4m3, too
============  ====================  =================================================

Written against torchao 0.18; its training code is no stable interface, so that a contract test
holds every signature used here (`tests/precision/test_fp8_backends.py`).
"""

import importlib
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.precision.fp8_gemm import GRADIENT, WEIGHT, SplitOperands, X

log = logging.getLogger(__name__)


def missing() -> str | None:
    """Reason why torchao cannot be imported; None if it can."""
    try:
        importlib.import_module("torchao.float8")
    except Exception as error:  # a build for another torch may raise anything
        log.debug("torchao.float8: %s", error)
        return "torchao cannot be imported; pip install 'lightning-megatron[torchao]'"
    return None


class TorchaoGemm:
    """GemmBackend in which torchao scales, casts and multiplies.

    Args:
        recipe: torchao's name of the recipe.
        mesh: device mesh of tp; None for one rank.
        split: whether each operand is a part of a tensor.
    """

    def __init__(self, recipe: str, mesh: DeviceMesh | None, split: SplitOperands) -> None:
        self._ao: Any = importlib.import_module("torchao.float8.float8_scaling_utils")
        config: Any = importlib.import_module("torchao.float8.config")
        chosen = config.Float8LinearConfig.from_recipe_name(recipe)
        # FP8 kernels load 16 bytes at a time, and the number of tokens is anybody's.
        self._config = replace(chosen, pad_inner_dim=True)
        self._gemms = _gemms(self._config, self._config.emulate)
        self._gemms_of_cpus = _gemms(self._config, recipe == "rowwise")
        self._mesh = mesh
        self._split = split

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `layers.gemm`."""
        config = self._config
        x = self._cast(X, x_ni, config.cast_config_input, -1)
        weight = self._cast(WEIGHT, weight_oi.t(), config.cast_config_weight, 0)
        return torch.mm(x, weight), ()

    def prepare_gradient(self, grad_no: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """See `layers.gemm`."""
        del kept
        return grad_no

    def input_gradient(self, gradient: Tensor, weight_oi: Tensor) -> Tensor:
        """See `layers.gemm`."""
        config = self._config
        grad = self._cast(GRADIENT, gradient, config.cast_config_grad_output, -1)
        weight = self._cast(WEIGHT, weight_oi.t(), config.cast_config_weight_for_grad_input, -1)
        return torch.mm(grad, weight.t())

    def weight_gradient(self, gradient: Tensor, x_ni: Tensor) -> Tensor:
        """See `layers.gemm`."""
        config = self._config
        grad = self._cast(GRADIENT, gradient, config.cast_config_grad_output_for_grad_weight, 0)
        x = self._cast(X, x_ni, config.cast_config_input_for_grad_weight, 0)
        return torch.mm(grad.t(), x)

    def _cast(self, which: int, tensor: Tensor, cast: Any, dim: int) -> Tensor:
        """Quantise an operand, with one scale or one for each row or column.

        Args:
            which: operand.
            tensor: ``[n, in]``, ``[in, out]`` or ``[n, out]``.
            cast: torchao's options of the cast.
            dim: dim along which elements share a scale, if not all share one.
        """
        granularity = cast.scaling_granularity
        whole = granularity.name == "TENSORWISE"
        low: Tensor = self._ao.hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self._gemms_of_cpus if in_host_memory(tensor.device) else self._gemms,
            reduce_amax=whole and self._mesh is not None and self._split[which],
            gemm_input_role=_role(which),
            device_mesh=self._mesh,
            scaling_granularity=granularity,
            axiswise_dim=None if whole else dim,
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
        return low


def _gemms(config: Any, emulate: bool) -> Any:
    """Options of the three products, as torchao's own linear layer derives them."""
    tensors: Any = importlib.import_module("torchao.float8.float8_training_tensor")
    return tensors.LinearMMConfig(
        **{
            name: tensors.ScaledMMConfig(
                emulate=emulate,
                use_fast_accum=gemm.use_fast_accum,
                fp8_output=False,
                pad_inner_dim=config.pad_inner_dim,
            )
            for name, gemm in (
                ("output", config.gemm_config_output),
                ("grad_input", config.gemm_config_grad_input),
                ("grad_weight", config.gemm_config_grad_weight),
            )
        }
    )


def _role(which: int) -> Any:
    roles: Any = importlib.import_module("torchao.float8.float8_training_tensor").GemmInputRole
    return (roles.INPUT, roles.WEIGHT, roles.GRAD_OUTPUT)[which]
