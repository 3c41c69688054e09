"""Memory of gradients and gathers, counted as it comes and goes.

One rank runs, among peers that answer at once (torch's process group ``fake``): what is alive is
what it would be with them. That the instrument finds what it is for is tested as well: each planted
fault breaks a bound.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.zero import grad_buckets, row_gather
from lightning_megatron.zero.grad_buckets import GradientBuckets, ReductionGroups
from lightning_megatron.zero.owned_rows import OwnedRows
from lightning_megatron.zero.row_gather import RowGather
from tests.comm.fake_world import fake_world
from tests.zero.live_bytes import LiveBytes

WIDTH, LAYERS, RANKS = 64, 12, 4
LAYER = WIDTH * WIDTH * 4
"""Bytes of the one parameter of a layer."""
BUCKET = 2 * LAYER
ALL = LAYERS * LAYER
SMALL = 40 * WIDTH * 4
"""Bytes for activations of one sample, and for flags."""


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with fake_world(1, RANKS) as world:
        yield world


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)


def most_in_backward(group: dist.ProcessGroup, *, rows: bool, microbatches: int = 1) -> int:
    """Most bytes that are alive in the backwards of a batch, beside the parameters."""
    layers = network()
    parameters = list(layers.parameters())
    reducer = GradientBuckets(
        parameters,
        dict.fromkeys(parameters, ReductionGroups(everyone=group, shard=group if rows else None)),
        rows={p: OwnedRows(p, RANKS, 1) for p in parameters},
        bucket_bytes=BUCKET,
        alone=True,
    )
    with LiveBytes(besides=parameters) as live:
        for number in range(microbatches):
            reducer.arm(last=number + 1 == microbatches)
            layers(torch.ones(1, WIDTH)).sum().backward()
            reducer.finish()
        reducer.settle()
    reducer.close()
    return live.most


def most_in_gather(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> int:
    """Most bytes that are alive in the gather after a step, beside the parameters."""
    layers = network(dtype)
    rows = [OwnedRows(p, RANKS, 1) for p in layers.parameters()]
    gather = RowGather(group, bucket_bytes=BUCKET)
    with LiveBytes(besides=list(layers.parameters())) as live, torch.no_grad():
        gather.gather(rows)
    return live.most


ROWS = ALL // RANKS + 3 * BUCKET + LAYER + SMALL
WHOLE = ALL + BUCKET + LAYER + SMALL
GATHER = 2 * BUCKET + SMALL


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_of_owners_need_three_buckets(
    group: dist.ProcessGroup, microbatches: int
) -> None:
    """Beside the rows: ZeRO 2 keeps no whole gradient, in no backward and no later forward."""
    assert most_in_backward(group, rows=True, microbatches=microbatches) <= ROWS


def test_whole_gradients_have_no_second_copy(group: dist.ProcessGroup) -> None:
    assert most_in_backward(group, rows=False) <= WHOLE


def test_a_gather_needs_two_buckets(group: dist.ProcessGroup) -> None:
    assert most_in_gather(group) <= GATHER


def test_where_ranks_meet_no_backward_waits_for_a_bucket(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that leaves a parameter unused starts its bucket behind what others do before."""
    in_backward: list[bool] = []

    class Late:
        """A work of which a peer has not begun its part."""

        def is_completed(self) -> bool:
            return False

        def wait(self) -> None:
            in_backward.append(Within.now)

    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Late())

    class Within(torch.autograd.Function):
        """Marks the backward while it runs."""

        now = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Within.now = True
            return grad

    for meets in (True, False):
        layers = network()
        parameters = list(layers.parameters())
        reducer = GradientBuckets(
            parameters,
            dict.fromkeys(parameters, ReductionGroups(everyone=group)),
            bucket_bytes=BUCKET,
            meets=meets,
        )
        in_backward.clear()
        reducer.arm()
        Within.apply(layers(torch.ones(1, WIDTH))).sum().backward()
        Within.now = False
        reducer.finish()
        assert len(in_backward) == LAYERS // 2
        assert any(in_backward) is not meets


Fault = Callable[[pytest.MonkeyPatch], Any]
KEPT: list[Tensor] = []


def many_under_way(patch: pytest.MonkeyPatch) -> None:
    """Nothing is taken in before the backward has ended."""
    patch.setattr(grad_buckets, "IN_FLIGHT", LAYERS)


def sent_is_kept(patch: pytest.MonkeyPatch) -> None:
    """What was sent stays when it has arrived."""
    original = GradientBuckets._add_part

    def keeps(self: GradientBuckets, bucket: Any) -> None:
        KEPT.append(bucket.sent)
        original(self, bucket)

    patch.setattr(GradientBuckets, "_add_part", keeps)


def gradients_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Whole gradients stay beside the rows."""
    original = OwnedRows.parts_of

    def keeps(self: OwnedRows, tensor: Tensor) -> Tensor:
        KEPT.append(tensor)
        return original(self, tensor)

    patch.setattr(OwnedRows, "parts_of", keeps)


def second_copy(patch: pytest.MonkeyPatch) -> None:
    """``.grad`` stays where it is while a copy of it is summed."""
    patch.setattr(grad_buckets, "_is_gradient_of", lambda *_: False)


def second_copy_until_taken_in(patch: pytest.MonkeyPatch) -> None:
    """The local gradients stay somewhere else until the sum is there."""
    original = GradientBuckets._start_sum

    def keeps(self: GradientBuckets, bucket: Any, flags: Tensor) -> None:
        KEPT.extend(p.grad for p in bucket.members)
        original(self, bucket, flags)

    patch.setattr(GradientBuckets, "_start_sum", keeps)


def all_gathered_at_once(patch: pytest.MonkeyPatch) -> None:
    """All buckets of a gather are started before any is written."""
    patch.setattr(row_gather, "IN_FLIGHT", LAYERS)


def received_is_kept(patch: pytest.MonkeyPatch) -> None:
    """What was gathered stays when it has been written."""
    original = RowGather._finish

    def keeps(self: RowGather, bucket: Any) -> None:
        KEPT.append(bucket.received)
        original(self, bucket)

    patch.setattr(RowGather, "_finish", keeps)


def parts_are_widened(patch: pytest.MonkeyPatch) -> None:
    """Rows are sent from a copy of the whole parameter."""
    original = RowGather._start

    def copies(self: RowGather, bucket: Any) -> None:
        KEPT.extend(rows.parameter.detach().clone() for rows in bucket.members)
        original(self, bucket)

    patch.setattr(RowGather, "_start", copies)


@pytest.mark.parametrize(
    ("fault", "run", "bound"),
    [
        (many_under_way, lambda g: most_in_backward(g, rows=True, microbatches=3), ROWS),
        (sent_is_kept, lambda g: most_in_backward(g, rows=True), ROWS),
        (gradients_are_kept, lambda g: most_in_backward(g, rows=True), ROWS),
        (second_copy, lambda g: most_in_backward(g, rows=False), WHOLE),
        (second_copy_until_taken_in, lambda g: most_in_backward(g, rows=False), WHOLE),
        (all_gathered_at_once, most_in_gather, GATHER),
        (received_is_kept, most_in_gather, GATHER),
        (parts_are_widened, most_in_gather, GATHER),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_finds(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    run: Callable[[dist.ProcessGroup], int],
    bound: int,
) -> None:
    """The instrument finds each planted fault."""
    fault(monkeypatch)
    try:
        assert run(group) > bound
    finally:
        KEPT.clear()
