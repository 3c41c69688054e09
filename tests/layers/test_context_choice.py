"""What the kinds of a split sequence cost, and which one `auto` takes."""

import dataclasses

import pytest

from lightning_megatron.layers.context_choice import (
    KINDS,
    AttentionSizes,
    Hardware,
    choose,
    cost,
    refusal,
)

LLAMA = AttentionSizes(cp=8, heads=32, kv_heads=8, head_dim=128, length=131072)


def sizes(cp: int, heads: int, kv_heads: int, **others: int) -> AttentionSizes:
    return AttentionSizes(
        cp=cp, heads=heads, kv_heads=kv_heads, head_dim=128, length=5040 * 16, **others
    )


def test_bytes_of_the_table() -> None:
    b, n, d, e, a, p, heads, kv_heads = 3, 1000, 64, 2, 4, 4, 12, 4
    small = AttentionSizes(
        cp=p, heads=heads, kv_heads=kv_heads, head_dim=d, length=n * p, batch=b, element_bytes=e
    )
    one = 2 * b * n * kv_heads * d
    ring, gather, ulysses = (cost(kind, small) for kind in ("ring", "gather", "ulysses"))
    assert ring.forward_bytes == gather.forward_bytes == one * e * (p - 1)
    assert ring.backward_bytes == one * (e + a) * (p - 1)
    assert gather.backward_bytes == one * (e + a) * (p - 1)
    assert ulysses.forward_bytes == ulysses.backward_bytes
    assert ulysses.forward_bytes == 2 * b * n * d * e * (heads + kv_heads) * (p - 1) / p
    assert (ring.extra_bytes, ulysses.extra_bytes) == (2 * one * e, 0)
    assert gather.extra_bytes == 2 * b * n * p * kv_heads * d * (e + a)


@pytest.mark.parametrize("g", [1, 4, 8])
def test_ulysses_sends_less_forward_if_p_exceeds_g_plus_1(g: int) -> None:
    for p in range(2, 13):
        kv_heads = p * 4
        case = sizes(p, g * kv_heads, kv_heads)
        ring, ulysses = (cost(kind, case).forward_bytes for kind in ("ring", "ulysses"))
        assert (ulysses < ring) == (p > g + 1), p
        assert (ulysses == pytest.approx(ring)) == (p == g + 1), p


def test_ulysses_sends_less_in_both_directions_from_half_of_that_on() -> None:
    for g, least in ((1, 2), (2, 2), (4, 3), (8, 5)):
        for p in range(2, 13):
            case = sizes(p, g * p * 4, p * 4)
            assert (cost("ulysses", case).bytes < cost("ring", case).bytes) == (p >= least), (g, p)


@pytest.mark.parametrize(("kv_heads", "link", "limit"), [(8, 50e9, 5000), (32, 450e9, 2222)])
def test_a_hop_is_hidden_from_the_positions_of_the_formula_on(
    kv_heads: int, link: float, limit: int
) -> None:
    """``n = (e / g) (F / B)``, with 500 TFLOP/s."""
    assert limit == pytest.approx(2 * kv_heads / 32 * 500e12 / link, rel=1e-3)
    for n, hidden in ((limit + 10, True), (limit - 10, False)):
        case = AttentionSizes(cp=8, heads=32, kv_heads=kv_heads, head_dim=128, length=8 * n)
        assert (cost("ring", case, Hardware(link=link)).forward_waits == 0) == hidden


def test_heads_of_keys_are_repeated() -> None:
    few = sizes(8, 32, 2)
    all_of_them = sizes(8, 32, 8)
    assert cost("ulysses", few).bytes == cost("ulysses", all_of_them).bytes
    assert cost("ulysses", few).extra_bytes == 2 * 3 * few.key_bytes
    assert cost("ring", few).bytes == cost("ring", all_of_them).bytes / 4


def test_groups_of_ulysses_in_a_ring() -> None:
    whole, both = cost("ring", LLAMA), cost("ring", LLAMA, ulysses=2)
    inside = AttentionSizes(cp=2, heads=32, kv_heads=8, head_dim=128, length=131072 // 4)
    # 3 hops of the keys of two ranks, with half of the heads, in place of 7.
    expected = whole.forward_bytes * 3 / 7 + cost("ulysses", inside).forward_bytes
    assert both.forward_bytes == pytest.approx(expected)
    assert cost("ring", LLAMA, ulysses=1) == whole
    assert cost("ring", LLAMA, ulysses=8).bytes == pytest.approx(cost("ulysses", LLAMA).bytes)
    # Heads inside nodes, keys between them: the network is hidden, the links inside are quick.
    spread = Hardware(ranks_per_node=4)
    assert cost("ring", LLAMA, spread, ulysses=4).waits < cost("ulysses", LLAMA, spread).waits


def test_a_window_in_contiguous_order() -> None:
    near = dataclasses.replace(LLAMA, window=4096, order="contiguous")
    whole = cost("ring", dataclasses.replace(near, order="zigzag"))
    assert near.hops == 1
    assert cost("ring", near).forward_bytes == whole.forward_bytes / 7
    assert dataclasses.replace(near, window=16386).hops == 2
    assert dataclasses.replace(near, window=10**6).hops == 7
    assert dataclasses.replace(near, causal=False).hops == 7


def test_cross_attention() -> None:
    case = AttentionSizes(
        cp=2, heads=4, kv_heads=4, head_dim=8, length=100, key_length=40, causal=False
    )
    assert case.key_bytes == 2 * 20 * 4 * 8 * 2
    assert case.flops() == 4 * 4 * 8 * 100 * 40 / 2


@pytest.mark.parametrize("heads", [4, 6])
def test_on_cpus(heads: int) -> None:
    case = AttentionSizes(cp=4, heads=heads, kv_heads=2, head_dim=8, length=96)
    assert choose(case).kind == ("ulysses" if heads == 4 else "ring")
    assert choose(case, mask=True).kind == ("ulysses" if heads == 4 else "gather")
    assert choose(case, dropout=0.1).kind == ("ulysses" if heads == 4 else "gather")
    reason = choose(case, dropout=0.1).reason
    assert reason.startswith(f"cp=4: attention takes kind={choose(case, dropout=0.1).kind!r}, ")
    if heads == 6:
        assert reason.endswith(
            "the only one that can; kind='ulysses', heads of a tp rank=6, cp=4: heads must be "
            "divisible by cp; kind='ring', attention dropout=0.1: a ring draws no masks of weights"
        )


def test_on_gpus() -> None:
    def kind(case: AttentionSizes, **hardware: float) -> str:
        return choose(case, device="cuda", hardware=Hardware(**hardware)).kind  # type: ignore[arg-type]

    assert kind(LLAMA) == "ring"  # 16,384 positions a rank hide all hops but the last
    short = AttentionSizes(cp=8, heads=32, kv_heads=8, head_dim=128, length=8192)
    assert kind(short, ranks_per_node=1) == "ulysses"
    many_heads = AttentionSizes(cp=8, heads=32, kv_heads=32, head_dim=128, length=131072)
    assert kind(many_heads, ranks_per_node=1) == "ulysses"
    even = AttentionSizes(cp=2, heads=32, kv_heads=32, head_dim=128, length=131072)
    waits = {k: cost(k, even).waits for k in KINDS}
    assert waits["ring"] == pytest.approx(waits["ulysses"])
    assert kind(even) == "ulysses"  # a tie
    assert "ulysses 4.77 ms, ring 4.77 ms" in choose(even, device="cuda").reason


def test_hardware_of_a_peak() -> None:
    assert Hardware.of_peak(989e12, 4) == Hardware(flops=494.5e12, ranks_per_node=4)
    assert Hardware.of_peak(None) == Hardware()


def test_what_a_kind_refuses() -> None:
    for kind in KINDS:
        assert refusal(kind, heads=8, cp=4) is None
    assert refusal("gather", heads=7, cp=4, dropout=0.1, mask=True) is None
    assert "nearest valid: kind='gather'" in (refusal("ring", heads=8, cp=4, mask=True) or "")
    assert "nearest valid: ulysses=3 or 6" in (refusal("ring", heads=6, cp=8, ulysses=4) or "")
