"""What the fused linear layers promise beyond equal numbers."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.comm import collectives
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import delayed_wgrad as wgrad_queue
from lightning_megatron.layers import linear_functions
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.topology.degrees import Degrees
from tests.layers.parity import close, distribute, make_topology


def _collectives(tp, sequence_parallel):
    """Number of collectives of one attention and one MLP, forward and backward."""
    topology = make_topology(tp, sequence_parallel)
    counts = []
    for layer in (CausalSelfAttention(16, 4), MLP(16, 32)):
        distribute(layer, topology)
        x = torch.randn(2, 4, 16, requires_grad=True)
        started = Counter()
        with mock.patch.multiple(linear_functions, **_counting(started)):
            y = layer(x)
            forward = dict(started)
            y.sum().backward()
        counts.append((forward, dict(started - Counter(forward))))
    return counts


def _counting(started):
    def wrap(name):
        function = getattr(collectives, name)

        def counting(*args):
            started[name] += 1
            return function(*args)

        return counting

    return {name: wrap(name) for name in ("start_sum", "start_gather", "start_sum_scatter")}


def test_one_collective_each_way_per_pair_of_layers(pool):
    for attention, mlp in pool.run(2, _collectives, 2, False):
        assert attention == mlp == ({"start_sum": 1}, {"start_sum": 1})
    one_of_each = {"start_gather": 1, "start_sum_scatter": 1}
    for attention, mlp in pool.run(2, _collectives, 2, True):
        assert attention == mlp == (one_of_each, one_of_each)


def _overlap(tp):
    """The input gradient's sum starts before the weight gradients and ends after them."""
    topology = make_topology(tp)
    layer = distribute(ColumnParallelLinear(4, 4), topology)
    events = []

    def start(x, axis):
        pending = collectives.start_sum(x, axis)
        events.append("start")
        wait = pending.wait
        return mock.Mock(wait=lambda *after: (events.append("wait"), wait(*after))[1])

    weight_gradient = wgrad_queue.weight_gradient

    def gradient(*args):
        events.append("weight")
        return weight_gradient(*args)

    with (
        mock.patch.object(linear_functions, "start_sum", start),
        mock.patch.object(wgrad_queue, "weight_gradient", gradient),
    ):
        layer(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
    return events


def test_input_gradient_is_summed_beside_the_weight_gradient(pool):
    assert pool.run(2, _overlap, 2) == [["start", "weight", "wait"]] * 2


def _frozen(tp):
    """No gradient is computed or communicated for what needs none."""
    topology = make_topology(tp)
    layer = distribute(ColumnParallelLinear(4, 4), topology)
    started = Counter()
    with mock.patch.multiple(linear_functions, **_counting(started)):
        layer(torch.randn(2, 3, 4)).sum().backward()
        assert not started
        layer.weight.requires_grad_(False)
        layer.weight.grad = None
        x = torch.randn(2, 3, 4, requires_grad=True)
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_frozen_parts_cost_nothing(pool):
    pool.run(2, _frozen, 2)


class _Adapted(nn.Module):
    """A low-rank adapter around a layer, as a user may put in its place."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def _replaced(tp):
    topology = make_topology(tp)
    attention = distribute(CausalSelfAttention(16, 4).double(), topology)
    x = torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = attention(x)
    attention.wv = _Adapted(attention.wv)
    close("adapted", attention(x), 2 * plain)
    attention.wv = attention.wv.layer
    handle = attention.wv.register_forward_hook(lambda module, args, y: 3 * y)
    close("hooked", attention(x), 3 * plain)
    handle.remove()
    close("restored", attention(x), plain)


def test_replaced_and_hooked_projections_are_called(pool):
    pool.run(2, _replaced, 2)


def _equal_replicas(tp):
    """Outputs and gradients of what all ranks hold are the same bits on all of them."""
    topology = make_topology(tp)
    torch.manual_seed(0)
    model = nn.Sequential(MLP(16, 32, bias=True), nn.LayerNorm(16), MLP(16, 32, bias=True))
    distribute(model, topology)
    x = torch.randn(2, 4, 16, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    replicated = [y.detach(), x.grad, model[1].weight.grad, model[0].down.bias.grad]
    for mine in replicated:
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs)


def test_replicas_stay_bit_identical(pool):
    pool.run(4, _equal_replicas, 4)


def _slope(model, x):
    """Size of the gradient at the input, and its own gradients."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    size = grad.square().sum()
    size.backward()
    return size.detach(), x.grad


def _double_backward(tp):
    topology = make_topology(tp)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = nn.Sequential(ColumnParallelLinear(4, 8), nn.Tanh(), RowParallelLinear(8, 4)).double()
    model.load_state_dict(alone.state_dict())
    distribute(model, topology)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(_slope(model, x), _slope(alone, x))
    rank = topology.tp.rank
    for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
        whole = alone.get_parameter(name).grad
        torch.testing.assert_close(model.get_parameter(name).grad, whole.chunk(tp, dim)[rank])
    split = distribute(ColumnParallelLinear(4, 4), make_topology(tp, sequence_parallel=True))
    with pytest.raises(ConfigError, match="sequence_parallel=False"):
        _slope(split, torch.randn(2, 3, 4))


def _views(_):
    topology = make_topology(2)
    column, row = ColumnParallelLinear(8, 8), RowParallelLinear(8, 8)
    plain = nn.Linear(8, 8)
    wgrad_queue.attach(plain, wgrad_queue.WgradQueue())
    found = []
    for layer in (column, row, plain):
        distribute(layer, topology)
        y = layer(torch.randn(2, 3, layer.weight.shape[1], requires_grad=True))
        found.append((tuple(y.shape[:2]), y._base is None))
    return found


def test_outputs_are_no_views(pool):
    """FSDP2 warns of a unit that returns one."""
    for found in pool.run(2, _views, None):
        assert found == [((2, 3), True)] * 3


def test_second_derivatives_are_right_or_refused(pool):
    pool.run(2, _double_backward, 2)


def test_problems_name_values_and_remedies():
    (problem,) = ColumnParallelLinear(4, 6).problems(Degrees(tp=4))
    assert problem.startswith("out_features=6, tp=4: ")
    assert "nearest valid: tp=3 or 6" in problem
    (problem,) = RowParallelLinear(6, 4).problems(Degrees(tp=4))
    assert problem.startswith("in_features=6, tp=4: ")
    assert ColumnParallelLinear(4, 6, units=2).problems(Degrees(tp=4)) == []
    (problem,) = ColumnParallelLinear(4, 6, units=3).problems(Degrees(tp=4))
    assert problem.startswith("units=3, tp=4: ")
    assert ColumnParallelLinear(4, 6, units=2, gather_output=True).problems(Degrees(tp=4)) != []
