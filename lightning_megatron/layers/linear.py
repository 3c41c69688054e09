"""Linear layers whose weight is split over the tensor-parallel axis.

A *column-parallel* layer gives each rank some of the output features, a *row-parallel* one some of
the input features (Megatron-LM, arXiv 1909.08053, section 3). One of each in a row, with anything
elementwise between them, needs a single sum in forward and a single one in backward::

    x (whole) --column--> y (features sharded) --f--> z --row--> partial --sum--> whole
    dx        <---sum---- partial               ...    dz <------------------------ d(whole)

With *sequence parallelism* (arXiv 2205.05198) the whole activations outside the pair are sharded
along the sequence instead: the column layer gathers its input, the row layer scatters its sum, and
memory for them falls by the degree at the same number of bytes on the wire::

                   column forward  column backward          row forward     row backward
    plain          --              sum of dx                sum of y        --
    sequence       gather x        gather x, scatter dx     scatter y       gather dy

Each layer is one autograd node. The column layer's backward starts the sum of ``dx`` as soon as it
has it, computes the gradients of the weights meanwhile and waits last; its second gather of ``x``
(which is not kept: it would undo the saving) runs beside the product that gives ``dx``. On CPU,
where memory is plentiful and a collective slow, the gathered ``x`` is kept instead (`regathers`).
Several column layers with the same input (q, k and v; gate and up) share its collectives through
`column_parallel`.

Shapes: ``x_bsi`` is ``[batch, sequence, in_features]``; any number of leading dims works without
sequence parallelism, which always splits dim 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.collectives import (
    Pending,
    start_gather,
    start_sum,
    start_sum_scatter,
)
from lightning_megatron.comm.functional import gather_from, split_to
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.deferral import (
    Factors,
    WeightGradients,
    can_defer,
    compute_dtype,
    input_gradient,
    linear,
    linear_gradients,
    output,
    ready,
    rows,
)
from lightning_megatron.layers.products import Products
from lightning_megatron.topology.degrees import Degrees, divisibility_problem, nearest_divisors
from lightning_megatron.topology.mesh import Axis, Topology

SEQUENCE_DIM = 1
"""Dim along which sequence parallelism splits an activation."""


class _Linear(ParallelLayer):
    """What both linear layers share: parameters and their initialisation."""

    products: Products | None = None
    """How the layer multiplies; None: as torch does."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        init_std: float | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.init_std = init_std
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """As ``nn.Linear``, or with ``init_std`` a normal weight and a zero bias."""
        if self.init_std is None:
            # nn.Linear's kaiming_uniform(a=sqrt(5)) has this same bound for the weight.
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            nn.init.uniform_(full, -bound, bound, generator=generator)
        elif name == "weight":
            nn.init.normal_(full, std=self.init_std, generator=generator)
        else:
            nn.init.zeros_(full)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"{super().extra_repr()}"
        )


class ColumnParallelLinear(_Linear):
    """A linear layer of which each tp rank computes a part of the output features.

    Input ``[..., in_features]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, in_features]``. Output ``[..., out_features / tp]``, over the whole sequence.
    Undistributed it is ``nn.Linear``.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample over all ranks.
        bias: whether to add a learned bias, split like the output.
        gather_output: return all features on every rank, at the cost of an all-gather.
        units: number of indivisible blocks of output features (attention heads, for example); the
            features themselves when None. On more ranks than units every rank holds the whole
            weight and computes one unit, neighbours the same one; gradients are then summed.
        init_std: standard deviation of a normal initialisation with zero bias; the initialisation
            of ``nn.Linear`` when None.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        units: int | None = None,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, init_std, device, dtype)
        self.gather_output = gather_output
        self.units = units
        self._shared_unit: int | None = None

    @override
    def shard_dims(self) -> dict[str, int]:
        return {} if self._shared_unit is not None else {"weight": 0, "bias": 0}

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset() if self._shared_unit is None else frozenset({"weight", "bias"})

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        if self.units is None:
            problem = divisibility_problem("out_features", self.out_features, "tp", degrees.tp)
            return [problem] if problem else []
        if self.units % degrees.tp == 0 or (
            degrees.tp % self.units == 0 and not self.gather_output
        ):
            return []
        valid = " or ".join(str(d) for d in nearest_divisors(self.units, degrees.tp))
        return [
            f"units={self.units}, tp={degrees.tp}: one must be a multiple of the other "
            f"(units of tp, where gather_output is set); nearest valid: tp={valid}"
        ]

    @override
    def distribute(self, topology: Topology) -> None:
        if self.units is not None and topology.tp.size > self.units:
            self._shared_unit = topology.tp.rank * self.units // topology.tp.size
        super().distribute(topology)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The weight ``[out, in]`` and bias ``[out]`` of the features that this rank computes."""
        if self._shared_unit is None or self.units is None:
            return self.weight, self.bias
        length = self.out_features // self.units
        start = self._shared_unit * length
        bias = None if self.bias is None else self.bias.narrow(0, start, length)
        return self.weight.narrow(0, start, length), bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.topology is None or self.topology.tp.size == 1:
            return linear(x, self.weight, self.bias, self.deferral, self.products)
        (y,) = _column_parallel(x, self.topology, [self])
        return gather_from(y, self.topology.tp, -1) if self.gather_output else y


class RowParallelLinear(_Linear):
    """A linear layer of which each tp rank holds a part of the input features.

    Input ``[..., in_features / tp]``; output ``[..., out_features]``, equal on all tp ranks; under
    sequence parallelism ``[b, s / tp, out_features]``. Undistributed it is ``nn.Linear``. The bias
    is whole on every rank and added after the sum; its gradient is exact on every rank.

    Args:
        in_features: size of each input sample over all ranks.
        out_features: size of each output sample.
        bias: whether to add a learned bias.
        input_is_parallel: whether the input holds this rank's features only, as a column-parallel
            layer returns them; otherwise it is split here.
        init_std: standard deviation of a normal initialisation with zero bias; the initialisation
            of ``nn.Linear`` when None.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, init_std, device, dtype)
        self.input_is_parallel = input_is_parallel

    @override
    def shard_dims(self) -> dict[str, int]:
        return {"weight": 1}

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        problem = divisibility_problem("in_features", self.in_features, "tp", degrees.tp)
        return [problem] if problem else []

    @override
    def forward(self, x: Tensor) -> Tensor:
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            return linear(x, self.weight, self.bias, self.deferral, self.products)
        if not self.input_is_parallel:
            if topology.sequence_parallel:
                x = gather_from(x, topology.tp, SEQUENCE_DIM)
            x = split_to(x, topology.tp, -1)
        deferral = self.deferral if can_defer((self.weight,)) else None
        sequence = topology.sequence_parallel
        return _apply_row(x, self.weight, self.bias, topology.tp, sequence, deferral, self.products)


def column_parallel(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Apply several column-parallel layers to one input with one set of collectives.

    Equal to ``[layer(x) for layer in layers]``, and done so when a layer is something else than a
    `ColumnParallelLinear` (an adapter around one, for example), has hooks or gathers its output.
    """
    first = layers[0]
    if not isinstance(first, ColumnParallelLinear):
        return [layer(x) for layer in layers]
    topology = first.topology
    if topology is None or topology.tp.size == 1:
        return [layer(x) for layer in layers]
    sharing = []
    for layer in layers:
        if type(layer) is not ColumnParallelLinear or layer.gather_output or _has_hooks(layer):
            return [layer(x) for layer in layers]
        sharing.append(layer)
    return _column_parallel(x, topology, sharing)


def regathers(x: Tensor) -> bool:
    """Whether a sequence-parallel column layer gathers ``x`` again rather than keeping it."""
    return x.device.type != "cpu"


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _column_parallel(
    x: Tensor, topology: Topology, layers: Sequence[ColumnParallelLinear]
) -> list[Tensor]:
    flat = [p for layer in layers for p in layer.local_parameters()]
    deferral = layers[0].deferral if can_defer(flat) else None
    products = [layer.products for layer in layers]
    sequence = topology.sequence_parallel
    return list(_apply_column(x, topology.tp, sequence, deferral, products, *flat))


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: Products | None
) -> tuple[Tensor, Any]:
    bias = None if bias is None else bias.to(x.dtype)
    if products is None:
        return F.linear(x, weight.to(x.dtype), bias), None
    y, kept = output(x, weight, products)
    return y if bias is None else y.add_(bias), kept


class _ColumnParallel(Function):
    """``x, weight, bias, weight, bias, ... -> y, y, ...`` (see the module's table).

    The gradients of the weights may come later (`layers.deferral`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        sequence: bool,
        deferral: WeightGradients | None,
        products: Sequence[Products | None],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x = x.to(compute_dtype(x))
        gathered = start_gather(x, axis, SEQUENCE_DIM).wait() if sequence else x
        weights, biases = parameters[::2], parameters[1::2]
        ctx.axis, ctx.sequence, ctx.deferral, ctx.products = axis, sequence, deferral, products
        ctx.regather, ctx.parameters = sequence and regathers(x), parameters
        ctx.save_for_backward(x if ctx.regather else gathered, *weights)
        found = [
            _linear(gathered, w, b, p)
            for w, b, p in zip(weights, biases, products, strict=True)
            if w is not None
        ]
        ctx.kept = [kept for _, kept in found]
        return tuple(y for y, _ in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs, deferral = ctx.needs_input_grad, ctx.deferral
        later = deferral is not None and deferral.collecting
        regathered = None
        if ctx.regather and any(needs[5:]) and not later:
            regathered = start_gather(x, ctx.axis, SEQUENCE_DIM)
        grads_no, products = [rows(g) for g in grads], ctx.products
        gradients = [
            ready(grad_no, kept, p)
            for grad_no, kept, p in zip(grads_no, ctx.kept, products, strict=True)
        ]
        pending = None
        if needs[0]:
            grad_x = _column_input_gradient(gradients, weights, x.dtype, products)
            grad_x = grad_x.view(*grads[0].shape[:-1], x.shape[-1])
            pending = _start_reduction(grad_x, ctx.axis, ctx.sequence)

        def factors() -> list[Factors]:
            whole = x
            if ctx.regather:
                whole = (regathered or start_gather(x, ctx.axis, SEQUENCE_DIM)).wait()
            x_ni = rows(whole)
            return [
                Factors(grad_no, x_ni, gradient, p)
                for grad_no, gradient, p in zip(grads_no, gradients, products, strict=True)
            ]

        found = linear_gradients(ctx.parameters, needs[5:], factors, deferral)
        return pending.wait() if pending else None, None, None, None, None, *found


class _RowParallel(Function):
    """``x, weight, bias -> y`` (see the module's table)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence: bool,
        deferral: WeightGradients | None,
        products: Products | None,
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.axis, ctx.sequence, ctx.deferral, ctx.products = axis, sequence, deferral, products
        ctx.parameters = weight, bias
        ctx.save_for_backward(x, weight)
        partial, ctx.kept = output(x, weight, products)
        y = _start_reduction(partial, axis, sequence).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, products = ctx.needs_input_grad, ctx.products
        if ctx.sequence:
            grad = start_gather(grad, ctx.axis, SEQUENCE_DIM).wait()
        grad_no, x_ni = rows(grad), rows(x)
        gradient = ready(grad_no, ctx.kept, products)
        grad_x = (
            input_gradient(gradient, weight, x.dtype, products).view(x.shape) if needs[0] else None
        )
        gradients = linear_gradients(
            ctx.parameters,
            needs[1:3],
            lambda: [Factors(grad_no, x_ni, gradient, products)],
            ctx.deferral,
        )
        return grad_x, *gradients, None, None, None, None


_apply_column: Callable[..., tuple[Tensor, ...]] = _ColumnParallel.apply
_apply_row: Callable[..., Tensor] = _RowParallel.apply


def _column_input_gradient(
    gradients: Sequence[Any],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    products: Sequence[Products | None],
) -> Tensor:
    """This rank's part of the input gradient ``[n, in]``, summed over the layers that share it."""
    total = input_gradient(gradients[0], weights[0], dtype, products[0])
    for gradient, weight, multiply in zip(gradients[1:], weights[1:], products[1:], strict=True):
        if multiply is None:
            total.addmm_(gradient, weight.to(gradient.dtype))
        else:
            total.add_(input_gradient(gradient, weight, dtype, multiply))
    return total


def _start_reduction(partial: Tensor, axis: Axis, sequence: bool) -> Pending:
    """Begin to make a partial activation true: whole, or sharded along the sequence."""
    if sequence:
        return start_sum_scatter(partial, axis, SEQUENCE_DIM)
    return start_sum(partial, axis)
