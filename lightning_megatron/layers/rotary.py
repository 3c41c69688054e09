"""Rotary position embedding (Su et al., arXiv 2104.09864).

Each pair of channels ``(i, i + d/2)`` of a query or key turns by ``position * base^(-2i/d)``, so
that their product depends on the distance between them. The pairing is that of GPT-NeoX and of the
Llama weights on the Hugging Face hub, and the angles are float32 whatever the model's dtype,
because models in circulation were trained with those.

The table of cosines and sines is computed when it is needed and kept in an ordinary attribute, not
in a buffer: a buffer would be created on the meta device, be lost there, and have to be excluded
from checkpoints. The rotation is one autograd node for queries and keys together; its gradient is
the rotation by the negative angle.

A model that was trained on sequences of length ``L`` reads longer ones when its frequencies are
slowed down (`RopeScaling`). "linear" divides all of them (arXiv 2306.15595). "llama3" (section 3.4
of arXiv 2407.21783, and the reference code of Llama 3.1) keeps frequencies that turn often within
``L``, which tell near neighbours apart, and divides those that turn hardly once. "yarn" (arXiv
2309.00071) does the same with a ramp over the index of the frequency, and enlarges queries and keys
by a factor that grows with the logarithm of the slowdown.

Legend: b batch, s sequence, n heads, d head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.context_rows import own_positions, split


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for sequences longer than those of the training."""

    kind: Literal["linear", "llama3", "yarn"]
    """Rule that selects the frequencies: all (linear), or the slow ones (llama3, yarn)."""
    factor: float
    """Divisor of the frequencies."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with fewer turns in ``original_length`` than this are divided in full."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with more turns than this are kept; between the two, a mixture."""
    original_length: int = 8192
    """llama3, yarn: length of the longest sequence of the training."""
    beta_fast: float = 32.0
    """yarn: frequencies with more turns in ``original_length`` than this are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer turns than this are divided in full."""
    truncate: bool = True
    """yarn: whether the ramp between the two begins and ends at a whole index."""
    attention_factor: float | None = None
    """yarn: factor of rotated queries and keys; ``yarn_mscale(factor)`` when None."""

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        given = self.attention_factor
        return yarn_mscale(self.factor) if given is None else given

    def apply(self, wavelengths: Tensor, base: float) -> Tensor:
        """Return the slower frequencies, in radians per position.

        Args:
            wavelengths: positions of a radian, ``[d/2]``.
            base: base of which they are powers.
        """
        frequencies = 1.0 / wavelengths
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "yarn":
            kept = 1 - self._ramp(len(wavelengths), base).to(wavelengths)
            return 1.0 / (self.factor * wavelengths) * (1 - kept) + frequencies * kept
        turns = self.original_length / (2 * math.pi / frequencies)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies

    def _ramp(self, count: int, base: float) -> Tensor:
        """Share in which each frequency is divided, by its index: from 0 to 1."""

        def index(turns: float) -> float:
            return count * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        if low == high:
            high += 0.001
        return ((torch.arange(count, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Factor of queries and keys whose frequencies are divided by ``factor`` (arXiv 2309.00071).

    DeepSeek-V3 multiplies scores by the square of ``yarn_mscale(factor, mscale_all_dim)``.

    >>> yarn_mscale(40.0)
    1.3688879454113936
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_Key = tuple[int | tuple[ContextLayout, int], torch.device, torch.dtype]
"""Positions of a table, all up to a length or those of a cp rank, its device and format."""


class Rotary:
    """Rotary embedding of queries and keys; all blocks of a model may share one.

    Args:
        head_dim: size of each head; even.
        base: the slowest frequency is ``1 / base`` (nearly).
        scaling: scaling of the frequencies; None for none.
    """

    def __init__(
        self, head_dim: int, base: float = 10_000.0, scaling: RopeScaling | None = None
    ) -> None:
        self.head_dim = head_dim
        self.base = base
        self.scaling = scaling
        self._key: _Key | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(
        self,
        q_bsnd: Tensor,
        k_bsnd: Tensor,
        positions: Tensor | None = None,
        *,
        layout: ContextLayout | None = None,
        rank: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Rotate.

        Args:
            q_bsnd: queries.
            k_bsnd: keys; may have fewer heads.
            positions: ``[s]`` or ``[b, s]`` of the whole sequence; ``0 .. s - 1`` when None.
            layout: split of the sequence of which queries and keys are a part; None if they are
                whole.
            rank: cp rank whose part they are.
        """
        if positions is None:
            held = q_bsnd.shape[1] if layout is None else (layout, rank)
            cos, sin = self._cached((held, q_bsnd.device, q_bsnd.dtype))
        else:
            own = positions if layout is None else split(positions, layout, rank, -1)
            cos, sin = self._angles(own, q_bsnd.dtype)
        q, k = _apply_rotation(q_bsnd, k_bsnd, cos, sin)
        return q, k

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the table, for copies and pickles."""
        return {**self.__dict__, "_key": None, "_tables": None}

    def _cached(self, key: _Key) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            # A graph that fills the table is another one than that which finds it full, but what
            # is computed again in the backward must meet the same. In a graph it is nearly free.
            return self._table(key)
        if self._tables is None or self._key != key:
            # Tables made under inference_mode could not be saved for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._tables = self._table(key)
            self._key = key
        return self._tables

    def _table(self, key: _Key) -> tuple[Tensor, Tensor]:
        held, device, dtype = key
        if isinstance(held, int):
            return self._angles(torch.arange(held, device=device), dtype)
        return self._angles(own_positions(*held, device), dtype)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines ``[(b,) s, 1, d]`` and, of half the channels, sines ``[(b,) s, 1, d/2]``."""
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=positions.device)
        wavelengths = self.base ** (steps.to(torch.float32) / self.head_dim)
        scaling = self.scaling
        frequencies = (
            1.0 / wavelengths if scaling is None else scaling.apply(wavelengths, self.base)
        )
        angles = (positions.to(torch.float32).unsqueeze(-1) * frequencies).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        if scaling is not None and scaling.amplitude != 1.0:
            cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
        cos, sin = cos.to(dtype), sin.to(dtype)
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
