"""Choice of experts, its options, and what a router is asked that it cannot do."""

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import auxiliary_loss
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.experts.routing import (
    Routes,
    choose,
    highest,
    scores_of,
    weights_of,
    within_capacity,
)
from tests.layers.experts.reference import dense
from tests.layers.experts.test_layer_alone import LOSSES, B, E, H, S, build
from tests.layers.parity import close

DEEPSEEK = {"score": "sigmoid", "groups": 4, "top_groups": 2}


def route(logits, bias, config, top_k):
    """Routes of tokens all of which count, with none dropped."""
    scores = scores_of(logits, config)
    chosen = choose(scores, bias, config, top_k)
    return Routes(chosen, weights_of(scores, chosen, config))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [8, 64, 300])
def test_ties_go_to_the_lowest_index(monkeypatch, device, size):
    if device != "cpu":  # the way of accelerators, on numbers of the host
        monkeypatch.setattr("lightning_megatron._torch.devices.HOSTS", frozenset())
    x = torch.randn(50, size, generator=torch.Generator().manual_seed(0))
    x[:20] = x[:20].round()
    x[20:30] = 0.0
    x[30, 5:] = torch.finfo(x.dtype).min
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(highest(x, 4), expected)
    assert torch.equal(highest(x, size), x.sort(dim=-1, descending=True, stable=True).indices)
    assert highest(x[:0], 4).shape == (0, 4)


def test_router_of_zeros_takes_the_first_experts():
    """Of each of the first groups, where there are groups."""
    logits = torch.zeros(3, E)
    assert route(logits, None, RouterConfig(), 2).experts_tk.tolist() == [[0, 1]] * 3
    found = route(logits, None, RouterConfig(**DEEPSEEK), 3)
    assert found.experts_tk.tolist() == [[0, 1, 2]] * 3
    close("weights", found.weights_tk, torch.full((3, 3), 1 / 3))


def test_bias_counts_in_the_choice_alone():
    logits, bias = torch.zeros(1, E), torch.zeros(E)
    bias[5], bias[2] = -3.0, -4.0
    config = RouterConfig(**{**DEEPSEEK, "groups": 1, "top_groups": 1, "normalize": False})
    found = route(logits, bias, config, E)
    assert found.experts_tk.tolist() == [[0, 1, 3, 4, 6, 7, 5, 2]]
    assert found.weights_tk.tolist() == [[0.5] * E]


def test_negative_scores_of_a_group_stay_before_those_of_other_groups():
    """transformers scores experts of other groups 0, which is more."""
    bias = -torch.ones(E)
    bias[:2] = torch.tensor([9.0, -9.0])
    config = RouterConfig(score="sigmoid", groups=4, top_groups=1)
    assert route(torch.zeros(1, E), bias, config, 2).experts_tk.tolist() == [[0, 1]]


def test_scores_that_are_all_zero_have_weights():
    found = route(torch.full((1, E), -1e6), None, RouterConfig(score="sigmoid"), 2)
    assert found.weights_tk.tolist() == [[0.0, 0.0]]


def test_equal_weights_fill_an_expert_in_the_order_of_the_sequence():
    experts = torch.tensor([[[0], [0], [1], [0]], [[2], [2], [0], [0]]])
    weights = torch.tensor([[[0.5], [0.5], [0.1], [0.9]], [[0.9], [0.9], [0.2], [0.3]]])
    room = torch.tensor([2.0, 1.0])
    taken = within_capacity(experts, weights, room, 2, by_weight=True)
    assert taken.squeeze(-1).tolist() == [[True, False, True, True], [False, False, False, True]]
    taken = within_capacity(experts, weights, room, 2, by_weight=False)
    assert taken.squeeze(-1).tolist() == [[True, True, True, False], [False, False, True, False]]


def test_capacity_is_no_more_than_its_formula_says():
    """1.1 * 2 / 8 * 40 is 11 and a rounding."""
    moe = build(2, {"capacity_factor": 1.1})
    moe.router.weight.data.zero_()
    moe(torch.randn(1, 40, H, dtype=torch.float64))
    assert moe.router.statistics.counts_e.tolist() == [11, 11, *[0] * 6]
    assert moe.router.statistics.totals["dropped"] == 58


def test_evaluation_drops_counts_and_draws_nothing():
    moe = build(2, {"capacity_factor": 0.01, "bias_update": 0.1, "noise": 1.0, **LOSSES}).eval()
    x = torch.randn(B, S, H, dtype=torch.float64, requires_grad=True)
    y = moe(x)
    close("output", y, dense(moe, x, training=False)[0])
    y.sum().backward()
    own = moe.router.weight.grad.clone()
    moe.zero_grad()
    dense(moe, x, training=False)[0].sum().backward()
    close("gradient without auxiliary losses", own, moe.router.weight.grad)
    assert moe.router.statistics.counts_e is None
    assert moe.router.step_counts_e is None


def test_noise_in_training():
    moe = build(2, {"noise": 1.0, "balance": "none"})
    x = torch.randn(B, S, H, dtype=torch.float64)
    assert not torch.equal(moe(x), moe(x))
    torch.manual_seed(1)
    one = moe(x)
    torch.manual_seed(1)
    assert torch.equal(moe(x), one)


def test_auxiliary_loss_for_the_step_to_add():
    moe = build(2, {"inject": False, **LOSSES})
    x = torch.randn(B, S, H, dtype=torch.float64)
    y, expected = dense(moe, x)
    (moe(x).sum() + auxiliary_loss(moe)).backward()
    own = moe.router.weight.grad.clone()
    moe.zero_grad()
    (y.sum() + expected).backward()
    close("gradient", own, moe.router.weight.grad)


@pytest.mark.parametrize("options", [LOSSES, {"balance": "batch", "bias_update": 0.1, **LOSSES}])
def test_no_tokens(options):
    moe = build(2, options)
    for shape in ((0, S, H), (B, 0, H)):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        y = moe(x)
        y.sum().backward()
        assert y.shape == shape
        assert not torch.cat([p.grad.flatten() for p in moe.parameters()]).any()


def test_dims_between_batch_and_features_are_positions():
    moe = build(2, {"capacity_factor": 0.8, **LOSSES})
    x = torch.randn(B, 3, 4, H, dtype=torch.float64)
    mask = torch.rand(B, 3, 4) < 0.7
    close("output", moe(x, mask), moe(x.flatten(1, 2), mask.flatten(1)).view(x.shape))


def test_rows_without_sequences():
    x = torch.randn(9, H, dtype=torch.float64)
    moe = build(2, {"balance": "batch", **LOSSES})
    close("output", moe(x), moe(x.view(1, 9, H)).view(9, H))
    build(2, LOSSES).eval()(x)
    with pytest.raises(ConfigError, match=r"belong to no sequence.*balance='none' or 'batch'"):
        build(2, LOSSES)(x)
    with pytest.raises(ConfigError, match="belong to no sequence"):
        build(2, {"balance": "none", "capacity_factor": 2.0})(x)


@pytest.mark.parametrize("mask", [torch.ones(B, S), torch.ones(B, S + 1, dtype=torch.bool)])
def test_other_masks(mask):
    with pytest.raises(ConfigError, match=r"token_mask .* booleans of shape \(3, 7\)"):
        build(2, LOSSES)(torch.randn(B, S, H, dtype=torch.float64), mask)


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_are_wide(autocast):
    """And of the input what it is in is kept for the backward."""
    moe, x = MixtureOfExperts(12, 4, E, router=RouterConfig(**LOSSES)), torch.randn(B, S, 12)
    if not autocast:
        moe, x = moe.bfloat16(), x.bfloat16()
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        tokens = moe._tokens(x, None)
        rows = x.flatten(0, 1).requires_grad_()
        routes, loss_b, tokens_b = moe.router(rows, tokens)
    exact = route(x.flatten(0, 1).float() @ moe.router.weight.float().T, None, RouterConfig(), 2)
    assert routes.weights_tk.dtype == loss_b.dtype == torch.float32
    close("weights", routes.weights_tk, exact.weights_tk)
    assert all(t.dtype == x.dtype for t in saved if t.shape == rows.shape)
    (loss_b.sum() + routes.weights_tk.square().sum()).backward()
    assert rows.grad.dtype == x.dtype
    assert moe.router.weight.grad.dtype == moe.router.weight.dtype
    assert tokens_b.tolist() == [S] * B


def test_bias_stays_wide():
    """A step of 0.001 would be lost beside a bias of 1 in bfloat16."""
    net = nn.Sequential(MixtureOfExperts(H, 4, E, router=RouterConfig(bias_update=0.001)))
    net[0].router.bias.fill_(1.001)
    assert net.bfloat16()[0].router.bias.tolist() == torch.full((E,), 1.001).tolist()
    assert net[0].router.weight.dtype == torch.bfloat16
    assert net.double()[0].router.bias.dtype == torch.float64
    assert net.half().to("meta")[0].router.bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("top_k", "options", "texts"),
    [
        (9, {}, ["top_k=9, num_experts=8", "top_k=8"]),
        (1, {}, ["top_k=1, router.normalize=True", "normalize=False"]),
        (0, {}, ["top_k=0", "top_k=1"]),
        (2, {"score": "sigmoi"}, ["router: score='sigmoi'", "score='sigmoid'"]),
        (2, {"balance": "sample"}, ["router: balance='sample'", "sequence, batch or none"]),
        (2, {"drop": 1}, ["router: drop=1", "drop='probability'"]),
        (2, {"groups": 3}, ["groups=3, num_experts=8", "groups=2 or 4"]),
        (2, {"groups": 2, "top_groups": 3}, ["top_groups=3, groups=2", "top_groups=2"]),
        (3, {"groups": 4}, ["top_groups=1, groups=4", "hold 2 experts", "top_groups=2"]),
        (2, {"groups": 0}, ["groups=0", "groups=1"]),
        (2, {"scale": 0.0, "noise": -1.0}, ["scale=0.0", "noise=-1.0", "2 options are wrong"]),
        (2, {"capacity_factor": 0}, ["capacity_factor=0: must be above 0"]),
        (2, {"normalize": "no"}, ["normalize='no'", "normalize=False"]),
        (2, {"bias_update": -0.1}, ["bias_update=-0.1", "bias_update=0.0"]),
        (2, {"z_loss": float("nan")}, ["z_loss=nan"]),
    ],
)
def test_options_that_do_not_fit(top_k, options, texts):
    with pytest.raises(ConfigError) as raised:
        MixtureOfExperts(H, 4, E, top_k, router=RouterConfig(**options))
    for text in texts:
        assert text in str(raised.value)
