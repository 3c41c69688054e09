"""What attention over a split sequence really sends is what the planner says."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.layers.context_attention.call import ContextCall, context_attend
from lightning_megatron.layers.context_choice import AttentionSizes, Kind, cost
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

CASES: dict[str, tuple[Kind, AttentionSizes, int | None]] = {}
for cp, heads, kv_heads in ((2, 4, 2), (4, 8, 2)):
    sizes = AttentionSizes(
        cp=cp, heads=heads, kv_heads=kv_heads, head_dim=8, length=96, batch=2, element_bytes=4
    )
    CASES |= {f"{kind}, cp={cp}": (kind, sizes, None) for kind in ("ring", "gather", "ulysses")}
CASES["ring of groups"] = ("ring", sizes, 2)
CASES["window"] = ("ring", dataclasses.replace(sizes, window=20, order="contiguous"), None)


def _sent(kind: Kind, sizes: AttentionSizes, ulysses: int | None) -> tuple[int, int]:
    """Bytes that this rank sends forward and backward, by its meter."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = ContextConfig(degree=sizes.cp, kind="ring", ulysses=ulysses, order=sizes.order)
    topology = Topology(Degrees(cp=sizes.cp), torch.device("cpu"), context=config)
    layout = topology.context.split(sizes.length)
    q, k, v = (
        torch.randn(sizes.batch, layout.local, heads, sizes.head_dim, requires_grad=True)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    call = ContextCall(layout=layout, kind=kind, window=sizes.window)
    meter = topology.meters["cp"]
    begin = meter.bytes
    y = context_attend(topology.context, call, q, k, v)
    between = meter.bytes
    y.sum().backward()
    return between - begin, meter.bytes - between


def _ranks_per_node(names: list[str]) -> int | None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Topology(Degrees(cp=2, tp=2), torch.device("cpu"), nodes=names).context.ranks_per_node


def test_the_choice_knows_the_nodes(pool):
    assert pool.run(4, _ranks_per_node, ["a", "a", "b", "b"]) == [1] * 4
    assert pool.run(4, _ranks_per_node, ["a"] * 4) == [2] * 4


@pytest.mark.parametrize("name", CASES)
def test_bytes(pool, name):
    kind, sizes, ulysses = CASES[name]
    expected = cost(kind, sizes, ulysses=ulysses)
    found = pool.run(sizes.cp, _sent, kind, sizes, ulysses)
    # In contiguous order the last ranks send less, as nobody comes after them.
    assert max(forward for forward, _ in found) == expected.forward_bytes
    assert max(backward for _, backward in found) == expected.backward_bytes
