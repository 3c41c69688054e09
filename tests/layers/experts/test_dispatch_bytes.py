"""What a dispatch really sends is what the arithmetic says, and what is computed meanwhile."""

from unittest.mock import patch

import pytest
import torch

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.dispatch import start_experts
from lightning_megatron.layers.experts.dispatch_choice import (
    DispatchSizes,
    RowBytes,
    choose,
    gather_bytes,
    once_bytes,
)
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.experts.routing import Routes
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.topology.expert_layout import ExpertDispatch
from tests.layers.parity import distribute, make_topology

HIDDEN = 8
# tokens of each rank, sizes, format of the tokens
CASES = {
    "few choices": ([5, 9], DispatchSizes(ep=2, num_experts=8, top_k=2), torch.float32),
    "many choices": ([6, 6], DispatchSizes(ep=2, num_experts=6, top_k=5), torch.bfloat16),
    "four ranks": ([4, 0, 7, 2], DispatchSizes(ep=4, num_experts=8, top_k=3), torch.float64),
}


def _sent(name: str, kind: ExpertDispatch) -> tuple[tuple[int, int], tuple[float, float]]:
    """Bytes that this rank sends forward and backward, by its meter and by the formula."""
    tokens, sizes, dtype = CASES[name]
    topology = make_topology(1, ep=sizes.ep, dp_shard=sizes.ep)
    rank, held = topology.rank, sizes.held
    torch.manual_seed(3)
    chosen = [torch.rand(t, sizes.num_experts).argsort(-1)[:, : sizes.top_k] for t in tokens]
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(chosen[rank].shape, dtype=wide, requires_grad=True)
    experts = Experts(sizes.num_experts, HIDDEN, 4).to(dtype)
    experts.distribute(topology)
    x = torch.randn(tokens[rank], HIDDEN, dtype=dtype, requires_grad=True)
    meter = topology.meters["ep"]
    begin = meter.bytes
    y = start_experts(x, Routes(chosen[rank], weights), experts, topology.ep, kind).finish()
    between = meter.bytes
    y.sum().backward()
    found = between - begin, meter.bytes - between

    row = RowBytes(token=HIDDEN * x.element_size(), weight=weights.element_size())
    if kind == "gather":
        return found, gather_bytes(sizes, row, max(tokens))
    rows = [[int((c // held == to).any(-1).sum()) for to in range(sizes.ep)] for c in chosen]
    out = sum(n for to, n in enumerate(rows[rank]) if to != rank)
    into = sum(of[rank] for source, of in enumerate(rows) if source != rank)
    return found, once_bytes(sizes, row, out, into)


@pytest.mark.parametrize("kind", ["once", "gather"])
@pytest.mark.parametrize("name", CASES)
def test_bytes(pool, name, kind):
    for found, expected in pool.run(len(CASES[name][0]), _sent, name, kind):
        assert found == expected


def test_rows_are_those_of_random_choices():
    """The share of the ranks that a token reaches, against draws."""
    torch.manual_seed(0)
    for groups, top_groups in ((1, 1), (4, 2), (8, 3)):
        sizes = DispatchSizes(ep=4, num_experts=16, top_k=3, groups=groups, top_groups=top_groups)
        draws = 20_000
        group = torch.rand(draws, groups).argsort(-1)[:, :top_groups]
        allowed = torch.zeros(draws, groups).scatter_(1, group, 1.0)
        allowed = allowed.repeat_interleave(16 // groups, 1)
        chosen = (torch.rand(draws, 16) * allowed).argsort(-1, descending=True)[:, :3]
        reached = torch.zeros(draws, 4).scatter_(1, chosen // 4, 1.0)
        assert sizes.rows("once") == pytest.approx(float(reached[:, 1:].sum(1).mean()), rel=0.02)


def test_a_gather_is_chosen_where_a_token_goes_nearly_everywhere():
    kinds = {
        (ep, k): choose(DispatchSizes(ep=ep, num_experts=64, top_k=k, same_samples=True)).kind
        for ep in (2, 4, 8)
        for k in (2, 8)
    }
    assert kinds == {
        (2, 2): "once",
        (2, 8): "gather",
        (4, 2): "once",
        (4, 8): "gather",
        (8, 2): "once",
        (8, 8): "once",
    }
    # To ask for numbers of tokens takes as long as to tell those of rows.
    assert choose(DispatchSizes(ep=2, num_experts=64, top_k=8)).kind == "once"


def _chosen(top_k: int) -> tuple[str, list[str]]:
    """Choice of this rank, and what it logs."""
    said: list[str] = []
    with patch("lightning_megatron.layers.experts.mixture.log.info", said.append):
        topology = make_topology(2, ep=2)
        layers = [MixtureOfExperts(HIDDEN, 4, 8, top_k) for _ in range(2)]
        for layer in layers:
            distribute(layer, topology)
    return layers[1].dispatch, said


def test_one_rank_says_once_what_was_chosen(pool):
    (kind, said), (other, nothing) = pool.run(2, _chosen, 7)
    assert kind == other == "gather"
    sizes = DispatchSizes(ep=2, num_experts=8, top_k=7, same_samples=True)
    assert said == [choose(sizes).reason]
    assert nothing == []


def _order(kind: ExpertDispatch) -> list[str]:
    """What happens between the start of a dispatch and its end, forward and backward."""
    topology = make_topology(1, ep=2, dp_shard=2)
    router = RouterConfig(balance="none")
    layer = MixtureOfExperts(HIDDEN, 4, 4, shared_size=4, router=router)
    distribute(layer, topology)
    layer.dispatch = kind
    assert layer.shared is not None
    events: list[str] = []
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.shared.register_full_backward_hook(lambda *_: events.append("shared"))
    layer.experts.register_forward_hook(lambda *_: events.append("experts"))
    wait, init = Pending.wait, Pending.__init__

    def waited(self, *args):
        events.append("wait")
        return wait(self, *args)

    def started(self, *args):
        events.append("start")
        init(self, *args)

    with patch.object(Pending, "wait", waited), patch.object(Pending, "__init__", started):
        y = layer(torch.randn(2, 3, HIDDEN, requires_grad=True))
        events.append("backward")
        y.sum().backward()
    return events


@pytest.mark.parametrize("kind", ["once", "gather"])
def test_the_shared_mlp_runs_beside_the_dispatch(pool, kind):
    for events in pool.run(2, _order, kind):
        turn = events.index("backward")
        forward, backward = events[:turn], events[turn + 1 :]
        counts, back = ["start", "wait"], ["start", "wait"]
        messages = 2 if kind == "once" else 3  # of choices, too
        assert forward == [
            *counts,
            *["start"] * messages,
            "shared",
            *["wait"] * messages,
            "experts",
            *back,
        ]
        # The gradient of the tokens sets out, and comes after that of the shared MLP.
        assert backward == [*back, "start", "start", "shared", "wait", "wait"]
