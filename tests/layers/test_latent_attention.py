"""Latent attention equals its formula, itself on tp and cp ranks, and itself with a cache."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import ColumnParallelLinear, PipelineSequential, SplitContext
from lightning_megatron.layers.alibi import Alibi
from lightning_megatron.layers.context_attention import gather, ring
from lightning_megatron.layers.kv_cache import KeyValueCache
from lightning_megatron.layers.latent_attention import LatentAttention
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.layers.packed_documents import documents_of
from lightning_megatron.layers.rotary import RopeScaling, Rotary, yarn_mscale
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.whole.splits import whole
from tests.layers.context import context_topology, on_context, same_as_whole
from tests.layers.parity import Case, check, distribute, make_topology

HIDDEN, HEADS = 16, 4
SIZES = {
    "values smaller than keys": LatentSizes(
        q_rank=10, kv_rank=6, rope_dim=4, nope_dim=6, value_dim=8
    ),
    "no latent of queries": LatentSizes(kv_rank=6, rope_dim=2, nope_dim=4, value_dim=6),
    "values larger than keys": LatentSizes(
        q_rank=5, kv_rank=12, rope_dim=2, nope_dim=3, value_dim=7
    ),
}
DOCUMENTS = documents_of([[3, 5], [1, 2, 4]], 8)


def _layer(sizes, **options):
    layer = LatentAttention(HIDDEN, HEADS, sizes, rotary=Rotary(sizes.rope_dim), **options)
    for norm in (layer.q_norm, layer.kv_norm):
        if norm is not None:
            nn.init.normal_(norm.weight)
    return layer


def _norm(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def _rotated(x, position):
    half = x.shape[-1] // 2
    angle = position / 10_000 ** (torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angle.cos().double(), angle.sin().double()
    return torch.cat((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin))


def _formula(layer, x, window=None):
    """Equations (37) to (47) of arXiv 2405.04434, one score after the other."""
    z = layer.sizes
    c_q = x if z.q_rank is None else _norm(x @ layer.q_down.weight.T, layer.q_norm)
    q_weight = (layer.wq if z.q_rank is None else layer.q_up).weight
    queries = (c_q @ q_weight.T).unflatten(-1, (HEADS, -1))
    down = x @ layer.kv_down.weight.T
    shared = down[..., z.kv_rank :]
    up = (_norm(down[..., : z.kv_rank], layer.kv_norm) @ layer.kv_up.weight.T).unflatten(
        -1, (HEADS, -1)
    )
    samples = []
    for b in range(x.shape[0]):
        rows = []
        for i in range(x.shape[1]):
            heads = []
            first = 0 if window is None else max(0, i - window + 1)
            for n in range(HEADS):
                q_nope, q_pe = queries[b, i, n].split([z.nope_dim, z.rope_dim])
                scores = [
                    q_nope @ up[b, j, n, : z.nope_dim]
                    + _rotated(q_pe, i) @ _rotated(shared[b, j], j)
                    for j in range(first, i + 1)
                ]
                weights = (torch.stack(scores) * layer.score_scale).softmax(0)
                heads.append(weights @ up[b, first : i + 1, n, z.nope_dim :])
            rows.append(torch.cat(heads))
        samples.append(torch.stack(rows))
    return torch.stack(samples) @ layer.wo.weight.T


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("options", [{}, {"window": 2, "score_scale": 0.7}], ids=["", "window"])
def test_it_equals_its_formula(sizes, options):
    torch.manual_seed(0)
    layer = _layer(sizes, **options).double()
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    for backend in ("sdpa", "reference"):
        layer.backend = backend
        torch.testing.assert_close(
            layer(x), _formula(layer, x, layer.window), rtol=1e-12, atol=1e-12
        )


def _on_tp(tp, sequence_parallel):
    topology = make_topology(tp, sequence_parallel)
    for sizes in SIZES.values():
        for kwargs in ({}, {"documents": DOCUMENTS}):
            check(
                Case(
                    lambda s=sizes: _layer(s), lambda: (torch.randn(2, 8, HIDDEN),), kwargs=kwargs
                ),
                topology,
            )


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (2, True), (4, True)])
def test_heads_are_split_over_tp(pool, tp, sequence_parallel):
    pool.run(tp, _on_tp, tp, sequence_parallel)


class _Trunk(nn.Module):
    def __init__(self, sizes, **options):
        super().__init__()
        self.trunk = PipelineSequential(
            split=SplitContext(),
            blocks=[_layer(sizes, **options) for _ in range(2)],
            head=ColumnParallelLinear(HIDDEN, 4),
        )


def _loss(model, x, kwargs):
    y = whole(model.trunk(x, **kwargs))
    return (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def _on_cp(cp, tp, sequence_parallel, kind, names):
    topology = context_topology(cp, tp, sequence_parallel=sequence_parallel, kind=kind)
    for sizes in map(SIZES.get, names):
        for length, options, extra in (
            (1, {}, ()),
            (5, {}, ()),
            (8, {"window": 3}, ()),
            (8, {}, ("documents",)),
            (8, {"score_scale": 0.3}, ("mask", "positions")),
        ):
            if kind == "ring" and "mask" in extra:
                continue
            torch.manual_seed(0)
            model = _Trunk(sizes, **options).double()
            x = torch.randn(2, length, HIDDEN, dtype=torch.float64, requires_grad=True)
            given = {
                "documents": DOCUMENTS[:, :length],
                "mask": torch.ones(length, length).tril(1).bool(),
                "positions": torch.arange(length).flip(0),
            }
            same_as_whole(model, topology, _loss, x, {key: given[key] for key in extra})


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "kind", "names"),
    [
        (2, 1, False, "auto", [*SIZES]),
        (2, 1, False, "ring", [*SIZES]),
        (2, 2, False, "auto", ["values smaller than keys"]),
        (2, 2, True, "ulysses", ["values larger than keys"]),
        *(
            pytest.param(*case, [*SIZES], marks=pytest.mark.thorough)
            for case in (
                *((2, 2, False, "auto"), (2, 2, True, "ulysses")),
                *((2, 2, True, "gather"), (4, 1, False, "gather")),
            )
        ),
    ],
    ids=lambda value: f"{len(value)} sizes" if isinstance(value, list) else None,
)
def test_latents_are_gathered_over_cp(pool, cp, tp, sequence_parallel, kind, names):
    pool.run(cp * tp, _on_cp, cp, tp, sequence_parallel, kind, names)


def _exchanges(kind):
    """Number of times that keys and values travel."""
    topology = context_topology(2, kind=kind)
    model = on_context(_Trunk(SIZES["values larger than keys"]).double(), topology)
    topology.context.begin(0, forget=True)
    with (
        mock.patch.object(gather, "forward", wraps=gather.forward) as gathered,
        mock.patch.object(ring, "forward", wraps=ring.forward) as passed,
    ):
        model.trunk(torch.randn(1, 8, HIDDEN, dtype=torch.float64))
    return gathered.call_count + passed.call_count


def test_only_a_named_kind_sends_keys_and_values(pool):
    assert pool.run(2, _exchanges, "auto") == [0, 0]
    assert pool.run(2, _exchanges, "ring") == [2, 2]


def _written(layer, x, steps, mask=None):
    """Outputs of the layer that gets so many positions at a time, with a cache."""
    length, found, done = x.shape[1], [], 0
    cache = KeyValueCache(length)
    seen = torch.ones(length, length).tril().bool() if mask is None else mask
    for step in steps:
        own = slice(done, done + step)
        positions = torch.arange(length)[own]
        found.append(layer(x[:, own], positions, seen[own, : done + step], cache))
        done += step
    return torch.cat(found, 1)


def _cached(tp):
    topology = make_topology(tp)
    for sizes in SIZES.values():
        torch.manual_seed(0)
        layer = _layer(sizes, score_scale=0.4).double()
        x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
        with torch.no_grad():
            expected = layer(x)
            distribute(layer, topology)
            for steps in ((9,), (1,) * 9, (4, 1, 3, 1)):
                found = _written(layer, x, steps)
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_cache_of_latents_gives_the_same(pool, tp):
    pool.run(tp, _cached, tp)


def test_few_queries_meet_latents_and_many_meet_keys(monkeypatch):
    layer = _layer(LatentSizes(kv_rank=32, rope_dim=2, nope_dim=16, value_dim=16)).double()
    absorbed = []
    original = LatentAttention._absorbed
    monkeypatch.setattr(
        LatentAttention, "_absorbed", lambda *a: (absorbed.append(a[2].shape[1]), original(*a))[1]
    )
    with torch.no_grad():
        _written(layer, torch.randn(1, 80, HIDDEN, dtype=torch.float64), (70, 1, 9))
    assert absorbed == [1, 9]
    keys, values, _ = next(iter(_cache_of(layer)._kept.values()))
    assert keys.shape[2] * keys.shape[3] + values.shape[2] * values.shape[3] == 34


def _cache_of(layer):
    cache = KeyValueCache(4)
    with torch.no_grad():
        layer(torch.randn(1, 2, HIDDEN, dtype=torch.float64), cache=cache)
    return cache


def test_a_wrapped_projection_computes_keys_as_a_layer(pool):
    pool.run(2, _wrapped)


def _wrapped():
    topology = context_topology(2)
    torch.manual_seed(0)
    model = _Trunk(SIZES["no latent of queries"]).double()
    for block in model.trunk.items():
        if isinstance(block, LatentAttention):
            block.kv_up.register_forward_hook(lambda module, args, y: 2 * y)
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
    same_as_whole(model, topology, _loss, x, {})


def test_problems_name_values_and_what_is_valid():
    sizes = SIZES["no latent of queries"]
    with pytest.raises(ConfigError, match=r"rope_dim=3: must be even.*rope_dim=2 or 4"):
        LatentSizes(kv_rank=4, rope_dim=3, nope_dim=4, value_dim=4)
    with pytest.raises(ConfigError, match=r"kv_rank=0"):
        LatentSizes(kv_rank=0, rope_dim=2, nope_dim=4, value_dim=4)
    with pytest.raises(ConfigError, match=r"rotary of 4 numbers, rope_dim=2.*Rotary\(2\)"):
        LatentAttention(HIDDEN, HEADS, sizes, rotary=Rotary(4))
    with pytest.raises(ConfigError, match=r"rotary=Alibi: .*Rotary\(2\)"):
        LatentAttention(HIDDEN, HEADS, sizes, rotary=Alibi())
    layer = LatentAttention(HIDDEN, HEADS, sizes, dropout=0.1)
    assert "num_heads=4, tp=3" in layer.problems(Degrees(tp=3))[0]
    assert "kind='ring'" in layer.context_problems(ContextConfig(degree=2, kind="ring"), 1)[0]
    assert layer.context_problems(ContextConfig(degree=2), 1) == []
    with pytest.raises(ConfigError, match="documents with a cache"):
        layer(torch.ones(1, 8, HIDDEN), cache=KeyValueCache(8), documents=DOCUMENTS[:1])


def test_without_rotary_positions_do_not_matter():
    layer = LatentAttention(HIDDEN, HEADS, SIZES["no latent of queries"]).double()
    x = torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    assert torch.equal(layer(x), layer(x, torch.tensor([7, 0, 3, 5])))
    assert math.isclose(layer.score_scale, 6**-0.5)


def _in_halves(weight, heads, kept, turned):
    """Rows of a projection whose rotary numbers lie in pairs, in the order of `Rotary`."""
    rows = weight.unflatten(0, (heads, kept + turned))
    pairs = rows[:, kept:].unflatten(1, (turned // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rows[:, :kept], pairs), 1).flatten(0, 1)


@pytest.mark.parametrize("q_rank", [10, None])
def test_it_equals_that_of_transformers(q_rank):
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7}
    yarn |= {"mscale_all_dim": 0.9, "original_max_position_embeddings": 64}
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_rank,
        kv_lora_rank=6,
        qk_rope_head_dim=8,
        qk_nope_head_dim=6,
        v_head_dim=5,
        max_position_embeddings=256,
        rope_parameters=yarn,
        attn_implementation="sdpa",
    )
    original = theirs.DeepseekV3Attention(config, 0)
    original.kv_a_layernorm = nn.RMSNorm(6, 1e-6)  # theirs computes in float32 always
    if q_rank is not None:
        original.q_a_layernorm = nn.RMSNorm(q_rank, 1e-6)
    for parameter in original.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    scaling = RopeScaling(
        kind="yarn",
        factor=4.0,
        original_length=64,
        attention_factor=yarn_mscale(4.0, 0.7) / yarn_mscale(4.0, 0.9),
    )
    sizes = LatentSizes(q_rank=q_rank, kv_rank=6, rope_dim=8, nope_dim=6, value_dim=5)
    layer = LatentAttention(
        HIDDEN,
        HEADS,
        sizes,
        rotary=Rotary(8, scaling=scaling),
        score_scale=sizes.key_dim**-0.5 * yarn_mscale(4.0, 0.9) ** 2,
    ).double()
    with torch.no_grad():
        if q_rank is None:
            layer.wq.weight.copy_(_in_halves(original.q_proj.weight, HEADS, 6, 8))
        else:
            layer.q_down.weight.copy_(original.q_a_proj.weight)
            layer.q_norm.weight.copy_(original.q_a_layernorm.weight)
            layer.q_up.weight.copy_(_in_halves(original.q_b_proj.weight, HEADS, 6, 8))
        layer.kv_down.weight.copy_(_in_halves(original.kv_a_proj_with_mqa.weight, 1, 6, 8))
        layer.kv_norm.weight.copy_(original.kv_a_layernorm.weight)
        layer.kv_up.weight.copy_(original.kv_b_proj.weight)
        layer.wo.weight.copy_(original.o_proj.weight)
    x = torch.randn(2, 100, HIDDEN, dtype=torch.float64)
    rotary = theirs.DeepseekV3RotaryEmbedding(config)(x, torch.arange(100)[None])
    mask = torch.full((100, 100), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = original(x, position_embeddings=rotary, attention_mask=mask)[0]
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def _dropped():
    topology = context_topology(2, kind="auto")
    torch.manual_seed(0)
    model = _Trunk(SIZES["no latent of queries"], dropout=0.5).double()
    x = torch.randn(1, 64, HIDDEN, dtype=torch.float64)
    parallel = on_context(model, topology)
    outputs = []
    for train in (True, True, False):
        parallel.train(train)
        topology.context.begin(0, forget=True)
        outputs.append(whole(parallel.trunk(x)).detach())
    model.eval()
    expected = model.trunk(x).detach()
    torch.testing.assert_close(outputs[2], expected, rtol=1e-12, atol=1e-12)
    return [float((y - expected).abs().max()) for y in outputs], bool(
        torch.equal(outputs[0], outputs[1])
    )


def test_weights_are_dropped_over_cp_in_training_only(pool):
    for (first, second, evaluated), equal in pool.run(2, _dropped):
        assert first > 0.01
        assert second > 0.01
        assert not equal
        assert evaluated < 1e-12
