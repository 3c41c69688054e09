"""In one process our optimizers give the numbers of torch's, or those of the formula."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.optim.adafactor import Adafactor
from lightning_megatron.optim.gathered_step import check_optimizer
from lightning_megatron.optim.lion import Lion
from lightning_megatron.optim.muon import Muon, orthogonalize
from lightning_megatron.optim.param_groups import muon_groups
from lightning_megatron.optim.shard_spec import ShardAxis, ShardSpec, unsharded


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def train(module: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 5) -> nn.Module:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        module.zero_grad()
        dtype = next(module.parameters()).dtype
        module(torch.randn(8, 6, generator=draw).to(dtype)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return module


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "weight_decay": 0.3, "d": 2.0}], ids=str)
def test_adafactor_is_torchs(options: dict[str, Any]) -> None:
    ours, theirs = net().double(), net().double()
    same(
        train(ours, Adafactor(ours.parameters(), **options)),
        train(theirs, torch.optim.Adafactor(theirs.parameters(), **options)),
        rtol=1e-12,
        atol=0,
    )


@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_with_torchs_adamw(scale: str, nesterov: bool) -> None:
    ours, theirs = net(), net()
    common = {"lr": 0.05, "weight_decay": 0.2}
    muon = torch.optim.Muon(
        [p for p in theirs.parameters() if p.ndim == 2],
        **common,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw" if scale == "rms" else "original",
    )
    adamw = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.ndim == 1], **common, betas=(0.9, 0.95)
    )
    same(
        train(ours, Muon(ours.parameters(), **common, scale=scale, nesterov=nesterov)),
        train(theirs, muon, adamw),
        rtol=1e-5,
        atol=1e-6,
    )


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
        assert 0.6 < values.min() < values.max() < 1.3


def test_lion_follows_its_formula() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([p], lr=0.1, betas=(0.5, 0.75), weight_decay=0.1)
    for gradient in ([1.0, -1.0], [-0.5, -1.0]):
        p.grad = torch.tensor(gradient)
        optimizer.step()
    # m = g / 4 after the first step; then sign(m / 2 + g / 2) = (-, -)
    expected = torch.tensor([(1.0 * 0.99 - 0.1) * 0.99 + 0.1, (-2.0 * 0.99 + 0.1) * 0.99 + 0.1])
    torch.testing.assert_close(p.detach(), expected)


def test_muon_groups_leave_embeddings_heads_and_vectors_to_adamw() -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(4, 3), "norm": nn.LayerNorm(3), "up": nn.Linear(3, 4)}
    )
    model["head"] = nn.Linear(4, 3, bias=False)
    matrices, decayed, others = muon_groups(model, 0.1)
    assert [p is model["up"].weight for p in matrices["params"]] == [True]
    assert {id(p) for p in decayed["params"]} == {id(model[n].weight) for n in ("table", "head")}
    assert len(others["params"]) == 3
    groups = Muon([matrices, decayed, others]).param_groups
    assert [g["muon"] for g in groups] == [True, False, False]


class Stack(nn.Module):
    """Products with each matrix of a stack, in one parameter or in several."""

    def __init__(self, matrices: torch.Tensor, *, apart: bool) -> None:
        super().__init__()
        parts = [m.clone() for m in matrices] if apart else [matrices.clone()]
        self.weights = nn.ParameterList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrices = [m for w in self.weights for m in (w if w.ndim == 3 else (w,))]
        return torch.stack([(x * (i + 1)) @ m.T for i, m in enumerate(matrices)])


MATRICES = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scale", ["rms", "spectral"])
def test_muon_treats_a_stack_as_its_matrices(scale: str) -> None:
    runs = [Stack(MATRICES, apart=apart) for apart in (False, True)]
    for module in runs:
        group = {"params": list(module.parameters()), "muon": True, "stacks": True}
        train(module, Muon([group], lr=0.05, scale=scale))
    for found, expected in zip(runs[0].weights[0], runs[1].weights, strict=True):
        assert torch.equal(found, expected)


def test_adafactor_has_torchs_numbers_for_a_stack_and_state_by_matrix() -> None:
    ours, theirs = (Stack(MATRICES, apart=False) for _ in range(2))
    optimizer = Adafactor(ours.parameters())
    train(ours, optimizer)
    train(theirs, torch.optim.Adafactor(theirs.parameters()))
    same(ours, theirs, rtol=1e-12, atol=0)
    state = optimizer.state[ours.weights[0]]
    assert state["row_var"].shape == (3, 4, 1)
    assert state["col_var"].shape == (3, 1, 6)


def test_muon_groups_take_stacks_of_experts_and_leave_kernels() -> None:
    model = nn.ModuleDict({"experts": Experts(2, 4, 3), "kernel": nn.Conv1d(3, 4, 2)})
    matrices, decayed, others = muon_groups(model, 0.1)
    assert {id(p) for p in matrices["params"]} == {id(p) for p in model["experts"].parameters()}
    assert [p.ndim for p in decayed["params"]] == [3]
    Muon([matrices, decayed, others])
    with pytest.raises(ConfigError, match=r"a parameter has shape \(4, 3, 2\)"):
        Muon([{"params": [model["kernel"].weight], "muon": True}])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Muon(p, momentum=1.0), r"momentum=1.0: must lie in \[0, 1\)"),
        (lambda p: Muon(p, scale="big"), "scale='big'"),
        (lambda p: Muon([{"params": p, "muon": True}]), r"a parameter has shape \(2,\)"),
        (lambda p: Lion(p, lr=-1), "lr=-1: must be a number of at least"),
        (lambda p: Adafactor(p, d=0.5), "d=0.5: must be a number of at least 1"),
    ],
)
def test_wrong_options(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make([nn.Parameter(torch.ones(2))])


def half(p: torch.Tensor) -> dict[torch.Tensor, ShardSpec]:
    group: Any = None
    axis = ShardAxis(name="tp", group=group, size=2, rank=0, dim=0)
    return {p: ShardSpec(name="p", full_shape=(2 * p.shape[0], *p.shape[1:]), axes=(axis,))}


class Mine(torch.optim.SGD):
    """May do anything."""


class MineByElements(torch.optim.SGD):
    elementwise = True


def test_what_an_unknown_optimizer_costs_is_said() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    for optimizer in (Muon([p]), Adafactor([p]), Lion([p]), MineByElements([p])):
        assert check_optimizer(optimizer, half(p)) is None
    assert check_optimizer(Mine([p]), {p: unsharded(p)}) is None
    assert "elementwise = True" in str(check_optimizer(Mine([p]), half(p)))
    assert "lightning_megatron.optim.Muon is the same" in str(
        check_optimizer(torch.optim.Muon([p]), half(p))
    )
    with pytest.raises(ConfigError, match="nearest valid: AdamW"):
        check_optimizer(torch.optim.SparseAdam([p]), half(p))
