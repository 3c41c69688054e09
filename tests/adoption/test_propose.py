"""Plans that are proposed for models that carry none."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.adoption.propose import COLUMN, ROW, pipeline_fault, propose
from tests.adoption.plain_models import MODELS, build

TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def test_pairs_are_found_by_what_depends_on_what():
    plan = propose(build("own"), (TOKENS,)).plan
    block = {name[9:]: style for name, style in plan.styles.items() if name.startswith("blocks.2.")}
    assert block == {
        "attention.qry": COLUMN,
        "attention.ky": COLUMN,
        "attention.vl": COLUMN,
        "attention.back": ROW,
        "wide": COLUMN,
        "gate": COLUMN,
        "narrow": ROW,
    }
    assert plan.styles["embed"] == "embedding_rowwise"
    assert plan.styles["head"] == COLUMN
    assert plan.items == ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
    assert plan.blocks == [f"blocks.{i}" for i in range(4)]


def test_largest_tp_is_the_number_of_heads():
    reasons = propose(build("own"), (TOKENS,)).reasons
    assert reasons["blocks.0.attention.back"].endswith("up to tp=4")
    assert reasons["blocks.0.mixer"] == "its output is read across features"


def test_structure_alone_leaves_what_is_in_doubt_whole():
    plan = propose(build("own")).plan
    assert {name.rpartition(".")[2] for name in plan.styles} == {"wide", "gate", "narrow"}


def test_stacks_of_torch_are_items_of_one_pipeline():
    plan = propose(build("translator"), (TOKENS,)).plan
    stacks = ("core.encoder.layers", "core.decoder.layers")
    layers = [f"{stack}.{i}" for stack in stacks for i in range(2)]
    assert plan.items == [*layers, "head"]
    assert plan.styles["core.decoder.layers.1.multihead_attn"] == "multihead_attention"


def test_nothing_of_the_model_changes():
    model = build("own").train()
    model.norm.eval()
    before = torch.get_rng_state()
    propose(model, (TOKENS,))
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in (model, model.norm, model.embed)] == [True, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


class Habits(nn.Module):
    """Linears that look like pairs and are none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up2, self.norm, self.down2 = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.up3, self.down3 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up4, self.down4 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up5, self.down5 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        x = x + self.down2(self.norm(self.up2(x)))  # reads all features
        y = self.up3(x)
        x = x + self.down3(y) + y.sum()  # is read elsewhere, too
        x = x + self.down4(self.up4(x).flip(-1))  # other features than those above
        return x + F.linear(self.up5(x), self.down5.weight)  # a weight without its module


def test_what_only_looks_like_a_pair_stays_whole():
    proposal = propose(Habits().double(), (torch.randn(2, 8, dtype=torch.float64),))
    assert proposal.plan.styles == {"up": COLUMN, "down": ROW}
    assert proposal.reasons["never"] == "not called"
    assert proposal.reasons["down5"] == "not called"
    assert proposal.reasons["up2"] == "its output is read across features"


def test_weight_that_is_read_past_its_module_is_not_split():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(64, 8), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.mix(self.embed(tokens)) @ self.embed.weight.T

    proposal = propose(Tied(), (TOKENS,))
    assert "embed" not in proposal.plan.styles
    assert proposal.reasons["embed"] == "its weight is read elsewhere, too"


def test_example_of_the_module_is_its_input():
    model = build("own")
    model.example_input_array = (TOKENS,)
    assert propose(model).plan == propose(build("own"), (TOKENS,)).plan


@pytest.mark.parametrize("kind", MODELS)
def test_pipeline_of_the_proposed_items_computes_the_same_wherever_it_is_cut(kind):
    model = build(kind)
    plan = propose(model, (TOKENS,)).plan
    assert len(plan.items) > 4
    assert pipeline_fault(model, plan.items, (TOKENS,), {}) is None


def test_items_that_lose_an_activation_are_told():
    model = build("translator")
    items = ["embed", "core.encoder.layers.0", "core.decoder.layers.0"]
    assert "takes an activation of an earlier stage" in str(
        pipeline_fault(model, items, (TOKENS,), {})
    )
