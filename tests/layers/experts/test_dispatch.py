"""Experts on several ranks give what they give on one, however tokens lie and choose."""

import copy

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.experts.dispatch import start_experts
from lightning_megatron.layers.experts.routing import Routes
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.degrees import Degrees
from tests.layers.parity import close, make_topology

HIDDEN, MLP = 6, 5
# name: tokens of each rank, experts, choices of a token, which experts the tokens choose
CASES: dict[str, tuple[list[int], int, int, str]] = {
    "equal": ([6, 6], 4, 2, "random"),
    "unequal, four ranks": ([3, 0, 7, 1], 8, 3, "random"),
    "more choices than experts of a rank": ([5, 4], 4, 3, "random"),
    "all to one": ([4, 3], 4, 1, "last"),
    "no token anywhere": ([0, 0], 4, 2, "random"),
    "none counts": ([4, 3], 4, 2, "none"),
    "some count": ([5, 6], 4, 2, "some"),
    "fewer tokens than ranks": ([1, 0, 0, 0], 4, 2, "random"),
}


def _routes(tokens: int, experts: int, top_k: int, kind: str) -> tuple[Tensor, Tensor]:
    chosen = torch.rand(tokens, experts).argsort(-1)[:, :top_k]
    weights = torch.rand(tokens, top_k, dtype=torch.float64)
    none = torch.zeros(tokens, top_k, dtype=torch.bool)
    if kind == "last":
        chosen = torch.full((tokens, top_k), experts - 1)
    elif kind == "none":
        none[:] = True
    elif kind == "some":
        none = torch.rand(tokens, top_k) < 0.5
    weights[~none.any(1), 0] = 0.0  # a weight of 0 has a gradient, and none has not
    return chosen.masked_fill(none, experts), weights.masked_fill(none, 0.0)


def _expected(x_th: Tensor, routes: Routes, experts: Experts) -> Tensor:
    """Loop over tokens."""
    rows = []
    for x, chosen, weights in zip(x_th, routes.experts_tk.tolist(), routes.weights_tk, strict=True):
        y = x * 0 + weights.sum() * 0
        for e, weight in zip(chosen, weights, strict=True):
            if e < experts.num_experts:
                hidden = torch.nn.functional.silu(experts.gate[e] @ x) * (experts.up[e] @ x)
                y = y + weight * (experts.down[e] @ hidden)
        rows.append(y)
    return torch.stack(rows) if rows else x_th * 0 + routes.weights_tk.sum() * 0


def _check(name: str, kind: str) -> None:
    sizes, num_experts, top_k, choice = CASES[name]
    topology = make_topology(1, ep=len(sizes), dp_shard=len(sizes))
    torch.manual_seed(0)
    plain = Experts(num_experts, HIDDEN, MLP).double()
    x = torch.randn(sum(sizes), HIDDEN, dtype=torch.float64, requires_grad=True)
    chosen, weights = _routes(sum(sizes), num_experts, top_k, choice)
    weights.requires_grad_()
    experts = copy.deepcopy(plain)
    experts.distribute(topology)
    y = _expected(x, Routes(chosen, weights), plain)
    upstream = torch.randn_like(y)
    y.backward(upstream)

    start = sum(sizes[: topology.rank])
    mine = slice(start, start + sizes[topology.rank])
    own_x, own_weights = (v.detach()[mine].clone().requires_grad_() for v in (x, weights))
    routes = Routes(chosen[mine], own_weights)
    found = start_experts(own_x, routes, experts, topology.ep, kind).finish()
    close("output", found, y[mine])
    found.backward(upstream[mine])
    close("gradient of the tokens", own_x.grad, x.grad[mine])
    close("gradient of the weights", own_weights.grad, weights.grad[mine])
    held = num_experts // len(sizes)
    for key, parameter in experts.named_parameters():
        whole = plain.get_parameter(key).grad
        whole = torch.zeros_like(plain.get_parameter(key)) if whole is None else whole
        part = whole[topology.rank * held : (topology.rank + 1) * held]
        assert parameter.grad is not None, key  # also of experts without a token
        # Of a mean over ranks; here each expert is on one rank.
        close(f"gradient of {key}", parameter.grad * len(sizes), part)


@pytest.mark.parametrize("kind", ["once", "gather"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_give_what_one_gives(pool, name, kind):
    pool.run(len(CASES[name][0]), _check, name, kind)


def test_an_unknown_choice_is_an_even_one():
    """On the meta device, where costs are counted, each expert gets as many rows."""
    with torch.device("meta"):
        experts = Experts(4, HIDDEN, MLP)
        x = torch.empty(5, HIDDEN, requires_grad=True)
        weights = torch.empty(5, 2, requires_grad=True)
        routes = Routes(torch.empty(5, 2, dtype=torch.long), weights)
    rows: list[list[int]] = []
    experts.register_forward_pre_hook(lambda _, args: rows.append(args[1]))
    y = start_experts(x, routes, experts, None).finish()
    y.sum().backward()
    assert (y.shape, x.grad.shape, weights.grad.shape) == (x.shape, x.shape, weights.shape)
    assert rows == [[2, 2, 3, 3]]


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize(
    "degrees", [{"tp": 2, "pp": 2, "dp_shard": 2, "origin": 1}, {"cp": 2, "dp_replicate": 2}]
)
def test_ranks_of_ep_come_in_the_order_of_their_group(degrees, ep):
    """Rows go to ranks by their place in the group, which numbers ranks in ascending order."""
    groups = groups_along("ep", Degrees(**degrees, ep=ep))
    assert all(list(group) == sorted(group) for group in groups)


def _described() -> str:
    topology = make_topology(1, ep=2, dp_shard=2)
    assert topology.ep.group is not None
    return topology.ep.group.group_desc


def test_a_report_of_a_hang_can_name_the_axis(pool):
    """`fault_tolerance.hangs` names the axis by the description of the group."""
    assert pool.run(2, _described) == ["ep", "ep"]
