"""Operations of a network are counted alike however its sequences are split."""

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.layers import CausalSelfAttention
from lightning_megatron.layers.context_split import SplitContext
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.monitoring.flops import OperationCounter
from lightning_megatron.testing import WorkerPool
from tests.layers.context import context_topology, on_context


def attending() -> PipelineSequential:
    torch.manual_seed(0)
    return PipelineSequential(SplitContext(), CausalSelfAttention(16, 4, num_kv_heads=2)).double()


def operations(trunk: nn.Module) -> int:
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    counter = OperationCounter()
    counter.start()
    y: Tensor = trunk(x)
    y.sum().backward()
    counter.stop()
    return counter.flops


def counted_job(kind: str) -> int:
    topology = context_topology(2, kind=kind)
    return operations(on_context(attending(), topology))


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_attention_over_cp_counts_like_that_of_one_process(pool: WorkerPool, kind: str) -> None:
    assert sum(pool.run(2, counted_job, kind)) == operations(attending())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_of_experts_count_by_rows_however_they_are_computed(dtype: torch.dtype) -> None:
    """In float32 by the grouped kernel, in float64 one by one."""
    experts, counts = Experts(4, 16, 32).to(dtype), [3, 0, 5, 1]
    counter = OperationCounter()
    counter.start()
    experts(torch.randn(9, 16, dtype=dtype, requires_grad=True), counts).sum().backward()
    counter.stop()
    assert counter.flops == 3 * 3 * 2 * sum(counts) * 16 * 32
