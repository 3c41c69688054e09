"""bfloat16 training: parameters in bfloat16, or bfloat16 copies of float32 parameters.

bfloat16 has the range of float32 and 8 significant bits. ``bf16-true`` keeps parameters and
optimizer state in it, half the memory; an update below 1/512 of a weight is then lost to rounding
(unless it is rounded at random, below). ``bf16-mixed`` keeps float32 parameters,
and gathers and multiplies bfloat16 copies. Both reduce gradients in float32 by default.

*Stochastic rounding.* Late in training most updates are that small. Rounded *stochastically*, up
with the probability by which the value lies above its lower neighbour, the weight moves by the
update in expectation (Gupta et al., arXiv 1502.02551; for bfloat16 weights Zamirai et al., arXiv
2010.06192).

The optimizer steps on float32 copies of this rank's shards, which exist during the step only,
with gradients and its own state in float32; the result is rounded into the weights. In bytes
per parameter: 2, and with AdamW 8 of state; ``bf16-true`` has 2 and 4, ``bf16-mixed`` 4 and 8.

The random bits depend on (seed, parameter, step, position of the shard). So ranks that hold the
same weights round them alike, and a resumed run rounds like one that never stopped. Like dropout
masks the bits depend on the layout.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._torch.dtensor import shard_of
from lightning_megatron.errors import ConfigError, raise_if_any, switches
from lightning_megatron.optim.shard_spec import ShardAware
from lightning_megatron.optim.sharded_step import steps_on_shards
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.topology.rng import derive_seed
from lightning_megatron.zero.data_parallel import ComputeTypes
from lightning_megatron.zero.gradients import GradientSet, ParameterRole


class HalfShardedPrecision(ShardedPrecision, HalfPrecision):
    """Plugin of ``bf16-true``."""

    _fitted: Optimizer | None = None

    @override
    def _around(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        if self._fitted is not optimizer:
            _fit_state(optimizer)
            self._fitted = optimizer
        return super()._around(optimizer)

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(reduction=torch.float32)


def _lent(role: ParameterRole) -> Tensor:
    """Tensor that an optimizer holds in place of a parameter during a step."""
    if role.rows is not None:
        return role.rows.values
    return shard_of(role.parameter) if isinstance(role.parameter, DTensor) else role.parameter


def _fit_state(optimizer: Optimizer) -> None:
    """Convert state to its parameter's dtype, as torch's optimizers require.

    A run with stochastic rounding leaves state in float32.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for tensor, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == tensor.shape and tensor.ndim:
                values[key] = value.to(tensor.dtype)


class Bf16TruePrecision(HalfShardedPrecision):
    """``bf16-true`` with options: ``Trainer(plugins=Bf16TruePrecision(stochastic_rounding=True))``.

    Args:
        stochastic_rounding: whether updated weights are rounded at random, right on average, so
            that small updates count (`precision.bf16`).

    Raises:
        ConfigError: ``stochastic_rounding`` is neither True nor False.
    """

    def __init__(self, stochastic_rounding: bool = False) -> None:
        raise_if_any(switches(stochastic_rounding=stochastic_rounding))
        super().__init__("bf16-true")
        self._stochastic = stochastic_rounding
        self._steps = 0

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if self._stochastic and (
            not steps_on_shards(optimizer) or isinstance(optimizer, ShardAware)
        ):
            raise ConfigError(
                f"stochastic_rounding=True, optimizer={type(optimizer).__name__} of "
                f"{type(optimizer).__module__.partition('.')[0]}: the step runs on float32 copies "
                "of shards, which element-wise optimizers of torch can take; nearest valid: "
                "torch.optim.AdamW, or stochastic_rounding=False"
            )
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._steps += 1
        return result

    @override
    def _around(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        if not self._stochastic:
            return super()._around(optimizer)
        gradients = self._gradients()
        places = {_lent(role): gradients.place(role) for role in gradients.roles}

        def generator_of(tensor: Tensor) -> torch.Generator | None:
            place = places.get(tensor)
            if place is None:  # no parameter of the module
                return None
            generator = torch.Generator(tensor.device)
            return generator.manual_seed(derive_seed(gradients.seed, "round", self._steps, *place))

        return widened(optimizer, generator_of)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Number of steps, which seeds the random bits."""
        return {**super().state_dict(), "steps": self._steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        super().load_state_dict(state_dict)
        self._steps = int(state_dict["steps"])


class MixedShardedPrecision(ShardedPrecision, MixedPrecision):  # type: ignore[misc]
    """Plugin of ``bf16-mixed``."""

    _reduction = torch.float32

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(parameters=torch.bfloat16, reduction=self._reduction)


class Bf16MixedPrecision(MixedShardedPrecision):
    """``bf16-mixed`` with options: ``Trainer(plugins=Bf16MixedPrecision(reduce_dtype="bf16"))``.

    Args:
        reduce_dtype: number format in which gradients are reduced (and, below ``zero=2``, added up
            over microbatches): ``"fp32"``, or ``"bf16"`` for half the bytes on the wire.

    Raises:
        ConfigError: ``reduce_dtype`` is another format.
    """

    def __init__(self, reduce_dtype: Literal["fp32", "bf16"] = "fp32") -> None:
        if reduce_dtype not in ("fp32", "bf16"):
            raise ConfigError(
                f"reduce_dtype={reduce_dtype!r}: must be 'fp32' or 'bf16'; nearest valid: "
                "reduce_dtype='fp32'"
            )
        super().__init__("bf16-mixed", "cpu")
        self._reduction = torch.float32 if reduce_dtype == "fp32" else torch.bfloat16

    @override
    def use(self, gradients: GradientSet) -> None:
        super().use(gradients)
        self.device = gradients.device.type


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
