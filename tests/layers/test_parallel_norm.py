"""Norms and softmax of split features: forms of input, accuracy, messages, refusals."""

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import (
    ColumnParallelLinear,
    ParallelLayerNorm,
    ParallelRMSNorm,
    ParallelSoftmax,
    RowParallelLinear,
    SplitTensor,
    whole,
)
from lightning_megatron.topology.degrees import Degrees
from tests.layers.parity import close, distribute, finished_gradient, local_part, make_topology


class Stack(nn.Sequential):
    """Between a column-parallel and a row-parallel layer, where split features are."""

    def __init__(self) -> None:
        super().__init__(
            ColumnParallelLinear(6, 8),
            ParallelLayerNorm(8),
            ParallelRMSNorm(8),
            ParallelSoftmax(8),
            RowParallelLinear(8, 6),
        )


def _stack(sequence_parallel: bool) -> None:
    topology = make_topology(2, sequence_parallel)
    torch.manual_seed(0)
    plain = Stack().double()
    parallel = distribute(Stack().double(), topology)
    for name, parameter in parallel.named_parameters():
        parameter.data.copy_(local_part(parallel, name, plain.get_parameter(name), parameter))
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    expected, own = plain(x), x
    if sequence_parallel:
        own, expected = (t.chunk(2, 1)[topology.tp.rank] for t in (x, expected))
    found = parallel(own)
    close("output", found, expected)
    assert isinstance(nn.Sequential(*list(parallel)[:4])(own), SplitTensor)
    found.square().sum().backward()
    plain(x).square().sum().backward()
    for name, parameter in parallel.named_parameters():
        grad = finished_gradient(parallel, name, parameter, topology)
        whole_grad = plain.get_parameter(name).grad
        if sequence_parallel and name == "4.bias":  # whole, of this rank's part of the sequence
            continue
        close(name, grad, local_part(parallel, name, whole_grad, parameter))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_between_column_and_row(pool, sequence_parallel):
    pool.run(2, _stack, sequence_parallel)


def _inputs() -> None:
    topology = make_topology(2)
    torch.manual_seed(0)
    x = torch.randn(2, 8, dtype=torch.float64)
    part = x.chunk(2, -1)[topology.tp.rank]
    for layer in (ParallelLayerNorm(8), ParallelRMSNorm(8), ParallelSoftmax(8)):
        expected = layer.double()(x)
        distribute(layer, topology)
        plain = layer(part)
        assert type(plain) is torch.Tensor
        close("a plain part", plain, expected.chunk(2, -1)[topology.tp.rank])
        close("a whole tensor", whole(layer(x)), expected)
        with pytest.raises(ConfigError, match=r"has 6 .*nearest valid"):
            layer(x[:, :6])
    # Large numbers of one sign: mean(x^2) - mean^2 would have no correct digit in float32.
    far = (1e4 + x).float()
    norm = distribute(ParallelLayerNorm(8), topology)
    expected = nn.functional.layer_norm(far.double(), (8,)).float()
    torch.testing.assert_close(whole(norm(far)), expected, rtol=0, atol=2e-3)
    half = distribute(ParallelRMSNorm(8), topology)(part.bfloat16())
    assert half.dtype == torch.bfloat16
    # Softmax of another dim, of a masked part, and of a tensor that is split along another dim.
    columns = distribute(ParallelSoftmax(4, dim=0), topology)
    y = torch.randn(4, 6, dtype=torch.float64)
    y[:2, 1] = -torch.inf
    own = y.chunk(2, 0)[topology.tp.rank].clone().requires_grad_()
    found = columns(own)
    close("rows", found, y.softmax(0).chunk(2, 0)[topology.tp.rank])
    found.square().sum().backward()
    assert own.grad is not None
    assert own.grad.isfinite().all()
    column = distribute(ColumnParallelLinear(6, 6), topology)(y[2:].float())
    assert whole(ParallelSoftmax(2, dim=0)(column)).shape == (2, 6)


def _messages() -> list[tuple[float, int]]:
    topology = make_topology(2)
    meter, found = topology.tp.meter, []
    for layer in (ParallelLayerNorm(8), ParallelRMSNorm(8), ParallelSoftmax(8)):
        distribute(layer.double(), topology)
        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        before = meter.bytes
        y = layer(x)
        between = meter.bytes
        y.sum().backward()
        found.append((between - before, meter.bytes - between))
    return found


def test_forms_of_input(pool):
    pool.run(2, _inputs)


def test_bytes(pool):
    for found in pool.run(2, _messages):
        # Rows times numbers times 8 bytes; p - 1 and 2 (p - 1) / p are both 1 for two ranks.
        assert found == [(80, 80), (40, 40), (40, 40)]


def _refused() -> None:
    topology = make_topology(2, True)
    norm = distribute(ParallelRMSNorm(8), topology)
    with pytest.raises(ConfigError, match=r"part of the sequence.*nearest valid: RMSNorm\(8\)"):
        norm(torch.ones(1, 2, 8))


def test_refusals(pool):
    pool.run(2, _refused)
    (problem,) = ParallelLayerNorm(6).problems(Degrees(tp=4))
    assert problem.startswith("dim=6, tp=4: dim must be divisible by tp; nearest valid: tp=3")
    assert ParallelSoftmax(6).problems(Degrees(tp=4))
    with pytest.raises(ConfigError, match=r"nearest valid: ParallelSoftmax\(5, dim=-1\)"):
        ParallelSoftmax(6)(torch.ones(2, 5))


def _compiled() -> None:
    topology = make_topology(2)
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    for layer in (ParallelLayerNorm(8), ParallelRMSNorm(8), ParallelSoftmax(8)):
        distribute(layer.double(), topology)
        found = []
        for called in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            part = x.chunk(2, -1)[topology.tp.rank].clone().requires_grad_()
            y = called(part)
            y.square().sum().backward()
            found.append((y.detach(), part.grad))
        for ours, compiled in zip(*found, strict=True):
            close("compiled", compiled, ours)


@pytest.mark.thorough
def test_in_one_graph(pool):
    pool.run(2, _compiled)
