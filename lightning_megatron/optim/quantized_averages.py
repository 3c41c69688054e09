"""Optimizers whose moving averages rest in few bits between steps (`optim.quantized_state`).

A step reads the averages of a parameter in float32, changes them and stores them again. Checkpoints
hold them in float32, under the names that the same optimizer with plain state uses, so that a run
can go on in another format, and, where the names are the same, with another optimizer.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.quantized_state import Narrow, StateFormat, generator_for, narrow
from lightning_megatron.optim.shard_spec import Piece


def format_problems(state_dtype: Any) -> list[str]:
    """What is wrong with the name of a format, if there is one."""
    if state_dtype is None or state_dtype in get_args(StateFormat):
        return []
    return [
        f"state_dtype={state_dtype!r}: must be one of {get_args(StateFormat)}; "
        "nearest valid: 'bfloat16'"
    ]


class NarrowState(Optimizer):
    """What such optimizers share."""

    averages: ClassVar[Mapping[str, bool]] = {}
    """Keys of the averages in the state of a parameter, and whether they have a sign. In int8 what
    is stored of one without (a second moment) is its root, which halves the range that the table
    must span."""
    _format: StateFormat | None = None
    _names: Mapping[Tensor, str] = {}

    def keep_in(self, state_dtype: StateFormat | None, instead: str) -> None:
        """Set the format of the averages; None: plain tensors in that of the parameters.

        Args:
            state_dtype: the format.
            instead: what to use for parameters in float64.

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

    def use_pieces(self, pieces: Mapping[Tensor, Piece]) -> None:
        """Learn the parameters' names (`optim.shard_spec.KnowsPieces`)."""
        self._names = {p: piece.name for p, piece in pieces.items()}

    def opened(self, p: Tensor, keys: Iterable[str]) -> tuple[int, dict[str, Tensor]]:
        """Begin the step of a parameter: its number, and the averages in float32.

        Raises:
            ConfigError: some of them are missing, as in what another optimizer has saved.
        """
        state, keys = self.state[p], tuple(keys)
        state.setdefault("step", torch.zeros(()))
        missing = [key for key in keys if key not in state]
        if 0 < len(missing) < len(keys):
            raise ConfigError(
                f"{type(self).__name__}: the state of {self._name(p)!r} has no {missing[0]!r}, so "
                "another optimizer has left it; nearest valid: the optimizer that wrote the "
                "checkpoint, or its weights alone"
            )
        for key in missing:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update(self._stored({key: zeros}, None))
        state["step"] += 1
        return int(state["step"]), self._values(state)

    def close(self, p: Tensor, values: Mapping[str, Tensor]) -> None:
        """End it: store the averages."""
        state = self.state[p]
        generator = generator_for(self._name(p), int(state["step"]), p.device)
        state.update(self._stored(values, generator))

    def wide_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter as checkpoints hold it, in float32 where it is narrow."""
        if self._format is None:
            return dict(state)
        scales = {f"{key}_scale" for key in self.averages}
        return {k: v for k, v in state.items() if k not in scales} | self._values(state)

    def narrow_state(self, state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """What `wide_state` gave, of this or of an optimizer with the same averages.

        Args:
            state: of one parameter.
            dtype: of the parameter.
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
                value = Narrow(state[key], state.get(f"{key}_scale"), signed).wide()
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
            kept = narrow(root, self._format, signed=signed, generator=generator)
            stored[key] = kept.codes
            if kept.scales is not None:
                stored[f"{key}_scale"] = kept.scales
        return stored
