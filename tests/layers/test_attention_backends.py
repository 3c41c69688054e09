"""Every backend against the formula; those of other packages against their published signatures."""

import itertools
import logging
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import attention_backends as backends
from lightning_megatron.layers import attention_packages
from lightning_megatron.layers.alibi import alibi_slopes
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.attention_backends import attend
from lightning_megatron.layers.attention_call import AttentionCall, window_mask
from lightning_megatron.layers.packed_documents import documents_of
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.topology.degrees import Degrees


def _call(n=4, kv_heads=4, s=9, t=None, d=8, dtype=torch.float64, grad=True, **options):
    generator = torch.Generator().manual_seed(0)
    t = s if t is None else t
    q, k, v = (
        torch.randn(2, length, heads, d, generator=generator, dtype=dtype, requires_grad=grad)
        for length, heads in ((s, n), (t, kv_heads), (t, kv_heads))
    )
    return AttentionCall(q, k, v, **options)


def _mask():
    return torch.ones(9, 9, dtype=torch.bool).tril(2)


DOCUMENTS = documents_of([[2, 4, 3], [1, 7]], 9)
SLOPES = alibi_slopes(4, dtype=torch.float64)
CASES = {
    "all heads": {},
    "grouped": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "window": {"window": 3, "kv_heads": 2},
    "window of one": {"window": 1},
    "window longer than the sequence": {"window": 20},
    "mask": {"mask": _mask()},
    "bias": {"mask": torch.randn(4, 9, 9, dtype=torch.float64)},
    "all positions": {"causal": False, "kv_heads": 2},
    "window on both sides": {"causal": False, "window": 3},
    "documents": {"documents": DOCUMENTS, "kv_heads": 2},
    "documents, all positions": {"documents": DOCUMENTS, "causal": False},
    "documents and window": {"documents": DOCUMENTS, "window": 3},
    "documents and mask": {"documents": DOCUMENTS, "mask": _mask(), "kv_heads": 2},
    "documents and bias": {"documents": DOCUMENTS, "mask": torch.randn(4, 9, 9).double()},
    "documents of one": {"documents": torch.arange(9).expand(2, 9)},
    "slopes": {"alibi": SLOPES, "kv_heads": 2},
    "slopes, all positions": {"alibi": SLOPES, "causal": False},
    "slopes and documents": {"alibi": SLOPES, "documents": DOCUMENTS, "window": 4},
    "slopes and mask": {"alibi": SLOPES, "mask": _mask()},
    "lengths of keys": {"causal": False, "key_lengths": torch.tensor([9, 4])},
    "slopes and lengths of keys": {"alibi": SLOPES, "key_lengths": torch.tensor([1, 4])},
    "keys of another sequence": {"causal": False, "t": 5, "kv_heads": 2},
    "last of many": {"t": 12, "kv_heads": 2, "window": 4, "alibi": SLOPES},
}


def _seen(i, j, b, case, s, t):
    """Whether query i sees key j; written out."""
    place = i + t - s
    if "mask" in case and case["mask"].dtype == torch.bool:
        seen = bool(case["mask"][i, j])
    else:
        window = case.get("window", s + t)
        ahead = 0 if case.get("causal", True) else window - 1
        seen = "mask" in case or -ahead <= place - j < window
    if "documents" in case:
        row = case["documents"][b]
        seen &= bool((row[min(i, j) : max(i, j) + 1] == row[i]).all())
    if "key_lengths" in case:
        seen &= j < int(case["key_lengths"][b])
    return seen


@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_formula(name):
    case = CASES[name]
    call = _call(grad=False, **case)
    found = attend("reference", call)
    (b_, s, n), t = call.q_bsnd.shape[:3], call.k_btnd.shape[1]
    group = n // call.k_btnd.shape[2]
    bias = case["mask"] if "mask" in case and case["mask"].dtype != torch.bool else None
    for b, i, h in itertools.product(range(b_), range(s), range(n)):
        keys = [j for j in range(t) if _seen(i, j, b, case, s, t)]
        scores = call.k_btnd[b, keys, h // group] @ call.q_bsnd[b, i, h] / 8**0.5
        if bias is not None:
            scores = scores + bias[h, i, keys]
        if "alibi" in case:
            distance = torch.tensor([abs(i + t - s - j) for j in keys])
            scores = scores - case["alibi"][h] * distance
        expected = scores.softmax(0) @ call.v_btnd[b, keys, h // group]
        torch.testing.assert_close(found[b, i, h], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "scores_per_call"),
    [(case, 10_000) for case in CASES]
    + [(case, 0) for case in CASES if "documents" in CASES[case]],
)
def test_sdpa_is_the_reference(case, scores_per_call, monkeypatch):
    monkeypatch.setattr(backends, "_SCORES_PER_CALL", {"cpu": scores_per_call})
    grads = []
    for name in ("reference", "sdpa"):
        call = _call(**CASES[case])
        y = attend(name, call)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        grads.append([y.detach(), call.q_bsnd.grad, call.k_btnd.grad, call.v_btnd.grad])
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


class _Calls(TorchFunctionMode):
    """What `scaled_dot_product_attention` is called with."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.heads, self.grouped = [x.shape[1] for x in args], kwargs["enable_gqa"]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "options", "heads"),
    [
        ("meta", {"window": 3}, [4, 4, 4]),
        ("meta", {"mask": torch.ones(9, 9, dtype=torch.bool, device="meta")}, [4, 4, 4]),
        ("meta", {}, [4, 2, 2]),
        ("cpu", {"window": 3}, [4, 2, 2]),
    ],
)
def test_keys_are_expanded_where_a_mask_and_groups_have_no_kernel(device, options, heads):
    call = _call(kv_heads=2, grad=False)
    tensors = [x.to(device) for x in (call.q_bsnd, call.k_btnd, call.v_btnd)]
    with _Calls() as seen:
        attend("sdpa", AttentionCall(*tensors, **options))
    assert seen.heads == heads
    assert seen.grouped is (heads[1] == 2)


FLEX = {"one kv head", "bias", "documents and mask", "slopes and documents", "lengths of keys"}
FLEX |= {"window on both sides", "keys of another sequence", "slopes and mask"}
"""Cases with each option, and with each pair that makes one mask."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.thorough] * (case not in FLEX))
        for case in sorted(CASES.keys() - {"last of many"})
    ],
)
def test_flex_is_the_reference_forward(case):
    call = _call(grad=False, dtype=torch.float32, **CASES[case])
    if call.mask is not None and call.mask.dtype != torch.bool:
        call = replace(call, mask=call.mask.float())
    torch.testing.assert_close(
        attend("flex", call), attend("reference", call), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("case", ["causal", "documents"])
def test_blocks_of_a_device_are_found_by_a_compiled_function(case, monkeypatch):
    """Eagerly, `create_block_mask` holds all scores of a batch at a time."""
    compiled = []

    def compiles(function):
        compiled.append(function)
        return compile_(function, backend="eager")

    compile_ = torch.compile
    ids = documents_of([[3, 5], [9]], 9)
    options = {"causal": True, **({"documents": ids} if case == "documents" else {})}
    expected = backends._blocks(_call(**options)).to_dense()
    for cached in (backends._blocks_by_rule, backends._compiled_block_mask):
        cached.cache_clear()
    monkeypatch.setattr(torch, "compile", compiles)
    monkeypatch.setattr(backends, "is_cuda", lambda device: True)
    options = {
        key: value.clone() if key == "documents" else value for key, value in options.items()
    }
    assert torch.equal(backends._blocks(_call(**options)).to_dense(), expected)
    assert compiled == [backends.create_block_mask]
    for cached in (backends._blocks_by_rule, backends._compiled_block_mask):
        cached.cache_clear()


def test_a_layer_gives_the_same_with_another_backend():
    torch.manual_seed(0)
    layer = CausalSelfAttention(16, 4, 2, rotary=Rotary(4), window=3, qk_norm_eps=1e-6).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    expected = layer(x)
    layer.backend = "reference"
    torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-11)


def test_dropout_of_the_reference_keeps_the_mean():
    torch.manual_seed(0)
    call = _call(n=8, kv_heads=8, grad=False)
    dropped = AttentionCall(call.q_bsnd, call.k_btnd, call.v_btnd, dropout=0.5)
    mean = torch.stack([attend("reference", dropped) for _ in range(3000)]).mean(0)
    assert (mean - attend("reference", call)).abs().max() < 0.2


def test_the_configuration_names_the_backend():
    config = TransformerConfig(hidden_size=16, num_heads=2, num_layers=1)
    model = Transformer(TransformerConfig(**vars(config) | {"attention_backend": "reference"}))
    assert model.trunk.layers[0].attention.backend == "reference"
    with pytest.raises(ConfigError, match="attention_backend=best"):
        TransformerConfig(attention_backend="best")  # type: ignore[arg-type]


def test_auto_says_what_it_takes(caplog):
    backends._say.cache_clear()
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        for _ in range(2):
            attend("auto", _call())
    assert [record.getMessage() for record in caplog.records] == ["attention_backend=auto: sdpa"]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("flex", {}, "device=cpu: this backend trains on CUDA only"),
        ("flex", {"dropout": 0.1, "grad": False}, "dropout=0.1"),
        ("flex", {"t": 12, "grad": False}, "9 queries, 12 keys"),
        ("flash", {"mask": _mask()}, "takes no mask"),
        ("flash", {"key_lengths": torch.tensor([9, 4])}, "takes no lengths of keys"),
        ("te", {"mask": _mask()}, "takes no mask"),
        ("te", {"documents": DOCUMENTS}, "takes no documents"),
        ("te", {"alibi": SLOPES}, "has no ALiBi"),
    ],
)
def test_limits_are_refused(packages, name, options, reason):
    with pytest.raises(ConfigError, match=f"attention_backend={name}: .*{reason}.*nearest valid"):
        attend(name, _call(**options))


@pytest.fixture
def packages(monkeypatch):
    """flash-attn and Transformer Engine with the signatures that they document."""

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        assert softmax_scale is None
        if alibi_slopes is not None:
            assert alibi_slopes.dtype == torch.float32
            alibi_slopes = alibi_slopes.to(q.dtype)
        mask = _band(q.shape[1], window_size, causal)
        return backends.reference(AttentionCall(q, k, v, mask, None, dropout_p, alibi=alibi_slopes))

    def flash_attn_varlen_func(  # it has softmax_scale, softcap and others, too
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        causal=False,
        window_size=(-1, -1),
        alibi_slopes=None,
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        sizes = cu_seqlens_q.diff().tolist()
        assert sum(sizes) == q.shape[0] == k.shape[0]
        assert max(sizes) == max_seqlen_q == max_seqlen_k
        rows = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        options = {"causal": causal, "window_size": window_size, "alibi_slopes": alibi_slopes}
        found = [flash_attn_func(*(x[None] for x in row), **options)[0] for row in rows]
        return torch.cat(found)

    class DotProductAttention(nn.Module):
        def __init__(
            self,
            num_attention_heads,
            kv_channels,
            num_gqa_groups=None,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=None,
        ):
            super().__init__()
            assert qkv_format == "bshd"
            self.causal = {"causal": True, "no_mask": False}[attn_mask_type]
            self.sizes = num_attention_heads, num_gqa_groups, kv_channels
            self.window_size = window_size

        def forward(self, query_layer, key_layer, value_layer):
            s, n, d = query_layer.shape[1:]
            assert self.sizes == (n, key_layer.shape[2], d)
            mask = _band(s, self.window_size, self.causal)
            return backends.reference(
                AttentionCall(query_layer, key_layer, value_layer, mask)
            ).flatten(2)

    flash, te = ModuleType("flash_attn"), ModuleType("transformer_engine.pytorch")
    flash.flash_attn_func, te.DotProductAttention = flash_attn_func, DotProductAttention
    flash.flash_attn_varlen_func = flash_attn_varlen_func
    for module in (flash, ModuleType("transformer_engine"), te):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    caches = (attention_packages.imported, attention_packages.te_module)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _band(s, window_size, causal):
    """What both packages document: ``i - left <= j <= i + right``; -1 is no bound."""
    left, right = window_size
    seen = torch.ones(s, s, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if right >= 0:
        seen = seen.tril(right)
    return seen if left < 0 else seen.triu(-left)


OF_FLASH = ("documents", "documents, all positions", "documents and window", "documents of one")
OF_FLASH = (*OF_FLASH, "slopes", "slopes, all positions", "slopes and documents")
OF_BOTH = ("grouped", "window", "window longer than the sequence")
OF_BOTH = (*OF_BOTH, "all positions", "window on both sides")


@pytest.mark.parametrize(
    ("name", "case"),
    [("flash", case) for case in OF_BOTH + OF_FLASH] + [("te", case) for case in OF_BOTH],
)
def test_other_packages_are_called_as_they_document(packages, name, case):
    call = _call(**CASES[case])
    torch.testing.assert_close(backends._BACKENDS[name](call), attend("reference", call))
    with pytest.raises(ConfigError, match="needs CUDA and float16 or bfloat16"):
        attend(name, call)


@pytest.mark.parametrize("name", ["flash", "te"])
def test_a_missing_package_is_named_before_the_run(monkeypatch, name):
    monkeypatch.setattr(attention_packages, "imported", lambda package: None)
    layer = CausalSelfAttention(16, 4)
    assert layer.problems(Degrees(tp=2)) == []
    layer.backend = name
    (problem,) = layer.problems(Degrees(tp=2))
    assert problem.startswith(f"attention_backend={name}: ")
    assert "lightning-megatron[gpu]" in problem
    with pytest.raises(ConfigError, match="cannot be imported"):
        layer(torch.randn(1, 3, 16))


def test_window_mask():
    assert window_mask(3, 2, torch.device("cpu")).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]
