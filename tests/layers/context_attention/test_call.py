"""Attention over a split sequence gives one process's numbers, whichever way it exchanges."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.context_attention.call import ContextCall, context_attend
from lightning_megatron.layers.context_choice import Kind
from lightning_megatron.parallel.activations.selective import (
    Recording,
    Replaying,
    SavedResults,
    kept_operations,
)
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context import Context
from tests.comm import lockstep
from tests.layers.context_attention.jobs import (
    Case,
    call_of,
    cut,
    inputs_of,
    make_context,
    rounding,
    rounding_over,
    run_cases,
)

KINDS: tuple[Kind, ...] = ("ring", "gather", "ulysses")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def pairs(kind: Kind) -> list[Case]:
    """Each option with others, once."""
    many = [
        Case(kind, 96),
        Case(kind, 1, heads=(4, 4)),
        Case(kind, 2, documents="halves"),
        Case(kind, 5, causal=False, heads=(4, 1)),
        Case(kind, 61, causal=False),
        Case(kind, 61, window=1),
        Case(kind, 61, window=7, documents="packed"),
        Case(kind, 61, window=7, causal=False, heads=(4, 1)),
        Case(kind, 61, window=64, dtype=torch.float32),
        Case(kind, 61, documents="each", heads=(4, 4)),
        Case(kind, 61, documents="back", causal=False),
        Case(kind, 61, documents="one", dtype=torch.float32),
        Case(kind, 61, alibi=True, documents="packed"),
        Case(kind, 61, key_length=33, causal=False),
        Case(kind, 33, key_length=2, causal=False),
        Case(kind, 61, reference=True, window=7),
    ]
    if kind != "ring":
        many += [
            Case(kind, 61, mask="bool", causal=False),
            Case(kind, 61, mask="bool heads", documents="packed"),
            Case(kind, 61, mask="added heads", window=7, alibi=True),
            Case(kind, 61, mask="added", key_length=33, causal=False),
        ]
    return many


def every(kind: Kind, heads: tuple[int, int]) -> list[Case]:
    """All options by all lengths and numbers of heads."""
    return [
        Case(kind, length, causal, window, documents, heads=(heads[0], kv_heads), dtype=dtype)
        for length in (1, 2, 5, 61, 96, 700)
        for causal in (True, False)
        for window in (None, 1, 7, 64, 300)
        for documents in (None, "one", "halves", "packed")
        for kv_heads in {1, heads[1], heads[0]}
        for dtype in ((torch.float64, torch.float32) if length == 61 else (torch.float64,))
    ]


def exact(by_rank: list[list[tuple[Case, float]]]) -> None:
    for found in by_rank:
        assert [(case, error) for case, error in found if not error <= TOLERANCE[case.dtype]] == []


def test_numbers_of_one_process_two_ranks(pool: WorkerPool) -> None:
    exact(pool.run(2, run_cases, 2, [case for kind in KINDS for case in pairs(kind)]))


@pytest.mark.parametrize(("cp", "order", "ulysses"), [(3, "contiguous", None), (4, "zigzag", 2)])
def test_numbers_of_one_process(pool: WorkerPool, cp: int, order: str, ulysses: int | None) -> None:
    kinds = KINDS[:1] if ulysses else KINDS[:2]
    cases = [
        Case(kind, *sizes, **options)  # type: ignore[arg-type]
        for kind in kinds
        for sizes, options in (
            ((96,), {}),
            ((5,), {"documents": "halves"}),
            ((61,), {"causal": False}),
            ((61,), {"window": 7, "heads": (4, 4)}),
            ((61,), {"window": 30, "documents": "packed"}),
            ((61,), {"window": 30, "causal": False}),
            ((61,), {"key_length": 33, "causal": False}),
        )
    ]
    exact(pool.run(cp, run_cases, cp, cases, order, ulysses))


@pytest.mark.parametrize("ulysses", [None, 4])
def test_numbers_of_one_process_on_sixteen_ranks(ulysses: int | None) -> None:
    """Some ranks hold padding alone."""
    cases = [Case("ring"), Case("ring", documents="packed", window=30)]
    if ulysses is None:
        cases += [Case("gather", 33, causal=False), Case("ulysses", heads=(16, 2))]
    exact(lockstep.run(16, run_cases, 16, cases, "zigzag", ulysses))


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("cp", "ulysses"), [(2, None), (3, None), (4, None), (4, 2), (4, 4)])
def test_numbers_of_one_process_in_every_way(
    pool: WorkerPool, cp: int, ulysses: int | None, order: str
) -> None:
    heads = (6, 2) if cp == 3 else (4, 2)
    for kind in KINDS[:1] if ulysses else KINDS:
        exact(pool.run(cp, run_cases, cp, every(kind, heads), order, ulysses))


def test_bfloat16_rounds_as_on_one_device(pool: WorkerPool) -> None:
    for kind, cp in (("ring", 4), ("gather", 2), ("ulysses", 2)):
        case = Case(kind, 256, dtype=torch.bfloat16, dim=16)  # type: ignore[arg-type]
        alone = rounding(case)
        by_rank = pool.run(cp, rounding_over, cp, case)
        for number, limit in enumerate(alone):
            squares, numbers = zip(*(rank[number] for rank in by_rank), strict=True)
            assert math.sqrt(sum(squares) / sum(numbers)) <= 1.5 * limit, (kind, number)


def _probe(kind: Kind) -> list[float]:
    """Sizes of the gradients of the last output with respect to the first keys and values."""
    context, case = make_context(2).context, Case(kind, 13)
    q, k, v, _ = inputs_of(case)
    call = call_of(case, context)
    leaves = [cut(x, call.layout, context.cp.rank).requires_grad_() for x in (q, k, v)]
    out = context_attend(context, call, *leaves)
    grad = torch.zeros(case.batch, case.length, *out.shape[2:], dtype=out.dtype)
    grad[:, -1] = 1.0
    padded = cut(grad, call.layout, context.cp.rank)
    padded[padded == 3.0] = 0.0
    out.backward(padded)
    return [float(x.grad[:, 0].abs().max()) for x in leaves[1:]]  # type: ignore[index]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_position_learns_from_the_first(pool: WorkerPool, kind: Kind) -> None:
    # Rank 0 holds the first position and, in zig-zag order, the last one; rank 1 neither.
    assert min(pool.run(2, _probe, kind)[0]) > 1e-6


def _bytes(cp: int, cases: Sequence[Case], order: str = "zigzag") -> list[tuple[int, int]]:
    """Bytes that a rank sends in each case, forward and backward."""
    context = make_context(cp, order).context
    meter, found = context.cp.meter, []
    for case in cases:
        call = call_of(case, context)
        q, k, v, g = (cut(x, call.layout, context.cp.rank) for x in inputs_of(case))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        before = meter.bytes
        out = context_attend(context, call, *leaves)
        between = meter.bytes
        out.backward(g)
        found.append((between - before, meter.bytes - between))
    return found


def test_bytes_are_those_of_the_formulas(pool: WorkerPool) -> None:
    b, d, p, a = 2, 16, 4, 4
    cases, expected = [], []
    for dtype in (torch.float32, torch.bfloat16):
        e = dtype.itemsize
        for heads, kv_heads in ((4, 2), (4, 4), (8, 1)):
            n, block = 64 // p, 2 * b * (64 // p) * kv_heads * d
            passed = block * e * (p - 1), block * (e + a) * (p - 1)
            one_way = 2 * b * n * d * e * (heads + math.lcm(kv_heads, p)) * (p - 1) // p
            cases += [
                Case(kind, 64, heads=(heads, kv_heads), dtype=dtype, dim=d, batch=b)
                for kind in KINDS
            ]
            expected += [passed, passed, (one_way, one_way)]  # ring, gather, ulysses
    assert pool.run(p, _bytes, p, cases) == [expected] * p


def test_a_window_needs_its_neighbours_only(pool: WorkerPool) -> None:
    case = Case("ring", 64, window=17, dtype=torch.float32)
    block = 2 * case.batch * 16 * case.heads[1] * case.dim * 4
    found = [sent for [sent] in pool.run(4, _bytes, 4, [case], "contiguous")]
    # One neighbour, which sends its part of the gradients home.
    assert [forward for forward, _ in found] == [block, block, block, 0]
    assert [backward for _, backward in found] == [block, 2 * block, 2 * block, block]


def _dropout(kind: Kind) -> tuple[list[bool], list[float], Tensor]:
    context = make_context(2).context
    case = Case(kind, 32, dropout=0.4, heads=(2, 2), causal=False, batch=1)
    call = call_of(case, context)
    q, k, v, g = (cut(x, call.layout, context.cp.rank) for x in inputs_of(case))
    u = torch.randn(q.shape, generator=torch.Generator().manual_seed(5), dtype=q.dtype)

    def run(*leaves: Tensor) -> Tensor:
        torch.manual_seed(9)
        return context_attend(context, call, *leaves)

    def total(x: Tensor) -> float:
        x = x.clone()
        torch.distributed.all_reduce(x)
        return float(x)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = run(*leaves)
    again, other = run(*leaves), context_attend(context, call, *leaves)
    out.backward(g)
    distances, h = [], 1e-6
    for i, leaf in enumerate(leaves):
        high, low = (
            run(*(x.detach() + sign * h * u * (j == i) for j, x in enumerate(leaves)))
            for sign in (1, -1)
        )
        slope = total(((high - low).detach() / (2 * h) * g).sum())
        distances.append(abs(slope - total((leaf.grad * u).sum())))  # type: ignore[operator]
    ones = run(torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v))
    return [torch.equal(out, again), torch.equal(out, other)], distances, ones[..., 0].detach()


@pytest.mark.parametrize("kind", ["gather", "ulysses"])
def test_dropout_has_masks_of_its_own(pool: WorkerPool, kind: Kind) -> None:
    by_rank = pool.run(2, _dropout, kind)
    for equal, distances, ones in by_rank:
        assert equal == [True, False]
        assert max(distances) < 1e-7
        assert abs(float(ones.mean()) - 1) < 0.15
        assert float(ones.std()) > 0.01
    assert not torch.equal(by_rank[0][2], by_rank[1][2])


def _kept(kind: Kind) -> tuple[bool, list[int]]:
    """Whether gradients are equal, and bytes that a step sends with and without recomputation."""
    context, case = make_context(2).context, Case(kind, 24)
    call = call_of(case, context)
    q, k, v, g = (cut(x, call.layout, context.cp.rank) for x in inputs_of(case))
    results, sent = [], []
    notes = SavedResults(kept_operations(["context"]))

    def block(*xs: Tensor) -> Tensor:
        return context_attend(context, call, *(2 * x for x in xs)).sin()

    for again in (False, True):
        before = context.cp.meter.bytes
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if again:
            out = checkpoint(
                block,
                *leaves,
                use_reentrant=False,
                context_fn=lambda: (Recording(notes), Replaying(notes)),
            )
        else:
            out = block(*leaves)
        out.backward(g)
        sent.append(context.cp.meter.bytes - before)
        results.append([x.grad for x in leaves])
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return equal, sent


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_result_is_not_exchanged_again(pool: WorkerPool, kind: Kind) -> None:
    for equal, (plainly, kept) in pool.run(2, _kept, kind):
        assert equal
        assert kept == plainly > 0


def _cosine(context: Context, call: ContextCall, *xs: Tensor) -> Tensor:
    return context_attend(context, call, *xs).cos()


def _operator(kinds: Sequence[Kind]) -> list[bool]:
    context = make_context(2).context
    equal = []
    for kind in kinds:
        case = Case(kind, 24, window=9, dtype=torch.float32)
        call = call_of(case, context)
        parts = [cut(x, call.layout, context.cp.rank) for x in inputs_of(case)[:3]]
        run = partial(_cosine, context, call)
        gradients = []
        for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
            leaves = [x.clone().requires_grad_() for x in parts]
            function(*leaves).sum().backward()
            gradients.append([x.grad for x in leaves])
        equal += [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]
    operator = torch.ops.lightning_megatron.context_attention.default
    names = f"{context.key}|ring|zigzag"
    leaves = [x.requires_grad_() for x in parts]
    arguments = *leaves, None, None, None, None, names, [24, 24, 1, 0, 1, 0], [0.0, 0.3]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(operator, arguments, test_utils=tests)
    return equal


@pytest.mark.parametrize(
    "kinds", [("ring",), pytest.param(("gather", "ulysses"), marks=pytest.mark.thorough)]
)
def test_compilers_see_one_operator(pool: WorkerPool, kinds: Sequence[Kind]) -> None:
    for equal in pool.run(2, _operator, kinds):
        assert all(equal)


def _refusals() -> list[str]:
    context = make_context(2).context
    found = []
    for case, change in (
        (Case("ring", dropout=0.1), {}),
        (Case("ring"), {"mask": torch.ones(1, 1, 61, 61)}),
        (Case("ulysses", heads=(3, 1)), {}),
        (Case("gather"), {"mask": torch.ones(1, 1, 61, 61).requires_grad_()}),
        (Case("ring", key_length=33), {}),
    ):
        call = call_of(case, context)
        q, k, v, _ = inputs_of(case)
        keys = call.key_layout or call.layout
        q = cut(q, call.layout, context.cp.rank)
        k, v = (cut(x, keys, context.cp.rank) for x in (k, v))
        with pytest.raises(ConfigError) as error:
            context_attend(context, call, q, k, v, **change)
        found.append(str(error.value))
    return found


def test_what_a_kind_cannot_do(pool: WorkerPool) -> None:
    ring_dropout, ring_mask, heads, learns, causal = pool.run(2, _refusals)[0]
    assert "kind='ring', attention dropout=0.1" in ring_dropout
    assert "nearest valid: kind='gather'" in ring_dropout
    assert "kind='ring', a mask" in ring_mask
    assert "heads of a tp rank=3, cp=2" in heads
    assert "cp=1 or 3" in heads
    assert "mask requires a gradient" in learns
    assert "causal attention of 61 queries to 33 keys" in causal
