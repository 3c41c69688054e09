"""Rotary position embedding (Su et al., arXiv 2104.09864).

Each pair of channels ``(i, i + d/2)`` of a query or key turns by ``position * base^(-2i/d)``, so
that their product depends on the distance between them. The pairing is that of GPT-NeoX and of the
Llama weights on the Hugging Face hub, and the angles are float32 whatever the model's dtype,
because models in circulation were trained with those.

The table of cosines and sines is computed when it is needed and kept in an ordinary attribute, not
in a buffer: a buffer would be created on the meta device, be lost there, and have to be excluded
from checkpoints. The rotation is one autograd node for queries and keys together; its gradient is
the rotation by the negative angle.

Legend: b batch, s sequence, n heads, d head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Rotary:
    """Rotates queries and keys by their positions; may be shared by all blocks of a model.

    Args:
        head_dim: size of each head; even.
        base: the slowest frequency is ``1 / base`` (nearly).
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        self.head_dim = head_dim
        self.base = base
        self._key: tuple[int, torch.device, torch.dtype] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, q_bsnd: Tensor, k_bsnd: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate.

        Args:
            q_bsnd: queries.
            k_bsnd: keys; may have fewer heads.
            positions: ``[s]`` or ``[b, s]``; ``0 .. s - 1`` when None.
        """
        if positions is None:
            cos, sin = self._cached(q_bsnd.shape[1], q_bsnd.device, q_bsnd.dtype)
        else:
            cos, sin = self._angles(positions, q_bsnd.dtype)
        q, k = _apply_rotation(q_bsnd, k_bsnd, cos, sin)
        return q, k

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the table behind."""
        return {**self.__dict__, "_key": None, "_tables": None}

    def _cached(
        self, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        key = (length, device, dtype)
        if self._tables is None or self._key != key:
            # Tables made under inference_mode could not be saved for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._tables = self._angles(torch.arange(length, device=device), dtype)
            self._key = key
        return self._tables

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines ``[(b,) s, 1, d]`` and, of half the channels, sines ``[(b,) s, 1, d/2]``."""
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=positions.device)
        frequencies = 1.0 / (self.base ** (steps.to(torch.float32) / self.head_dim))
        angles = (positions.to(torch.float32).unsqueeze(-1) * frequencies).unsqueeze(-2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), sin


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, cos, sin, 1), _rotate(k, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dq, cos, sin, -1), _rotate(dk, cos, sin, -1), None, None


_apply_rotation: Callable[..., tuple[Tensor, Tensor]] = _Rotate.apply


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = x * cos
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-sign)
    out_second.addcmul_(first, sin, value=sign)
    return out
