"""The products of a plan have every score that is seen once, and hide what they say is hidden."""

import itertools

import pytest
import torch

from lightning_megatron.layers.context_attention import plan
from lightning_megatron.layers.context_attention.documents import Documents, seen_mask
from lightning_megatron.layers.context_attention.plan import Product, Rule
from lightning_megatron.topology.context_layout import ContextLayout, ContextOrder

LENGTH = 23


def seen_by_plan(
    found: list[Product], rows: torch.Tensor, columns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """How often each score is computed, hidden ones left out; fails where a product lies."""
    times = torch.zeros(len(rows), len(columns), dtype=torch.long)
    for product in found:
        part = slice(*product.rows), slice(*product.columns)
        inside = torch.ones_like(times[part], dtype=torch.bool)
        if product.seen == "causal":
            inside = inside.tril()
        if product.seen == "mixed":
            inside = mask[part]
        times[part] += inside
    return times


def positions(chunks: tuple[range, ...]) -> torch.Tensor:
    return torch.tensor([p for chunk in chunks for p in chunk])


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_every_score_once(causal: bool, window: int | None, order: ContextOrder) -> None:
    rule = Rule(causal, window)
    ids = torch.tensor([[i // 5 for i in range(LENGTH)], [i % 3 // 2 for i in range(LENGTH)]])
    for cp, tile, packed in itertools.product((1, 2, 3), (1, 2, 5), (False, True)):
        layout = ContextLayout(LENGTH, cp, order)
        chunk = layout.local // 2
        documents = Documents(ids, layout.padded, chunk, min(tile, chunk)) if packed else None
        for rank, source in itertools.product(range(cp), repeat=2):
            rows, columns = layout.chunks(rank), layout.chunks(source)
            i, j = positions(rows), positions(columns)
            distance = i[:, None] - j
            seen = (distance >= 0) | torch.tensor(not causal)
            if window is not None:
                seen = seen & (distance.abs() < window)
            seen = seen.expand(2, *distance.shape)
            if documents is None:
                found = list(plan.products(rows, columns, rule, tile))
            else:
                seen = seen & (documents.ids[:, i, None] == documents.ids[:, None, j])
                size = min(tile, chunk)
                found = plan.products_of_documents(rows, columns, rule, size, documents.together)
            mask = seen_mask(i, j, rule, documents, layout.padded)
            whole = torch.ones_like(seen) if mask is None else mask[:, 0].expand_as(seen)
            for one, hidden in zip(seen, whole, strict=True):
                assert torch.equal(seen_by_plan(found, i, j, hidden), one.long())


def test_causal_zigzag_is_one_product_a_hop_and_balanced() -> None:
    layout = ContextLayout(64, 4)
    for rank in range(4):
        areas = []
        for source in range(4):
            [product] = plan.products(
                layout.chunks(rank), layout.chunks(source), Rule(True, None), 8
            )
            (top, bottom), (left, right) = product.rows, product.columns
            areas.append((bottom - top) * (right - left) // (2 if product.seen == "causal" else 1))
        assert areas == [layout.local**2 // 2] * 4


def test_a_window_leaves_out_tiles() -> None:
    layout = ContextLayout(64, 1)
    found = plan.products(layout.chunks(0), layout.chunks(0), Rule(True, 4), 4)
    computed = sum((p.rows[1] - p.rows[0]) * (p.columns[1] - p.columns[0]) for p in found)
    assert computed == 4 * 4 * (2 * 16 - 1)


def test_documents_leave_out_tiles() -> None:
    ids = torch.arange(64)[None] // 16
    documents = Documents(ids, 64, 32, 8)
    layout = ContextLayout(64, 1)
    rule, chunks = Rule(True, None), layout.chunks(0)
    found = plan.products_of_documents(chunks, chunks, rule, 8, documents.together)
    computed = sum((p.rows[1] - p.rows[0]) * (p.columns[1] - p.columns[0]) for p in found)
    assert computed == 4 * (16 * 16 - 8 * 8)
    assert all(p.seen != "mixed" for p in found)
