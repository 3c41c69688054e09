"""Optimizer state in 2 bytes or 1 byte an element.

A step reads the moving averages of a parameter in float32, changes them and stores them quantized
(`QuantizedStateOptimizer`, the base class of such optimizers).

``bfloat16`` keeps 8 significant bits, ``int8`` 256 values beside one scale for 256 elements
(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861): the largest
magnitude of a block is its scale, and an element is stored as the place of its share of it in a
fixed table. The table is dense near zero: powers of ten down to 1e-6, each divided evenly, so that
the small elements of a block with one outlier survive.

Moving averages change by less than a step of either format: ``v * 0.999`` rounds to ``v`` in
bfloat16. Rounded to the nearest they would never change, so they are rounded up or down at random,
with the probabilities that make the result right on average. The random numbers depend on the
parameter's name and the step, so ranks that hold copies stay equal to the bit.

Blocks run along the elements that a rank holds, so they depend on the layout. Checkpoints therefore
hold float32 values, under the names that the same optimizer with plain state uses. Loading under
the same layout restores every bit; under another layout the state is rounded once, to the nearest.
A run can resume in another format and, where the names are the same, with another optimizer.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.shard_spec import ShardSpec

StateFormat = Literal["float32", "bfloat16", "int8"]
BLOCK = 256
"""Number of elements that share a scale."""


@cache
def table(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 values in [-1, 1] (in [0, 1] if not signed) that int8 codes stand for, in order."""
    count = 127 if signed else 255
    decades, shares = 7, [1.0]
    for decade in range(decades):  # more shares in the upper decades: 2 parts of each to the next
        part = count * 2 ** (decades - 1 - decade) / (2**decades - 1)
        inner = max(round(part), 2)
        top = 10.0**-decade
        shares += [top - (top - top / 10) * (i + 1) / inner for i in range(inner)]
    shares = sorted(set(shares), reverse=True)[: count if signed else 255]
    positive = sorted(shares)
    values = [-s for s in reversed(positive)] + [0.0, *positive] if signed else [0.0, *positive]
    return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class QuantizedTensor:
    """Tensor in bfloat16, or in int8 with scales."""

    codes: Tensor
    """Values (bfloat16) or positions in the table (uint8), in the tensor's shape."""
    scales: Tensor | None
    """Largest magnitude of each block of the flattened tensor; None for bfloat16."""
    signed: bool
    """Whether the table has negative values."""

    def dequantize(self) -> Tensor:
        """Return the values in float32."""
        if self.scales is None:
            return self.codes.float()
        shares = table(self.codes.device, signed=self.signed)[self.codes.reshape(-1).int()]
        scales = self.scales.repeat_interleave(BLOCK)[: shares.numel()]
        return (shares * scales).view(self.codes.shape)


def quantize(
    values: Tensor, kind: StateFormat, *, signed: bool, generator: torch.Generator | None = None
) -> QuantizedTensor:
    """Quantize float32 ``values``, rounded at random if a generator is given, else to nearest."""
    if kind == "bfloat16":
        return QuantizedTensor(_to_bfloat16(values, generator), None, signed)
    flat = values.reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    padded = torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK)
    scales = padded.abs().amax(1)
    least = torch.finfo(torch.float32).tiny
    shares = (padded / scales.clamp(min=least)[:, None]).view(-1)[: flat.numel()].contiguous()
    values_of = table(values.device, signed=signed)
    above = torch.searchsorted(values_of, shares).clamp_(1, len(values_of) - 1)
    low, high = values_of[above - 1], values_of[above]
    part = (shares - low) / (high - low)
    threshold = 0.5 if generator is None else _uniform(shares, generator)
    up = part > threshold
    if not signed:  # a second moment that is rounded to nothing would divide by nothing
        up |= (above == 1) & (shares > 0)
    codes = (above - 1 + up).to(torch.uint8).view(values.shape)
    return QuantizedTensor(codes, scales, signed)


def generator_for(name: str, step: int, device: torch.device) -> torch.Generator:
    """Generator whose numbers depend only on the parameter's name and the step."""
    digest = hashlib.sha256(f"{name}/{step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def state_dtype_problems(state_dtype: Any) -> list[str]:
    """Problems of the option ``state_dtype``."""
    if state_dtype is None or state_dtype in get_args(StateFormat):
        return []
    return [
        f"state_dtype={state_dtype!r}: must be one of {get_args(StateFormat)}; "
        "nearest valid: 'bfloat16'"
    ]


class QuantizedStateOptimizer(Optimizer):
    """Optimizer whose moving averages are quantized between steps."""

    averages: ClassVar[Mapping[str, bool]] = {}
    """Keys of the averages in the state of a parameter, and whether they have a sign. An average
    without a sign (a second moment) is stored in int8 as its root, which halves the range that the
    table must span."""
    _format: StateFormat | None = None
    _names: Mapping[Tensor, str] = {}

    def set_state_dtype(self, state_dtype: StateFormat | None, instead: str) -> None:
        """Set the number format of the averages; None: plain tensors in that of the parameters.

        Args:
            state_dtype: number format.
            instead: remedy for parameters in float64.

        Raises:
            ConfigError: steps are computed in float32, and parameters are in float64.
        """
        self._format = state_dtype
        members = [p for group in self.param_groups for p in group["params"]]
        if state_dtype is not None and any(p.dtype == torch.float64 for p in members):
            raise ConfigError(
                f"{type(self).__name__}(state_dtype={state_dtype!r}) computes in float32, but "
                f"parameters are in float64; nearest valid: {instead}"
            )

    def set_shard_specs(self, specs: Mapping[Tensor, ShardSpec]) -> None:
        """Store the parameters' names (`optim.shard_spec.ShardAware`)."""
        self._names = {p: spec.name for p, spec in specs.items()}

    def begin_update(self, p: Tensor, keys: Iterable[str]) -> tuple[int, dict[str, Tensor]]:
        """Begin the update of a parameter; returns the step and the averages in float32.

        Raises:
            ConfigError: some averages are missing, as in a checkpoint of another optimizer.
        """
        state, keys = self.state[p], tuple(keys)
        state.setdefault("step", torch.zeros(()))
        missing = [key for key in keys if key not in state]
        if 0 < len(missing) < len(keys):
            raise ConfigError(
                f"{type(self).__name__}: the state of {self._name(p)!r} has no {missing[0]!r}, so "
                "another optimizer has saved it; nearest valid: the optimizer that wrote the "
                "checkpoint, or its weights alone"
            )
        for key in missing:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update(self._stored({key: zeros}, None))
        state["step"] += 1
        return int(state["step"]), self._values(state)

    def end_update(self, p: Tensor, values: Mapping[str, Tensor]) -> None:
        """End the update of a parameter: store the averages."""
        state = self.state[p]
        generator = generator_for(self._name(p), int(state["step"]), p.device)
        state.update(self._stored(values, generator))

    def dequantized_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of one parameter as checkpoints hold it, with averages in float32."""
        if self._format is None:
            return dict(state)
        scales = {f"{key}_scale" for key in self.averages}
        return {k: v for k, v in state.items() if k not in scales} | self._values(state)

    def requantized_state(self, state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """State of one parameter, from the `dequantized_state` of an optimizer with these averages.

        Args:
            state: state of the parameter.
            dtype: number format of the parameter.
        """
        averages = {key: state[key] for key in self.averages if key in state}
        if self._format is None:
            return {**state, **{key: value.to(dtype) for key, value in averages.items()}}
        wide = {key: value.float() for key, value in averages.items()}
        return {**state, **self._stored(wide, None)}

    def _name(self, p: Tensor) -> str:
        if p not in self._names:  # trained without the strategy
            members = [member for group in self.param_groups for member in group["params"]]
            places = {member: str(place) for place, member in enumerate(members)}
            self._names = {**places, **self._names}
        return self._names[p]

    def _values(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        values = {}
        for key, signed in self.averages.items():
            if key in state:
                value = QuantizedTensor(state[key], state.get(f"{key}_scale"), signed).dequantize()
                values[key] = value if signed or self._format != "int8" else value.square_()
        return values

    def _stored(
        self, values: Mapping[str, Tensor], generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        assert self._format is not None
        if self._format == "float32":
            return {key: value.clone() for key, value in values.items()}
        stored = {}
        for key, value in values.items():
            signed = self.averages[key]
            root = value if signed or self._format != "int8" else value.sqrt()
            kept = quantize(root, self._format, signed=signed, generator=generator)
            stored[key] = kept.codes
            if kept.scales is not None:
                stored[f"{key}_scale"] = kept.scales
        return stored


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)


def _to_bfloat16(values: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return values.to(torch.bfloat16)
    # The lower 16 bits of a float32 are what bfloat16 lacks: add as many at random, then cut.
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
