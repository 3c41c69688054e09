"""Every backend against the formula; those of other packages against their published signatures."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import attention_backends as backends
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.attention_backends import AttentionCall, attend, window_mask
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.topology.degrees import Degrees


def _call(n=4, kv_heads=4, s=9, d=8, dtype=torch.float64, grad=True, **options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, s, heads, d, generator=generator, dtype=dtype, requires_grad=grad)
        for heads in (n, kv_heads, kv_heads)
    )
    return AttentionCall(q, k, v, **options)


def _mask():
    return torch.ones(9, 9, dtype=torch.bool).tril(2)


CASES = {
    "all heads": {},
    "grouped": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "window": {"window": 3, "kv_heads": 2},
    "window of one": {"window": 1},
    "window longer than the sequence": {"window": 20},
    "mask": {"mask": _mask()},
    "bias": {"mask": torch.randn(4, 9, 9, dtype=torch.float64)},
}


def test_reference_is_the_formula():
    call = _call(n=1, kv_heads=1, s=3, grad=False)
    q, k, v = (x[0, :, 0] for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    found = attend("reference", call)[0, :, 0]
    for i in range(3):
        weights = torch.exp(k[: i + 1] @ q[i] / 8**0.5)
        torch.testing.assert_close(found[i], (weights / weights.sum()) @ v[: i + 1])


@pytest.mark.parametrize("case", CASES)
def test_sdpa_is_the_reference(case):
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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", ["grouped", "window", "window longer than the sequence"])
def test_flex_is_the_reference_forward(case):
    call = _call(grad=False, dtype=torch.float32, **CASES[case])
    torch.testing.assert_close(
        attend("flex", call), attend("reference", call), rtol=1e-5, atol=1e-5
    )


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
        ("flex", {"mask": _mask(), "grad": False}, "takes no mask"),
        ("flex", {"dropout": 0.1, "grad": False}, "dropout=0.1"),
    ],
)
def test_limits_are_refused(name, options, reason):
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
        assert causal
        assert softmax_scale is None
        return backends._reference(
            AttentionCall(q, k, v, _band(q.shape[1], window_size), None, dropout_p)
        )

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
            assert (qkv_format, attn_mask_type) == ("bshd", "causal")
            self.sizes = num_attention_heads, num_gqa_groups, kv_channels
            self.window_size = window_size

        def forward(self, query_layer, key_layer, value_layer):
            s, n, d = query_layer.shape[1:]
            assert self.sizes == (n, key_layer.shape[2], d)
            mask = _band(s, self.window_size)
            return backends._reference(
                AttentionCall(query_layer, key_layer, value_layer, mask)
            ).flatten(2)

    flash, te = ModuleType("flash_attn"), ModuleType("transformer_engine.pytorch")
    flash.flash_attn_func, te.DotProductAttention = flash_attn_func, DotProductAttention
    for module in (flash, ModuleType("transformer_engine"), te):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    caches = (backends._imported, backends._te_module)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _band(s, window_size):
    """What both packages document: ``i - left <= j <= i + right``; -1 is no bound."""
    left, right = window_size
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    if right >= 0:
        seen = seen.tril(right)
    return seen if left < 0 else seen.triu(-left)


@pytest.mark.parametrize("name", ["flash", "te"])
@pytest.mark.parametrize("case", ["grouped", "window", "window longer than the sequence"])
def test_other_packages_are_called_as_they_document(packages, name, case):
    call = _call(**CASES[case])
    torch.testing.assert_close(backends._BACKENDS[name](call), attend("reference", call))
    with pytest.raises(ConfigError, match="needs CUDA and float16 or bfloat16"):
        attend(name, call)


@pytest.mark.parametrize("name", ["flash", "te"])
def test_a_missing_package_is_named_before_the_run(monkeypatch, name):
    monkeypatch.setattr(backends, "_imported", lambda package: None)
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
