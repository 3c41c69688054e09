"""Stochastic rounding of bfloat16 weights, by which small updates count on average.

A bfloat16 has 8 significant bits: an update of less than 1/512 of a weight is rounded away, and
late in training most are that small. Rounded *stochastically*, up with the probability by which the
value lies above its lower neighbour, the weight moves by the update in expectation (Gupta et al.,
arXiv 1502.02551; for bfloat16 weights Zamirai et al., arXiv 2010.06192).

The optimizer steps on float32 copies of this rank's shards, which exist during the step only,
with gradients and its own state in float32; the result is rounded into the weights. In bytes
per parameter: 2, and with AdamW 8 of state; ``bf16-true`` has 2 and 4, ``bf16-mixed`` 4 and 8.

The random bits depend on (seed, parameter, step, position of the shard). So ranks that hold the
same weights round them alike, and a resumed run rounds like one that never stopped. Like dropout
masks the bits depend on the layout.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 values to bfloat16, up or down at random, right on average."""
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    # Of the same bits the upper half is the bfloat16 below (in magnitude): a random lower half
    # carries over as often as the lower half is large.
    bits = (x.contiguous().view(torch.int32) + noise) & ~0xFFFF
    return bits.view(torch.float32).to(torch.bfloat16)


@contextmanager
def widened(
    optimizer: Optimizer, generator_of: Callable[[Tensor], torch.Generator | None]
) -> Iterator[None]:
    """Context in which the optimizer holds float32 copies of its bfloat16 tensors.

    Args:
        optimizer: element-wise optimizer that holds plain tensors.
        generator_of: function that returns the generator for rounding one of its tensors.
    """
    own, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    wide = {p: _wide(p) for members in own for p in members if p.dtype == torch.bfloat16}
    optimizer.state = defaultdict(dict)
    for tensor, values in state.items():
        held: Any = wide.get(tensor, tensor)
        optimizer.state[held] = _in_float32(values) if tensor in wide else values
    for group, members in zip(optimizer.param_groups, own, strict=True):
        group["params"] = [wide.get(p, p) for p in members]
    try:
        yield
        with torch.no_grad():
            for tensor, copy in wide.items():
                tensor.copy_(round_stochastically(copy.detach(), generator_of(tensor)))
    finally:
        narrow = {copy: tensor for tensor, copy in wide.items()}
        state.clear()
        for held, values in optimizer.state.items():
            state[narrow.get(held, held)] = values
        optimizer.state = state
        for group, members in zip(optimizer.param_groups, own, strict=True):
            group["params"] = members


def _wide(tensor: Tensor) -> nn.Parameter:
    copy = nn.Parameter(tensor.detach().float(), requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        copy.grad = tensor.grad.float()
    return copy


def _in_float32(values: Mapping[str, Any]) -> dict[str, Any]:
    """State converted to float32; a checkpoint may have stored it in bfloat16."""
    return {
        k: v.float() if isinstance(v, Tensor) and v.dtype == torch.bfloat16 else v
        for k, v in values.items()
    }
