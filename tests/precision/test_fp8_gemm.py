"""FP8 products: errors of the size that the formats have, the same however a layer is split."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron._torch.graphs import TorchDispatchMode
from lightning_megatron.layers.delayed_wgrad import (
    WgradQueue,
    add_gradients,
    attach,
    set_gemm_backend,
)
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.precision import fp8_gemm
from lightning_megatron.precision.fp8_blocks import BlockwiseGemm
from lightning_megatron.precision.fp8_gemm import (
    DelayedGemm,
    RowwiseGemm,
    TensorwiseGemm,
)
from lightning_megatron.precision.scaling import (
    E4M3,
    E5M2,
    amax_of,
    in_blocks,
    power_of_two_scale,
    quantise,
    scale_of,
)
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.mesh import Topology
from tests.layers.parity import distribute, finished_gradient, local_part, make_topology, piece

WHOLE = (False, False, False)
GEMMS: dict[str, Any] = {
    "tensorwise": lambda: TensorwiseGemm(E5M2, None, WHOLE),
    "delayed": lambda: DelayedGemm(E5M2, None, WHOLE, 4, torch.device("cpu")),
    "rowwise": lambda: RowwiseGemm(E5M2),
    "blockwise": lambda: BlockwiseGemm(E4M3, 128, square=True),
    "mxfp8": lambda: BlockwiseGemm(E4M3, 32, square=False),
}
# A rounding to 4 bits is off by up to 1/16 and by 0.026 in the root mean square, to 3 bits twice
# that; both operands of a product have one, and errors of single elements average in norms.
ERRORS = {"rowwise": 0.07, "tensorwise": 0.07, "delayed": 0.07, "blockwise": 0.05, "mxfp8": 0.05}


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_errors_are_those_of_eight_bits(name: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(37, 144, generator=draw).to(dtype)  # no multiple of any block
    weight = (torch.randn(80, 144, generator=draw) / 12).to(dtype)
    grad = (torch.randn(37, 80, generator=draw) * 1e-5).to(dtype)
    gemm = GEMMS[name]()
    y, kept = gemm.output(x, weight)
    gradient = gemm.prepare_gradient(grad, kept)
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    for found, expected in (
        (y, wide_x @ wide_weight.t()),
        (gemm.input_gradient(gradient, weight), wide_grad @ wide_weight),
        (gemm.weight_gradient(gradient, x), wide_grad.t() @ wide_x),
    ):
        assert found.shape == expected.shape
        assert 5e-3 < error(found, expected) < ERRORS[name]
    assert y.dtype == dtype


def test_finer_scales_bear_outliers() -> None:
    """One huge element costs a tensor its small ones, a row its row, a block its block."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 256, generator=draw), torch.randn(32, 256, generator=draw) / 16
    x *= 1e-3
    x[0, 0] = 1e4
    expected = x[1:].double() @ weight.double().t()
    errors = {n: error(GEMMS[n]().output(x, weight)[0][1:], expected) for n in GEMMS}
    assert errors["tensorwise"] > 0.3
    assert max(errors["rowwise"], errors["blockwise"], errors["mxfp8"]) < 0.05


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_autocast_does_not_reach_inside(name: str) -> None:
    """On CPUs it rounded to bfloat16 before the scales were applied."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=draw).bfloat16()
    weight = torch.randn(96, 64, generator=draw).bfloat16()
    plain, _ = GEMMS[name]().output(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = GEMMS[name]().output(x, weight)
    assert torch.equal(found, plain)


class Watch(TorchDispatchMode):
    """Writes down FP8 products, by how they add up, and counts what becomes FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.fast: list[bool] = []
        self.quantised = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_mm.default:
            given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
            self.fast.append({**given, **(kwargs or {})}.get("use_fast_accum", False))
        if func is torch.ops.aten._to_copy.default and found.dtype in (E4M3, E5M2):
            self.quantised += 1
        return found


@pytest.mark.parametrize(("name", "quantised"), [("tensorwise", 5), ("delayed", 5)])
def test_outputs_add_up_fast_and_a_gradient_is_quantised_once(name: str, quantised: int) -> None:
    layer, x = nn.Linear(32, 16, bias=False), torch.randn(4, 32, requires_grad=True)
    set_gemm_backend(layer, GEMMS[name]())
    with Watch() as watch:
        y = layer(x)
        assert watch.fast == [True]
        y.sum().backward()
    assert watch.fast == [True, False, False]
    assert watch.quantised == quantised


def test_rows_add_up_fast_in_the_output_only() -> None:
    layer, x = nn.Linear(32, 16), torch.randn(16, 32, requires_grad=True)
    set_gemm_backend(layer, RowwiseGemm(E5M2))
    # With scales of rows CPUs multiply without them.
    fast: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        original = fp8_gemm.scaled_mm

        def watched(*args: Any, **options: Any) -> Tensor:
            fast.append(options.get("fast", False))
            return original(*args, **options)

        patch.setattr(fp8_gemm, "scaled_mm", watched)
        layer(x).sum().backward()
    assert fast == [True, False, False]


@pytest.mark.parametrize("bias", [False, True])
def test_a_deferred_gradient_is_held_in_eight_bits(bias: bool) -> None:
    layer, x = nn.Linear(32, 16, bias=bias), torch.randn(4, 32, requires_grad=True)
    set_gemm_backend(layer, TensorwiseGemm(E5M2, None, WHOLE))
    wgrad_queue = WgradQueue()
    attach(layer, wgrad_queue)
    wgrad_queue.collecting = True
    upstream = torch.randn(4, 16)
    gone = weakref.ref(upstream)
    y = layer(x)
    y.backward(upstream)
    del upstream, y
    assert (gone() is None) is not bias
    add_gradients(wgrad_queue.take())
    assert layer.weight.grad is not None


def test_scales() -> None:
    x = torch.tensor([[1.0, -448.0], [0.5, 2.0**-9]])
    assert amax_of(x) == 448.0
    assert scale_of(amax_of(x), E4M3) == 1.0
    assert torch.equal(quantise(x * 2, torch.ones(()), E4M3).float()[0], torch.tensor([2.0, -448]))
    assert amax_of(torch.empty(0, 3)) == 0
    assert torch.equal(
        quantise(torch.zeros(2), scale_of(torch.zeros(()), E4M3), E4M3).float(), torch.zeros(2)
    )
    # 448 is 2**0 exactly; a little more needs 2**1, so that nothing saturates.
    amax = torch.tensor([448.0, 449.0, 7.0, 0.0])
    assert power_of_two_scale(amax, E4M3).tolist()[:3] == [1.0, 2.0, 2.0**-6]


def test_blocks_have_their_own_scales() -> None:
    x = torch.ones(3, 5)
    x[0, 0], x[2, 4] = 2.0**20, 2.0**-20
    # Blocks of 2 x 4: the first holds 2**20, beside which ones vanish; the last, alone, does not.
    found = in_blocks(x, (2, 4), E4M3).dequantised(x.dtype)
    assert found[0].tolist() == [2.0**20, 0, 0, 0, 1.0]
    assert found[2].tolist() == [1.0, 1.0, 1.0, 1.0, 2.0**-20]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_what_is_not_finite_reaches_the_product(name: str, value: float) -> None:
    """Saturated, an overflow of the gradients would look like large ones."""
    x, weight = torch.ones(4, 256), torch.ones(16, 256)
    x[1, 3] = value
    gemm = GEMMS[name]()
    assert gemm.output(x, weight)[0].isnan()[1].all()
    kept = gemm.output(torch.ones(4, 16), torch.ones(256, 16))[1]
    gradient = gemm.prepare_gradient(x, kept)
    assert gemm.input_gradient(gradient, torch.ones(256, 16)).isnan()[1].all()
    assert gemm.weight_gradient(gradient, torch.ones(4, 16)).isnan()[3].all()


def test_delayed_scales_follow_the_steps_before() -> None:
    gemm = DelayedGemm(E5M2, None, WHOLE, 2, torch.device("cpu"))
    weight = torch.eye(16)

    def step(size: float) -> float:
        x = torch.full((16, 16), size)
        found = float(gemm.output(x, weight)[0][0, 0])
        gemm.advance(gemm.current.clone())
        return found

    # Processors round products differently.
    assert step(1.0) == pytest.approx(1.0, rel=1e-6)
    assert step(4.0) == pytest.approx(1.0, rel=1e-6)  # more than ever before: saturates
    assert step(4.0) == pytest.approx(4.0, rel=1e-6)
    assert gemm.history[:, 0].tolist() == [4.0, 4.0]
    gemm.watching = False
    gemm.output(torch.full((16, 16), 100.0), weight)
    assert gemm.current[0] == 0.0
    gemm.advance(torch.tensor([torch.inf, 0.0, 2.0]))  # overflowed, not used, sound
    assert gemm.history[0].tolist() == [4.0, 1.0, 2.0]


def test_delayed_scales_remember_the_largest_of_all_steps() -> None:
    gemm = DelayedGemm(E5M2, None, WHOLE, 3, torch.device("cpu"))
    expected = []
    found = []
    for size in (8.0, 2.0, 1.0, 1.0, 1.0):
        _, kept = gemm.output(torch.full((16, 16), size), torch.eye(16))
        found.append(float(kept[0]))
        gemm.advance(gemm.current.clone())
    for amax in (8.0, 8.0, 8.0, 8.0, 2.0):  # the first step's own; then three steps back
        expected.append(float(scale_of(torch.tensor(amax), E4M3)))
    assert found == expected


class Pair(nn.Module):
    """What an attention and an MLP are made of: layers that share an input, and one that sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(32, 96)
        self.up = ColumnParallelLinear(32, 96)
        self.down = RowParallelLinear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, [self.gate, self.up])
        return self.down(torch.relu(gate) * up)


def equip(module: Pair, group: dist.ProcessGroup | None, delayed: bool) -> None:
    column, row = (False, True, True), (True, True, False)
    for layer, split in ((module.gate, column), (module.up, column), (module.down, row)):
        gemm: Any = TensorwiseGemm(E5M2, group, split)
        if delayed:
            gemm = DelayedGemm(E5M2, group, split, 2, torch.device("cpu"))
        set_gemm_backend(layer, gemm)


def pair_job(sequence: bool, delayed: bool) -> None:
    """In float32, where nothing but FP8 itself is rough."""
    topology = make_topology(2, sequence)
    torch.manual_seed(0)
    alone = Pair()
    with torch.no_grad():  # the largest elements on different ranks
        alone.gate.weight[90, 3], alone.up.weight[5, 3], alone.down.weight[3, 70] = 1.0, 2.0, 3.0
    both = Pair()
    both.load_state_dict(alone.state_dict())
    distribute(both, topology)
    equip(alone, None, delayed)
    equip(both, topology.tp.group, delayed)
    wgrad_queue = WgradQueue()
    attach(both, wgrad_queue)
    x, upstream = torch.randn(2, 12, 32), torch.randn(2, 12, 32) * 1e-3
    whole = x.clone().requires_grad_()
    mine = piece(x, "residual", topology).clone().requires_grad_()
    expected, found = alone(whole), both(mine)
    expected.backward(upstream)
    wgrad_queue.collecting = True
    found.backward(piece(upstream, "residual", topology))
    assert both.down.weight.grad is None
    add_gradients(wgrad_queue.take())
    # To the rounding of float32. Other scales would be another 1e-2.
    pairs = [(found, piece(expected, "residual", topology))]
    pairs.append((mine.grad, piece(whole.grad, "residual", topology)))
    for name, parameter in both.named_parameters():
        grad = finished_gradient(both, name, parameter, topology)
        other = alone.get_parameter(name).grad
        assert other is not None
        pairs.append((grad, local_part(both, name, other, parameter)))
    for ours, theirs in pairs:
        assert error(ours, theirs) < 1e-6


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_two_ranks_compute_what_one_does(pool: WorkerPool, sequence: bool, delayed: bool) -> None:
    pool.run(2, pair_job, sequence, delayed)


def test_a_plain_layer_can_be_equipped_and_be_rid_of_it() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16), torch.randn(5, 32)
    plain = layer(x)
    set_gemm_backend(layer, TensorwiseGemm(E5M2, None, WHOLE))
    assert 1e-3 < error(layer(x), plain) < 0.1
    attach(layer, WgradQueue())
    assert 1e-3 < error(layer(x), plain) < 0.1
    set_gemm_backend(layer, None)
    assert torch.equal(layer(x), plain)


def ready_made(name: str, group: dist.ProcessGroup | None = None) -> Any:
    """GEMM backend of a column layer; those of ``delayed`` know what is to come."""
    split = (False, True, True)
    if name == "tensorwise":
        return TensorwiseGemm(E5M2, group, split)
    if name != "delayed":
        return GEMMS[name]()
    gemm = DelayedGemm(E5M2, group, split, 2, torch.device("cpu"))
    gemm.advance(torch.tensor([4.0, 2.0, 1 / 32]))
    return gemm


HeadOutcome = tuple[Tensor, Tensor, Tensor, Tensor]


def head_outcome(
    name: str | None, chunk_size: int | None, topology: Topology | None = None
) -> HeadOutcome:
    """Loss and gradients of a head in chunks, or of head and loss one after the other."""
    draw = torch.Generator().manual_seed(0)
    x, targets = torch.randn(2, 16, 32, generator=draw), torch.arange(32).view(2, 16)
    torch.manual_seed(0)
    head: Any = ColumnParallelLinear(32, 64)
    if chunk_size is not None:
        head = LinearCrossEntropy(32, 64, True, chunk_size=chunk_size)
    head.weight.data = torch.randn(64, 32, generator=draw) / 6
    head.weight.data[50, 4], head.bias.data[:] = 1.0, 0.5
    if topology is not None:
        distribute(head, topology)
        x = piece(x, "residual", topology)
    if name is not None:
        set_gemm_backend(head, ready_made(name, None if topology is None else topology.tp.group))
    x.requires_grad_()
    loss = VocabParallelCrossEntropy()(head(x), targets) if chunk_size is None else head(x, targets)
    loss.backward()
    return loss, x.grad, head.weight.grad, head.bias.grad  # type: ignore[return-value]


def largest_error(found: HeadOutcome, expected: HeadOutcome) -> float:
    return max(error(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", GEMMS)
def test_a_head_in_chunks_multiplies_in_fp8(name: str) -> None:
    whole = head_outcome(name, None)
    assert largest_error(head_outcome(name, 100), whole) < 1e-6
    assert largest_error(whole, head_outcome(None, None)) > 1e-3
    # In several chunks scales are finer, but for those that were known before.
    assert largest_error(head_outcome(name, 7), whole) < (1e-6 if name == "delayed" else 0.1)


def head_job(sequence: bool) -> None:
    topology = make_topology(2, sequence)
    part = slice(32 * topology.tp.rank, 32 * (topology.tp.rank + 1))
    for name in ("tensorwise", "delayed"):
        loss, grad, *whole = head_outcome(name, 7)
        expected = (loss, piece(grad, "residual", topology), *(g[part] for g in whole))
        assert largest_error(head_outcome(name, 7, topology), expected) < 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", [False, True])
def test_the_chunks_of_two_ranks_are_those_of_one(pool: WorkerPool, sequence: bool) -> None:
    pool.run(2, head_job, sequence)
