"""The kernels against the formula, in bfloat16, forward and backward."""

from typing import Any

import pytest
import torch

from lightning_megatron.layers.alibi import alibi_slopes
from lightning_megatron.layers.attention_backends import attend, missing
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.packed_documents import documents_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "window": {"window": 100},
    "all positions": {"causal": False},
    "documents": {"documents": documents_of([[100, 284], [384]], 384)},
    "slopes": {"alibi": alibi_slopes(8)},
}


def _run(name: Any, dtype: torch.dtype, options: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dy = (
        torch.randn(2, 384, heads, 64, generator=generator, device="cuda").bfloat16().to(dtype)
        for heads in (8, 2, 2, 8)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    y = attend(name, AttentionCall(q, k, v, **given))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["sdpa", "flash", "flex", "te", "auto"])
def test_kernel_is_the_reference(name: Any, case: str) -> None:
    if missing(name):
        pytest.skip(str(missing(name)))
    if name == "te" and case in ("documents", "slopes"):
        pytest.skip("not in this backend")
    expected = _run("reference", torch.float32, CASES[case])
    found = _run(name, torch.bfloat16, CASES[case])
    # Kernels round the weights to bfloat16 once, and in backward what they make of them again.
    for one, other, limit in zip(found, expected, (0.01, 0.03, 0.03, 0.03), strict=True):
        error = (one.float() - other).norm() / other.norm()
        assert error < limit
