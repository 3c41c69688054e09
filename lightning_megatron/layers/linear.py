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

Each layer is one autograd node (`layers.linear_functions`). Several column layers with the same
input (q, k and v; gate and up) share its collectives through `column_parallel`.

Shapes: ``x_bsi`` is ``[batch, sequence, in_features]``; any number of leading dims works without
sequence parallelism, which always splits dim 1.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron._torch.graphs import outside_transforms, runs_transform
from lightning_megatron.comm.functional import gather_from, split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.delayed_wgrad import breaks_graphs, can_defer, linear, without_graphs
from lightning_megatron.layers.gemm import GemmBackend
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM, apply_column, apply_row
from lightning_megatron.topology.degrees import Degrees, divisibility_problem, nearest_divisors
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.context_tensor import on_rows
from lightning_megatron.whole.memory import own_weights, transformed
from lightning_megatron.whole.split_tensor import split_output
from lightning_megatron.whole.splits import own_part, part_of, split_of, whole


def init_matrix(full: Tensor, std: float | None, generator: torch.Generator | None = None) -> None:
    """Fill a weight ``[out, in]`` in place.

    Args:
        full: weight.
        std: standard deviation of a normal distribution; None: as ``nn.Linear`` does.
        generator: source of random numbers; None: PyTorch's default one.
    """
    if std is not None:
        nn.init.normal_(full, std=std, generator=generator)
    else:
        # nn.Linear's kaiming_uniform(a=sqrt(5)) has this same bound for the weight.
        bound = 1 / math.sqrt(full.shape[-1]) if full.shape[-1] else 0.0
        nn.init.uniform_(full, -bound, bound, generator=generator)


Placement = Literal["column", "row", "whole"]
"""Features of a linear layer of which tp ranks have parts: of the output, of the input, or none."""


class ParallelLinear(ParallelLayer):
    """Base of linear layers: their parameters, and how these are initialised and split.

    Attributes:
        gemm: backend of the layer's matrix products; None: torch.
        placement: features of which a tp rank has a part.
    """

    in_features: int
    out_features: int
    init_std: float | None = None
    bias: nn.Parameter | None
    gemm: GemmBackend | None = None
    placement: Placement = "whole"

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
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def matrix(self) -> Tensor:
        """Weight as this rank holds it, ``[out, in]``."""
        return self.weight

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight ``[out, in]`` and bias ``[out]`` of the features that this rank computes."""
        return self.matrix, self.bias

    def marked_output(self, y: Tensor) -> Tensor:
        """Return the output as a `SplitTensor` if its features are split."""
        return y

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill ``full`` as ``nn.Linear`` does, or with ``init_std`` normal; the bias is then 0."""
        if name == "weight":
            init_matrix(full, self.init_std, generator)
        elif self.init_std is None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            nn.init.uniform_(full, -bound, bound, generator=generator)
        else:
            nn.init.zeros_(full)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"{super().extra_repr()}"
        )

    def by_whole_weights(self, x: Tensor) -> Tensor:
        """Output ``[..., out]`` of all features, within a transform of ``torch.func``.

        A transform knows torch's own functions only.

        Raises:
            ConfigError: each rank has other positions or heads.
        """
        topology = self.topology
        assert topology is not None
        dims = self.shard_dims()
        if topology.sequence_parallel or self.gemm is not None or getattr(self, "units", None):
            raise ConfigError(
                f"{type(self).__name__} within torch.vmap or torch.func: it takes no part in their "
                "transforms under sequence_parallel=True, in FP8 or with units=; nearest valid: "
                "tp=1, or a layer of torch.nn"
            )
        with outside_transforms():
            x = whole(x)
            weight, bias = (
                p if p is None or name not in dims else self._whole_parameter(p, dims[name])
                for name, p in (("weight", self.weight), ("bias", self.bias))
            )
        assert weight is not None
        return F.linear(x, weight, bias)

    def _whole_parameter(self, parameter: Tensor, dim: int) -> Tensor:
        size = (self.out_features, self.in_features)[dim]
        assert self.topology is not None
        if parameter.shape[dim] == size:  # `torch.func.functional_call` gave a whole one
            return parameter
        return gather_from(parameter, self.topology.tp, dim)


class ReplicatedLinear(ParallelLinear):
    """Linear layer that every tp rank holds whole, without a bias.

    Input ``[..., in_features]``, equal on all tp ranks, and the output like it; under sequence
    parallelism both are this rank's positions, and its gradient is a part of a sum.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        init_std: standard deviation of a normal initialisation; that of ``nn.Linear`` when None.
    """

    def __init__(
        self, in_features: int, out_features: int, *, init_std: float | None = None
    ) -> None:
        super().__init__(in_features, out_features, False, init_std, None, None)

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset({"weight"} if topology.sequence_parallel else ())

    @override
    def forward(self, x: Tensor) -> Tensor:
        topology, split = self.topology, split_of(x)
        if split is not None:
            x = whole(x)
            if topology is not None and topology.sequence_parallel:
                x = split_to(x, topology.tp, SEQUENCE_DIM)
        return linear(x, self.weight, None, self.wgrad_queue, self.gemm)


class ColumnParallelLinear(ParallelLinear):
    """Linear layer of which each tp rank computes a part of the output features.

    Input ``[..., in_features]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, in_features]``. Output ``[..., out_features]``, over the whole sequence, of which
    this rank holds the part ``[..., out_features / tp]``: a `SplitTensor`, which behaves like the
    whole tensor (`whole.split_tensor`). A layer that is not distributed is ``nn.Linear``.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample over all ranks.
        bias: whether to add a learned bias, split like the output.
        gather_output: return all features on every rank, at the cost of an all-gather.
        units: number of indivisible blocks of output features (attention heads, for example); the
            features themselves when None. On more ranks than units every rank holds the whole
            weight and computes one unit, neighbours the same one; gradients are then summed. With
            ``units``, the output is this rank's part as a plain tensor.
        init_std: standard deviation of a normal initialisation with zero bias; the initialisation
            of ``nn.Linear`` when None.
        device: device of the parameters.
        dtype: number format of the parameters.
    """

    placement = "column"

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

    @override
    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        if self._shared_unit is None or self.units is None:
            return self.matrix, self.bias
        length = self.out_features // self.units
        start = self._shared_unit * length
        bias = None if self.bias is None else self.bias.narrow(0, start, length)
        return self.matrix.narrow(0, start, length), bias

    def own_features(self, x: Tensor) -> Tensor:
        """Compute this rank's features of an input whose gradient the caller sums over tp."""
        weight, bias = self.local_parameters()
        return linear(x, weight, bias, self.wgrad_queue, self.gemm)

    @override
    @transformed
    def forward(self, x: Tensor) -> Tensor:
        if part_of(x) is not None:
            return self._of_context(x)
        if self.tp_size > 1 and runs_transform():
            return self.by_whole_weights(x)
        y = self.own_output(x)
        if self.topology is not None and self.gather_output:
            return gather_from(y, self.topology.tp, -1)
        return self.marked_output(y)

    def _of_context(self, x: Tensor) -> Tensor:
        """Output of a `ContextTensor`: outside of the `PipelineSequential` that it comes from."""
        topology = self.topology
        if topology is not None and topology.sequence_parallel:
            raise ConfigError(
                f"sequence_parallel=True and cp > 1: {type(self).__name__} outside of a "
                "PipelineSequential got the output of one; nearest valid: the layer as its last "
                "item, or sequence_parallel=False"
            )
        y: Tensor = on_rows(self.forward, x)
        return y

    @override
    def marked_output(self, y: Tensor) -> Tensor:
        topology = self.topology
        if topology is None or self.units is not None or y.shape[-1:] == (self.out_features,):
            return y
        return split_output(y, topology)

    def entering(self, x: Tensor) -> Tensor:
        """Return the layer's input; one that is itself split over tp is gathered."""
        if split_of(x) is None or self.topology is None:
            return x
        x = whole(x)
        if self.topology.sequence_parallel:
            return split_to(x, self.topology.tp, SEQUENCE_DIM)
        return x

    def own_output(self, x: Tensor) -> Tensor:
        """Compute this rank's features, as a plain tensor."""
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            return linear(x, self.weight, self.bias, self.wgrad_queue, self.gemm)
        (y,) = _column_parallel(self.entering(x), [self])
        return y


class RowParallelLinear(ParallelLinear):
    """Linear layer of which each tp rank holds a part of the input features.

    Input ``[..., in_features]``, split over tp as a column-parallel layer returns it, or this
    rank's part of it as a plain tensor; a whole tensor is split here. Output
    ``[..., out_features]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, out_features]``. A layer that is not distributed is ``nn.Linear``. The bias is
    whole on every rank and added after the sum; its gradient is exact on every rank.

    Args:
        in_features: size of each input sample over all ranks.
        out_features: size of each output sample.
        bias: whether to add a learned bias.
        input_is_parallel: whether the input holds this rank's features only, as after a
            column-parallel layer; otherwise the input holds all features (under sequence
            parallelism, of this rank's part of the sequence).
        init_std: standard deviation of a normal initialisation with zero bias; the initialisation
            of ``nn.Linear`` when None.
        device: device of the parameters.
        dtype: number format of the parameters.
    """

    placement = "row"

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
    @transformed
    def forward(self, x: Tensor) -> Tensor:
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            return linear(x, self.weight, self.bias, self.wgrad_queue, self.gemm)
        if runs_transform():
            return self.by_whole_weights(x)
        split = split_of(x)
        if split is not None and split.dim == x.dim() - 1:
            return row_parallel(own_part(x), topology, self)
        x = whole(x)
        if split is None and not self.input_is_parallel and topology.sequence_parallel:
            x = gather_from(x, topology.tp, SEQUENCE_DIM)
        if x.shape[-1] == self.in_features:
            x = split_to(x, topology.tp, -1)
        return row_parallel(x, topology, self)


@own_weights
@breaks_graphs
def row_parallel(
    x: Tensor, topology: Topology, layer: ParallelLinear, sequence: bool | None = None
) -> Tensor:
    """Apply a row-parallel layer to this rank's features.

    Args:
        x: ``[..., in_features / tp]`` of the whole sequence.
        topology: layout.
        layer: the layer.
        sequence: whether each rank keeps its part of the sequence only; as the layout says if None.
    """
    if torch.compiler.is_compiling() and (caller := without_graphs([layer])) is not None:
        y: Tensor = caller.outside_graphs(row_parallel, x, topology, layer, sequence)
        return y
    wgrad_queue = layer.wgrad_queue
    weight, bias = layer.matrix, layer.bias
    sequence = topology.sequence_parallel if sequence is None else sequence
    if wgrad_queue is not None and not can_defer((weight,)):
        wgrad_queue = None
    return apply_row(x, weight, bias, topology.tp, sequence, wgrad_queue, layer.gemm)


def column_parallel(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Apply several column-parallel layers to one input with one set of collectives.

    Equal to ``[layer(x) for layer in layers]``, which it does when a layer is no
    `ColumnParallelLinear` (an adapter around one, for example), has hooks or gathers its output.
    """
    shared = _sharing(layers)
    if not shared:
        return [layer(x) for layer in layers]
    parts = _column_parallel(shared[0].entering(x), shared)
    return [layer.marked_output(part) for part, layer in zip(parts, shared, strict=True)]


def column_parts(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Apply the layers as `column_parallel` does, with this rank's parts as plain tensors."""
    shared = _sharing(layers)
    if not shared:
        return [own_part(layer(x)) for layer in layers]
    return _column_parallel(shared[0].entering(x), shared)


def _sharing(layers: Sequence[nn.Module]) -> list[ColumnParallelLinear]:
    """Return the layers if they can share collectives, else an empty list."""
    found = [layer for layer in map(unwrapped, layers) if layer is not None]
    return found if len(found) == len(layers) and found[0].tp_size > 1 else []


def unwrapped(layer: nn.Module) -> ColumnParallelLinear | None:
    """Return the layer if its parameters are all there is to it; None for an adapter around one."""
    if type(layer) is not ColumnParallelLinear or layer.gather_output or _has_hooks(layer):
        return None
    return layer


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


@own_weights
@breaks_graphs
def _column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[Tensor]:
    topology = layers[0].topology
    assert topology is not None
    if torch.compiler.is_compiling() and (caller := without_graphs(layers)) is not None:
        found: list[Tensor] = caller.outside_graphs(_column_parallel, x, layers)
        return found
    wgrad_queue = layers[0].wgrad_queue
    flat = [p for layer in layers for p in layer.local_parameters()]
    if wgrad_queue is not None and not can_defer(flat):
        wgrad_queue = None
    gemm = [layer.gemm for layer in layers]
    sequence = topology.sequence_parallel
    return list(apply_column(x, topology.tp, sequence, wgrad_queue, gemm, *flat))
