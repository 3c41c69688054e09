"""Ways into and out of a `PipelineSequential` under context parallelism.

Inside each cp rank has its part of a sequence, outside everything is whole. On the way in nothing
is done with whole tensors, as a layer inside cuts them. On the way out each tensor whose dim 1 has
the size of a part becomes a `ContextTensor`. One that has not, though sequences were cut, would be
a number of this rank's part only, and is refused, unless a layer inside joined the sequences.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import tree_flatten, tree_map
from lightning_megatron.comm.functional import split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.context_split import GatherContext
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.context_part import Place
from lightning_megatron.whole.context_rows import only_layout, split
from lightning_megatron.whole.context_tensor import context_tensor
from lightning_megatron.whole.splits import part_of, split_of, whole

_LOSSES = (LinearCrossEntropy, VocabParallelCrossEntropy)
_OURS = "lightning_megatron."


class ContextExit:
    """What a `PipelineSequential` does with its input and output.

    Args:
        trunk: whose layers it tells that they are inside.
        topology: layout with cp > 1.
    """

    def __init__(self, trunk: PipelineSequential, topology: Topology) -> None:
        self.context = topology.context.of_trunk()
        self._name = type(trunk).__name__
        sequence = topology.sequence_parallel and topology.tp.size > 1
        self._residual = topology.tp if sequence else None
        self._splits = any(map(_splits, trunk.kinds))
        self._joins = any(map(_joins, trunk.kinds))
        ends = [kind for kind in trunk.kinds if _splits(kind) or issubclass(kind, GatherContext)]
        self._ends_joined = bool(ends) and not _splits(ends[-1])
        self._said: set[str] = set()
        for layer in trunk.modules():
            if isinstance(layer, ParallelLayer):
                layer.trunk_context = self.context
        if sequence:
            _refuse_partial_gradients(trunk, topology)

    @property
    def is_active(self) -> bool:
        """Whether sequences are split now."""
        return self.context.is_active

    def enter(self, args: tuple[Any, ...], *, alone: bool) -> tuple[Any, ...]:
        """Return the positional arguments of the first item.

        Args:
            args: arguments of the call.
            alone: whether no pipeline tells which sequences were cut.
        """
        if alone:
            self.context.start_call()
        if self._splits:
            return args
        found: tuple[Any, ...] = tree_map(self._own, args)
        return found

    def _own(self, leaf: Any) -> Any:
        """What the items take of another's output, where they cut nothing themselves."""
        part = part_of(leaf)
        if part is None:
            return leaf
        layout = self.context.split(leaf.shape[1])
        if part.place.residual is not None and part.place.residual == self._residual:
            return part.local()
        x = split(leaf, layout, self.context.cp.rank)
        return x if self._residual is None else split_to(x, self._residual, 1)

    def leave(self, output: Any, given: Any) -> Any:
        """Return the output as whole tensors.

        Args:
            output: of the last item.
            given: arguments of the call, which may be a part of the output.

        Raises:
            ConfigError: a tensor is of a part of a sequence, and not a part of the whole.
        """
        if not self.context.parts():
            return output
        passed = {id(leaf) for leaf in tree_flatten(given)[0]}
        return tree_map(lambda x: x if id(x) in passed else self._whole(x), output)

    def _whole(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or part_of(x) is not None:
            return x
        local, residual = (x.shape[1] if x.dim() > 1 else -1), None
        if not self.context.lengths(local) and self._residual is not None:
            local, residual = local * self._residual.size, self._residual
        lengths = self.context.lengths(local)
        if self._is_joined and x.dim() > 1 and x.shape[1] in self.context.noted():
            return x
        if not lengths or (residual is not None and split_of(x) is not None):
            self._check(x)
            return x
        layout = only_layout(self.context, local, f"who takes the output of a {self._name}")
        place = Place(
            layout,
            self.context.cp,
            0,
            layout.length,
            residual=residual,
            may_gather=False,
            said=self._said,
        )
        count = sum(n for _, n in place.own)
        rows = x if residual is not None or count == local else x.narrow(1, 0, count)
        out = context_tensor(rows, place)
        return whole(out) if torch.compiler.is_compiling() else out

    @property
    def _is_joined(self) -> bool:
        """Whether the items left sequences joined, as far as this stage knows."""
        known = self.context.is_joined
        return self._ends_joined if known is None else known

    def _check(self, x: Tensor) -> None:
        if self._joins or isinstance(x, nn.Parameter) or not x.is_floating_point():
            return
        raise ConfigError(
            f"cp={self.context.cp.size}: a {self._name} returned a tensor of shape "
            f"{tuple(x.shape)}, though each rank has parts of {self.context.parts()} positions "
            "inside: it was computed from this rank's part only; nearest valid: GatherContext() "
            f"in front of what changes the sequence, or do it outside of the {self._name}"
        )


def _splits(kind: type[nn.Module]) -> bool:
    """Whether modules of a class take whole sequences and return parts."""
    return issubclass(kind, ParallelLayer) and kind.splits_context


def _joins(kind: type[nn.Module]) -> bool:
    """Whether modules of a class may return what is whole, from parts."""
    known = issubclass(kind, ParallelLayer) and kind.joins_context
    own = getattr(kind, "exchanges_context", False) and not kind.__module__.startswith(_OURS)
    return known or own or issubclass(kind, _LOSSES)


def _refuse_partial_gradients(trunk: PipelineSequential, topology: Topology) -> None:
    """Refuse layers behind a `GatherContext` whose gradients are summed over tp.

    Raises:
        ConfigError: there is one. It sees whole sequences on every tp rank.
    """
    joined = False
    for name, module in trunk.named_modules():
        if _splits(type(module)) or isinstance(module, GatherContext):
            joined = isinstance(module, GatherContext)
        elif joined and isinstance(module, ParallelLayer) and module.summed_parameters(topology):
            raise ConfigError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) stands behind a "
                "GatherContext and sees whole sequences on every tp rank, but adds its gradients "
                "up over tp; nearest valid: it in front of GatherContext(), the same outside of "
                f"the {type(trunk).__name__} from torch.nn, or sequence_parallel=False"
            )
