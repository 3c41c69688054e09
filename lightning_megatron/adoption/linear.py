"""Linear layers of other libraries as parallel layers, in place.

An ``nn.Linear``, or a ``Conv1D`` of transformers, whose weight is transposed, gets the class
`AdoptedLinear` in front of its own (`adoption.classes`): its parameters, names, hooks and identity
stay. What it computes follows from its `LinearSplit`:

=============  ===================================  ============================================
placement      parameters of a rank                 input and output
=============  ===================================  ============================================
``column``     its output features: of each of      the whole; its features, a `SplitTensor`.
               the ``parts``, if there are some     With ``parts``, a plain tensor of these
``row``        its input features                   its features, or the whole; the whole
``whole``      all                                  the whole; the whole
=============  ===================================  ============================================

Input and output are of the whole sequence, under sequence parallelism too; a residual stream that
is divided along the sequence is a `SplitTensor`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.adoption.column_input import entered, linear_of_gathered
from lightning_megatron.adoption.sequences import divides
from lightning_megatron.adoption.sharding import Part, Sharded, Sharding, as_sharded
from lightning_megatron.comm.functional import copy_to, split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.delayed_wgrad import linear
from lightning_megatron.layers.linear import ParallelLinear, Placement, row_parallel
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.whole.context_tensor import on_rows
from lightning_megatron.whole.split_tensor import SplitTensor, split_output
from lightning_megatron.whole.splits import marked, own_part, part_of, split_of, whole


@dataclass(frozen=True, kw_only=True)
class LinearSplit:
    """How tp splits one linear layer."""

    placement: Placement
    """Features of which a rank has a part: of the output, of the input, or none."""
    parts: tuple[Part, ...] = ()
    """Of a column layer in attention, or of a fused one: blocks of its output features that code
    around it takes from a plain tensor. Empty: the output behaves like the whole."""
    may_stay_whole: bool = False
    """Whether every rank computes all output features where tp does not divide their number (a
    vocabulary, for example)."""
    is_entered: bool = False
    """Whether the caller sums the gradient of a column layer's input over tp."""
    splits_input: bool = False
    """Whether a row layer gets whole features, and takes its own itself."""
    of_heads: bool = False
    """Whether a row layer gets this rank's heads as a plain tensor."""
    positional: int = 0
    """Last features of a whole layer's output that go to every rank's heads as they are, so that
    their gradient is summed here (the latent of DeepSeek-V2, arXiv 2405.04434, section 2.1)."""


class AdoptedLinear(Sharded, ParallelLinear):
    """Class in front of a linear layer, split as its `LinearSplit` says.

    Attributes:
        split: how.
        is_transposed: whether its weight is ``[in, out]``.
    """

    split: LinearSplit
    is_transposed: bool

    @property
    @override
    def matrix(self) -> Tensor:
        return self.weight.t() if self.is_transposed else self.weight

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        if not self.is_transposed:
            super().init_parameter(name, full, generator)
        elif name == "weight":
            nn.init.normal_(full, std=0.02, generator=generator)
        else:
            nn.init.zeros_(full)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.placement == "row":
            return self._of_rows(x)
        if self.placement == "column":
            return self._of_columns(x)
        return self._of_latent(x)

    def _plainly(self, x: Tensor) -> Tensor:
        """Output of one rank that holds and computes everything."""
        return linear(x, self.matrix, self.bias, self.wgrad_queue, self.gemm)

    @override
    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else self.computed(self.bias)
        return self.computed(self.matrix), bias

    def own_features(self, x: Tensor) -> Tensor:
        """Compute this rank's features of an input whose gradient the caller sums over tp."""
        weight, bias = self.local_parameters()
        return linear_of_gathered(x, weight, bias, self.wgrad_queue, self.gemm)

    @override
    def marked_output(self, y: Tensor) -> Tensor:
        whole_or_plain = self.split.parts or y.shape[-1:] == (self.out_features,)
        if self.topology is None or self.placement != "column" or whole_or_plain:
            return y
        return split_output(y, self.topology)

    def _of_columns(self, x: Tensor) -> Tensor:
        if part_of(x) is not None:
            of_rows: Tensor = on_rows(self.forward, x)
            return of_rows
        topology = self.topology
        if topology is None or topology.tp.size == 1 or self.held == "whole":
            return self._plainly(whole(x))
        x = x if self.split.is_entered else entered(x, topology.tp)
        return self.marked_output(self.own_features(x))

    def _of_rows(self, x: Tensor) -> Tensor:
        """Sum of the ranks' outputs, along the sequence where that is divided and tp divides it."""
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            return self._plainly(x)
        split, tp = split_of(x), topology.tp
        if self.split.of_heads and split is None:
            self._check_heads(x.shape[-1], tp.size)
        if split is not None and split.dim == x.dim() - 1:
            x = own_part(x)
        else:
            x = whole(x)
            if x.shape[-1] == self.in_features:
                x = split_to(x, tp, -1)
        scatters = (
            topology.sequence_parallel
            and x.dim() > SEQUENCE_DIM + 1
            and divides(tp.size, x.shape[SEQUENCE_DIM])
        )
        y = row_parallel(x, topology, self, sequence=scatters)
        return marked(y, SplitTensor, topology, SEQUENCE_DIM) if scatters else y

    def _check_heads(self, features: int, tp: int) -> None:
        if features * tp == self.in_features:
            return
        raise ConfigError(
            f"tp={tp}: an output projection ({self.in_features} features) of attention got "
            f"{features} features on a rank, where its heads have {self.in_features // tp}: "
            "code of the attention has made others of them; nearest valid: tp=1, or styles "
            "'colwise_gather_output' for its projections and 'rowwise_split_input' for this one"
        )

    def _of_latent(self, x: Tensor) -> Tensor:
        y, topology = self._plainly(whole(x)), self.topology
        if topology is None or topology.tp.size == 1:
            return y
        latent, positions = y.tensor_split([self.out_features - self.split.positional], -1)
        return torch.cat((latent, copy_to(positions, topology.tp)), -1)


class TiedBias(Sharded):
    """Class in front of a module that holds, as ``bias``, the bias of a column-parallel linear.

    Like the linear it stays whole where tp does not divide its features.
    """

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        nn.init.zeros_(full)


def as_linear(module: nn.Module, split: LinearSplit, name: str = "") -> None:
    """Make a linear layer or ``Conv1D`` parallel, in place.

    Args:
        module: the layer.
        split: how it is split.
        name: name of the module, for the message.

    Raises:
        ConfigError: it is none, or the parts are not all of its output features.
    """
    sizes = linear_sizes(module, name)
    sharding = _sharding(split, is_transposed(module))
    if split.parts and sum(part.features for part in split.parts) != sizes[1]:
        raise ConfigError(
            f"{name or type(module).__name__} has {sizes[1]} output features, but parts of "
            f"{[part.features for part in split.parts]}; nearest valid: parts that add up to "
            f"{sizes[1]}"
        )
    made = as_sharded(module, sharding, AdoptedLinear)
    made.in_features, made.out_features = sizes
    made.split = split
    made.placement = split.placement
    made.is_transposed = is_transposed(module)


def _sharding(split: LinearSplit, transposed: bool) -> Sharding:
    if split.placement == "whole":
        return Sharding()
    if split.placement == "row":
        dims = {"weight": 0 if transposed else 1}
        return Sharding(dims=dims, size="in_features")
    return Sharding(
        dims={"weight": 1 if transposed else 0, "bias": 0},
        parts=split.parts,
        undivided="shared" if split.parts else "whole" if split.may_stay_whole else "refused",
        size="out_features",
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of transformers, whose weight is ``[in, out]``."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def linear_sizes(module: nn.Module, name: str = "") -> tuple[int, int]:
    """Numbers of input and output features of a linear layer or ``Conv1D``.

    Raises:
        ConfigError: the module is neither.
    """
    if is_transposed(module):
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    raise ConfigError(
        f"{name or type(module).__name__} is a {type(module).__name__}, which cannot be split as a "
        "fused projection; nearest valid: an nn.Linear or a Conv1D of transformers"
    )
