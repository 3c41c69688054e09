"""FP8 by other packages: called as they document, and the same layers around them.

torchao runs on CPUs and does so here. Transformer Engine wants CUDA even to be imported; a stand-in
with the signatures of release 2.20.2 (``transformer_engine.pytorch``: Linear,
autocast; ``transformer_engine.common.recipe``: Float8CurrentScaling, Float8BlockScaling,
MXFP8BlockScaling) multiplies in its place, so that what is tested is our side of the contract.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron import ConfigError, Fp8Precision
from lightning_megatron.layers.delayed_wgrad import (
    WgradQueue,
    add_gradients,
    attach,
    set_gemm_backend,
)
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.precision import fp8_te, fp8_torchao
from lightning_megatron.precision.fp8_te import TransformerEngineGemm
from lightning_megatron.precision.fp8_torchao import TorchaoGemm
from lightning_megatron.testing import WorkerPool
from tests.layers.parity import distribute, finished_gradient, local_part, make_topology, piece
from tests.precision.test_fp8_gemm import ERRORS, Pair, error

WHOLE = (False, False, False)


def check_products(gemm: Any, limit: float, exact: bool = False) -> None:
    """Of sizes that are no multiple of anything, but for those of the weight."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(37, 144, generator=draw).bfloat16()
    weight = (torch.randn(80, 144, generator=draw) / 12).bfloat16()
    grad = (torch.randn(37, 80, generator=draw) * 1e-5).bfloat16()
    y, kept = gemm.output(x, weight)
    assert y.dtype == torch.bfloat16
    gradient = gemm.prepare_gradient(grad, kept)
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    for found, expected in (
        (y, wide_x @ wide_weight.t()),
        (gemm.input_gradient(gradient, weight), wide_grad @ wide_weight),
        (gemm.weight_gradient(gradient, x), wide_grad.t() @ wide_x),
    ):
        assert found.shape == expected.shape
        assert (0 if exact else 5e-3) < error(found, expected) < limit


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_multiplies_in_eight_bits(recipe: str) -> None:
    check_products(TorchaoGemm(recipe, None, WHOLE), ERRORS[recipe])


def test_torchao_is_used_as_it_is_written() -> None:
    """Names and arguments of torchao's that the adapter relies on."""
    from torchao.float8 import config, float8_scaling_utils, float8_training_tensor

    cast = inspect.signature(float8_scaling_utils.hp_tensor_to_float8_dynamic).parameters
    assert list(cast)[:3] == ["hp_tensor", "float8_dtype", "linear_mm_config"]
    assert {"reduce_amax", "gemm_input_role", "device_mesh", "scaling_granularity"} <= set(cast)
    assert {"axiswise_dim", "round_scales_to_power_of_2"} <= set(cast)
    mm = float8_training_tensor.LinearMMConfig._fields
    assert mm == ("output", "grad_input", "grad_weight")
    fields = float8_training_tensor.ScaledMMConfig._fields
    assert fields == ("emulate", "use_fast_accum", "fp8_output", "pad_inner_dim")
    assert {g.name for g in config.ScalingGranularity} == {"TENSORWISE", "AXISWISE"}
    for recipe in ("tensorwise", "rowwise"):
        chosen = config.Float8LinearConfig.from_recipe_name(recipe)
        assert chosen.cast_config_weight_for_grad_input.target_dtype == torch.float8_e4m3fn


def torchao_job(sequence: bool) -> None:
    """A pair of layers split over two ranks: tensorwise scales are agreed, as with ``torch``."""
    topology = make_topology(2, sequence)
    torch.manual_seed(0)
    alone, both = Pair(), Pair()
    with torch.no_grad():
        alone.gate.weight[90, 3], alone.up.weight[5, 3], alone.down.weight[3, 70] = 1.0, 2.0, 3.0
    both.load_state_dict(alone.state_dict())
    distribute(both, topology)
    column, row = (False, True, True), (True, True, False)
    for module, mesh in ((alone, None), (both, topology.mesh["tp"])):
        for layer, split in ((module.gate, column), (module.up, column), (module.down, row)):
            set_gemm_backend(layer, TorchaoGemm("tensorwise", mesh, split))
    x, upstream = torch.randn(2, 16, 32), torch.randn(2, 16, 32) * 1e-3
    whole = x.clone().requires_grad_()
    mine = piece(x, "residual", topology).clone().requires_grad_()
    expected, found = alone(whole), both(mine)
    expected.backward(upstream)
    found.backward(piece(upstream, "residual", topology))
    pairs = [(found, piece(expected, "residual", topology))]
    pairs.append((mine.grad, piece(whole.grad, "residual", topology)))
    for name, parameter in both.named_parameters():
        grad = finished_gradient(both, name, parameter, topology)
        pairs.append((grad, local_part(both, name, alone.get_parameter(name).grad, parameter)))
    for ours, theirs in pairs:
        assert error(ours, theirs) < 1e-6


@pytest.mark.parametrize("sequence", [False, True])
def test_torchao_on_two_ranks_is_torchao_on_one(pool: WorkerPool, sequence: bool) -> None:
    pool.run(2, torchao_job, sequence)


# Transformer Engine ------------------------------------------------------------------------------


class Region:
    """What Transformer Engine's autocast was last entered with."""

    now: Any = None
    entered = 0


class Autocast:
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        assert enabled
        assert not calibrating
        self.recipe, self.group = recipe, amax_reduction_group

    def __enter__(self) -> None:
        Region.now = self.recipe
        Region.entered += 1

    def __exit__(self, *_: Any) -> None:
        Region.now = None


class Product(torch.autograd.Function):
    """Like theirs: a function of weight and input that keeps what it needs by itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inp: Tensor) -> Tensor:
        ctx.save_for_backward(inp, weight)
        return F.linear(inp, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        inp, weight = ctx.saved_tensors
        return grad.t().mm(inp), grad.mm(weight)


class TeLinear(nn.Module):
    """``transformer_engine.pytorch.Linear`` as documented: ``y = x A^T``; some arguments."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        *,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        assert not bias
        weight = torch.empty(out_features, in_features, device=device, dtype=params_dtype)
        self.weight = nn.Parameter(weight)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        multiple = {"current": 16, "block": 128, "mx": 32}[Region.now.kind]
        assert inp.shape[0] % multiple == 0
        assert self.weight.shape[1] == inp.shape[1]
        return Product.apply(self.weight, inp)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    common, recipe = ModuleType("transformer_engine.common"), ModuleType("recipe")
    recipe.__name__ = "transformer_engine.common.recipe"
    names = {"Float8CurrentScaling": "current", "Float8BlockScaling": "block"}
    for name, kind in {**names, "MXFP8BlockScaling": "mx"}.items():
        setattr(recipe, name, type(name, (), {"kind": kind}))
    module.Linear, module.autocast = TeLinear, Autocast  # type: ignore[attr-defined]
    for made in (package, module, common, recipe):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return module


@pytest.mark.parametrize("recipe", fp8_te.TE_RECIPES)
def test_transformer_engine_gets_sizes_that_it_takes(te: ModuleType, recipe: str) -> None:
    check_products(TransformerEngineGemm(recipe, 80, 144, None), 0.01, exact=True)


def test_older_transformer_engines_have_another_autocast(te: ModuleType) -> None:
    def fp8_autocast(
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> Autocast:
        return Autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)

    del te.autocast
    te.fp8_autocast = fp8_autocast  # type: ignore[attr-defined]
    check_products(TransformerEngineGemm("tensorwise", 80, 144, None), 0.01, exact=True)


def test_transformer_engine_inside_a_layer(te: ModuleType) -> None:
    """Recomputed, and with a backward in two parts: the gradients of a plain layer."""
    torch.manual_seed(0)
    layer, x = ColumnParallelLinear(32, 48), torch.randn(2, 9, 32, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad, layer.weight.grad, layer.bias.grad]
    for recomputed in (False, True):
        layer.zero_grad()
        x.grad = None
        set_gemm_backend(layer, TransformerEngineGemm("tensorwise", 48, 32, None))
        wgrad_queue = WgradQueue()
        attach(layer, wgrad_queue)
        before = Region.entered
        y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        loss = y.square().sum()
        wgrad_queue.collecting = True
        loss.backward()
        wgrad_queue.collecting = False
        assert Region.entered == before + (3 if recomputed else 1)
        assert layer.weight.grad is None
        add_gradients(wgrad_queue.take())
        found = [x.grad, layer.weight.grad, layer.bias.grad]
        for ours, other in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, other)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    for backend, extra in (("te", "gpu"), ("torchao", "torchao")):
        with pytest.raises(ConfigError, match=rf"install.* .lightning-megatron\[{extra}\]"):
            Fp8Precision(backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="runs only tensorwise, blockwise, mxfp8; nearest valid"):
        Fp8Precision("delayed", "te")
    monkeypatch.undo()
    assert fp8_torchao.missing() is None
