"""``nn.MultiheadAttention`` and transformer layers of torch, split over tp."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ConfigError, adopt
from lightning_megatron.topology.degrees import Degrees
from tests.layers.parity import distribute, make_topology

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({"batch_first": True}, {}),
    "sequence first": ({}, {"need_weights": False}),
    "unbatched": ({}, {"batch": None}),
    "cross": ({"batch_first": True}, {"cross": True, "need_weights": False}),
    "sizes": ({"batch_first": True, "kdim": 6, "vdim": 10}, {"cross": True}),
    "no bias": ({"bias": False}, {}),
    "biases of keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"mask": "causal"}),
    "masks": ({"batch_first": True}, {"mask": "heads", "padding": True}),
    "padding": ({"batch_first": True}, {"padding": True, "need_weights": False}),
    "rule": (
        {"batch_first": True},
        {"mask": "causal", "is_causal": True, "need_weights": False},
    ),
    "weights of heads": ({"batch_first": True}, {"average_attn_weights": False}),
    "learned mask": ({"batch_first": True}, {"mask": "learned"}),
}
"""Options of the module and of the call."""


def _call(module: nn.MultiheadAttention, call: dict[str, Any]) -> list[Tensor]:
    """Outputs of a call, and gradients of all that learns."""
    call = dict(call)
    made = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).requires_grad_()

    batch, cross = call.pop("batch", 3), call.pop("cross", False)
    shape = [5] if batch is None else [batch, 5] if module.batch_first else [5, batch]
    query = draw(*shape, 16)
    if cross:
        key, value = draw(*shape, module.kdim), draw(*shape, module.vdim)
    else:
        key = value = query
    mask = call.pop("mask", None)
    learned = []
    if mask == "causal":
        call["attn_mask"] = torch.ones(5, 5).triu(1).bool()
    elif mask == "heads":
        call["attn_mask"] = draw(3 * 4, 5, 5)
        learned.append(call["attn_mask"])
    elif mask == "learned":
        call["attn_mask"] = draw(5, 5)
        learned.append(call["attn_mask"])
    if call.pop("padding", False):
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = True
        learns = call.get("attn_mask") is not None
        call["key_padding_mask"] = padding * -1e4 if learns else padding
    out, weights = module(query, key, value, **call)
    loss = out.sin().sum() + (0 if weights is None else weights.cos().sum())
    given = list({id(x): x for x in (query, key, value, *learned)}.values())
    gradients = torch.autograd.grad(loss, [*given, *module.parameters()])
    return [out.detach(), *([] if weights is None else [weights.detach()]), *gradients]


def _build(options: dict[str, Any]) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(16, 4, **options).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def every_case(names: list[str]) -> list[Any]:
    """Outputs and gradients on this rank of each case, with gradients of parameters gathered."""
    topology = make_topology(2)
    found: list[Any] = []
    for name in names:
        options, call = CASES[name]
        holder = adopt(nn.ModuleDict({"a": _build(options)}))
        distribute(holder, topology)
        values: list[Any] = _call(holder["a"], call)
        for place, (layer, own) in enumerate(reversed(list(_shards(holder)))):
            shard = layer.tensor_shards[own]
            values[-1 - place] = (values[-1 - place], shard.dim, shard.pieces, shard.offset)
        found.append(values)
    return found


def _shards(holder: nn.Module) -> Any:
    for layer in holder.modules():
        for own, _ in layer.named_parameters(recurse=False):
            yield layer, own


def test_attention_of_torch_returns_and_learns_the_same(pool):
    names = list(CASES)
    ranks = pool.run(2, every_case, names)
    for number, name in enumerate(names):
        options, call = CASES[name]
        expected = _call(_build(options), call)
        for rank in ranks:
            for value, wanted in zip(rank[number], expected, strict=True):
                if isinstance(value, tuple):
                    value, dim, pieces, offset = value
                    if dim is not None:
                        runs = pieces or ((offset, value.shape[dim]),)
                        wanted = torch.cat([wanted.narrow(dim, *run) for run in runs], dim)
                torch.testing.assert_close(value, wanted, atol=1e-11, rtol=0, msg=name)


def test_split_attention_of_one_process_is_torchs_own():
    plain = _build({"batch_first": True}).eval()
    adopted = adopt(nn.ModuleDict({"a": copy.deepcopy(plain)}))["a"]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(plain(x, x, x)[0], adopted(x, x, x)[0])
    assert isinstance(adopted, nn.MultiheadAttention)
    assert adopted.state_dict().keys() == plain.state_dict().keys()


def test_heads_that_do_not_divide_are_refused():
    layer = adopt(nn.ModuleDict({"a": nn.MultiheadAttention(18, 3)}))["a"]
    assert "num_heads=3" in layer.problems(Degrees(tp=2))[0]


def test_output_projection_alone_is_refused():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4)})
    with pytest.raises(ConfigError, match="nearest valid: 'multihead_attention' for a"):
        adopt(model, tp_plan={"a.out_proj": "rowwise"})


class Scaled(nn.MultiheadAttention):
    """Attention whose queries are scaled first."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return super().forward(query * 3, key, value, **options)


class ScaledTable(nn.Embedding):
    """Table whose rows are scaled."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 4


@pytest.mark.parametrize(
    ("module", "style"),
    [(Scaled(16, 4), "multihead_attention"), (ScaledTable(8, 16), "embedding_colwise")],
)
def test_forward_of_its_own_is_refused_and_not_replaced(module, style):
    kind = type(module)
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.forward\), which style '{style}'"):
        adopt(nn.ModuleDict({"a": module}), tp_plan={"a": style})
    assert type(module) is kind


def test_columns_of_a_table_whose_rows_are_bounded_are_refused():
    model = nn.ModuleDict({"a": nn.Embedding(8, 16, max_norm=1.0)})
    with pytest.raises(ConfigError, match="a has max_norm, .*; nearest valid: no style for it"):
        adopt(model, tp_plan={"a": "embedding_colwise"})


def test_subclass_without_a_forward_of_its_own_is_split():
    class Named(nn.MultiheadAttention):
        pass

    layer = adopt(nn.ModuleDict({"a": Named(18, 3)}), tp_plan={"a": "multihead_attention"})["a"]
    assert layer.problems(Degrees(tp=2))
