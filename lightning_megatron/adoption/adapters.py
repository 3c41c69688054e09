"""Low-rank adapters of PEFT on layers that are split over tp.

PEFT puts ``lora.Linear`` in the place of a linear layer ``W`` and adds ``B(A(x))`` to ``W(x)``,
with ``A`` of shape ``[r, in]`` and ``B`` of shape ``[out, r]``. Its layers stay; what follows from
the split of ``W`` is in a class of ours in front of the classes of ``A`` and ``B``
(`adoption.classes`), so that names, shapes and files are PEFT's:

============  ================================================  ====================================
base layer    ``A``                                             ``B``
============  ================================================  ====================================
column        whole on every rank; its gradient is a part of a  split by output features as ``W`` is
              sum, as each rank's ``B`` sees a part of it
row           split by input features as ``W`` is, and summed   whole; its gradient is exact
embedding     whole, exact                                      whole, exact
replicated    whole, exact                                      whole, exact
============  ================================================  ====================================

Base layer and ``A`` of a column-parallel layer share the sum of the gradient of ``x`` with all
column-parallel layers that take the same ``x`` (and its gather, under sequence parallelism), so
adapters add no collective in a forward or backward; the gradient of ``A`` takes part in the one sum
of partial gradients at the end of a step. At a row-parallel layer they add one sum of
``[b, s, r]``.

Adapters may come before or after `adopt`. Before: `adopt` looks through them
(`without_adapters`). After: the strategy calls `join_adapters` before it plans.

*DoRA* (arXiv 2402.09353) scales each output feature of ``W + s B A`` to a learned magnitude ``m``::

    y = m / |W + s B A| * (W x + s B A x)

with the norm of each row of the matrix, taken as a constant in the backward. Of a column-parallel
layer each rank has whole rows, and the magnitudes of these; of a row-parallel one it has parts of
all rows, whose squares are summed over tp.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.adoption.classes import become, own_class
from lightning_megatron.adoption.column_input import entered_once
from lightning_megatron.adoption.embedding import AdoptedEmbedding
from lightning_megatron.adoption.linear import AdoptedLinear, as_linear
from lightning_megatron.adoption.own_layers import join_own
from lightning_megatron.adoption.sharding import Sharded, Sharding, as_sharded
from lightning_megatron.comm.functional import reduce_from
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import random_stream
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.whole.splits import own_part, split_of, whole


def base_model(model: nn.Module) -> nn.Module:
    """Return the model that a ``PeftModel`` surrounds; any other module unchanged."""
    peft = sys.modules.get("peft.peft_model")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which ``model`` has the layers that adapters surround in the place of these.

    Whatever is put in the place of such a layer meanwhile is what the adapter surrounds afterwards.
    """
    with _swapped([(parent, leaf, *_inside(adapter)) for parent, leaf, adapter in _places(model)]):
        yield


def copied(model: nn.Module) -> list[str]:
    """Names of the adapters that train copies of whole modules (``modules_to_save``)."""
    names = {name: None for _, _, adapter in _places(model) for name in _copies(adapter)}
    return list(names)


@contextmanager
def with_copies(model: nn.Module, adapter_name: str) -> Iterator[list[str]]:
    """Context in which ``model`` has the copies of an adapter in the place of their originals.

    Yields:
        Names of the copies in the model.
    """
    found = [place for place in _places(model) if adapter_name in _copies(place[2])]
    names = {id(module): name for name, module in model.named_modules()}
    copies = [names[id(adapter)] for _, _, adapter in found]
    places = [(parent, leaf, _copies(adapter), adapter_name) for parent, leaf, adapter in found]
    with _swapped(places):
        yield copies


@contextmanager
def _swapped(places: Sequence[tuple[nn.Module, str, nn.Module, str]]) -> Iterator[None]:
    """Context in which modules of parents are those under a name of other modules instead."""
    before = [parent._modules[leaf] for parent, leaf, _, _ in places]
    for parent, leaf, holder, name in places:
        parent._modules[leaf] = holder._modules[name]
    try:
        yield
    finally:
        for (parent, leaf, holder, name), adapter in zip(places, before, strict=True):
            holder._modules[name] = parent._modules[leaf]
            parent._modules[leaf] = adapter


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield parent, name in it, and module, of every outermost adapter."""
    for leaf, child in module._modules.items():
        if child is None:
            continue
        if _is_adapter(child):
            yield module, leaf, child
        else:
            yield from _places(child)


def _is_adapter(module: nn.Module) -> bool:
    return is_tuner(module) or _is_wrapper(module)


def is_tuner(module: nn.Module) -> bool:
    """Whether a module is a layer of one of PEFT's methods around another layer."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    # isinstance asks the many subclasses of this abstract class for each new class of module.
    return peft is not None and peft.BaseTunerLayer in type(module).__mro__


def _is_wrapper(module: nn.Module) -> bool:
    peft = sys.modules.get("peft.utils.other")
    return peft is not None and isinstance(module, peft.AuxiliaryTrainingWrapper)


def _inside(adapter: nn.Module) -> tuple[nn.Module, str]:
    """Module and name under which it has what the adapters at one place surround."""
    holder, name = adapter, "base_layer"
    if _is_wrapper(adapter):
        tokens = adapter._modules.get("token_adapter")
        holder, name = (adapter, "original_module") if tokens is None else (tokens, name)
    inner = holder._modules[name]
    assert inner is not None
    return _inside(inner) if _is_adapter(inner) else (holder, name)


def _copies(adapter: nn.Module) -> Any:
    """Copies of a module by the name of the adapter that trains them; may be empty."""
    return adapter._modules.get("modules_to_save", {}) if _is_wrapper(adapter) else {}


class ColumnAdapter(ParallelLayer):
    """Class in front of a ``lora.Linear`` around a column-parallel layer.

    What it gives to the layer and to ``A`` has gradients that are summed over tp, once for all that
    take the same input.
    """

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        topology = self.topology
        if topology is not None and topology.tp.size > 1:
            base = base_layer(self)
            assert isinstance(base, AdoptedLinear)
            x = whole(x) if base.held == "whole" else entered_once(x, topology.tp)
        out: Tensor = own_class(self).forward(self, x, *args, **kwargs)
        return out


class PartDropout(ParallelLayer, nn.Dropout):
    """Class in front of a dropout before ``A`` whose input is this rank's part of the features.

    Attributes:
        of_sequence: whether it is a part of the sequence instead, under sequence parallelism only.
    """

    of_sequence: bool = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        topology = self.topology
        divided = topology is not None and (topology.sequence_parallel or not self.of_sequence)
        # Whatever is split as a `SplitTensor` draws from that stream itself.
        with random_stream(topology, sharded=divided and split_of(x) is None):
            return F.dropout(x, self.p, self.training, self.inplace)


class EmbeddingAdapter(nn.Module):
    """Class in front of a ``lora.Embedding`` around a vocabulary-parallel embedding."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Product that merging adds to this rank's rows."""
        delta: Tensor = own_class(self).get_delta_weight(self, adapter)  # type: ignore[attr-defined]
        base = base_layer(self)
        assert isinstance(base, AdoptedEmbedding)
        shard = base.tensor_shards.get("weight")
        if base.topology is None or shard is None or shard.dim is None:
            return delta
        return delta.narrow(0, shard.offset, shard.full_shape[0] // base.topology.tp.size)


def join_adapters(module: nn.Module) -> None:
    """Give the parts of all adapters in ``module`` the roles that follow from their base layers.

    Calling it again changes nothing.
    """
    for layer in filter(is_tuner, module.modules()):
        base = base_layer(layer)
        if is_lora(layer, "Linear"):
            _join(layer, base)
        elif is_lora(layer, "Embedding") and has_split_rows(base):
            become(layer, EmbeddingAdapter)


def base_layer(adapter: nn.Module) -> nn.Module:
    """Return the layer that an adapter surrounds."""
    holder, name = _inside(adapter)
    inner = holder._modules[name]
    assert inner is not None
    return inner


def is_lora(layer: nn.Module, name: str) -> bool:
    """Whether a layer is of this class of PEFT's LoRA."""
    return isinstance(layer, getattr(sys.modules.get("peft.tuners.lora.layer"), name, ()))


def has_split_rows(module: nn.Module) -> bool:
    """Whether a module is an embedding that is split by rows."""
    return isinstance(module, AdoptedEmbedding) and module.by_rows


def _join(lora: Any, base: nn.Module) -> None:
    """Give the parts of one ``lora.Linear`` their roles."""
    for name in lora.lora_A:
        a, b, dropout = lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]
        if isinstance(base, AdoptedLinear) and base.placement == "column":
            become(lora, ColumnAdapter)
            undivided = base.sharding.undivided
            as_sharded(a, Sharding(parts=base.parts, undivided=undivided, sums="always"), Sharded)
            as_linear(b, replace(base.split, is_entered=True))
        elif isinstance(base, AdoptedLinear) and base.placement == "row":
            as_linear(a, replace(base.split, of_heads=False))
            if isinstance(dropout, nn.Dropout) and not base.split.splits_input:
                become(dropout, PartDropout)
        elif isinstance(base, ColumnParallelLinear | RowParallelLinear):
            join_own(a, b, base)
            if isinstance(dropout, nn.Dropout):
                part = become(dropout, PartDropout)
                part.of_sequence = isinstance(base, ColumnParallelLinear)
        elif is_summed(base):
            for matrix in (a, b):
                as_sharded(matrix, base.sharding, Sharded)
        if name in lora.lora_magnitude_vector:
            _join_magnitude(lora.lora_magnitude_vector[name], base)


def _join_magnitude(magnitude: nn.Module, base: nn.Module) -> None:
    if is_split(base):
        as_magnitude(magnitude, base)
    elif is_summed(base):
        as_sharded(magnitude, base.sharding, Sharded)


def is_split(base: nn.Module) -> TypeGuard[AdoptedLinear]:
    """Whether an adopted layer gives each rank some of its features."""
    return isinstance(base, AdoptedLinear) and base.placement != "whole"


def is_summed(base: nn.Module) -> TypeGuard[Sharded]:
    """Whether a layer is whole, and applied to a part on each rank."""
    return isinstance(base, Sharded) and base.sharding.sums != "never"


class AdapterMagnitude(Sharded):
    """Class in front of PEFT's ``DoraLinearLayer``, whose weight ``[out]`` are the magnitudes.

    Attributes:
        of_rows: whether the base layer is row-parallel.
    """

    weight: nn.Parameter
    of_rows: bool

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """Norm of each row of ``weight + scaling * lora_weight``, of which this rank has a part."""
        own: Any = own_class(self)
        norm: Tensor = own.get_weight_norm(
            self, weight, lora_weight, scaling, adapter_name=adapter_name
        )
        return self._over_ranks(norm)

    def _over_ranks(self, norm: Tensor) -> Tensor:
        """Norm of whole rows, from that of this rank's part of them."""
        if self.topology is None or not self.of_rows:
            return norm
        return reduce_from(norm.detach().square(), self.topology.tp).sqrt()

    @override
    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """Part added to the output of ``base_layer``, split as it is.

        Args:
            x: input, after a dropout if there is one.
            lora_A: first matrix of the adapter.
            lora_B: second one.
            scaling: factor of their product.
            base_layer: layer that the adapter surrounds.
            base_result: its output; None where a dropout has changed ``x``.
            adapter_name: name of the adapter.
        """
        topology = self.topology
        if topology is None or topology.tp.size == 1 or self.held == "whole":
            plain: Tensor = own_class(self).forward(
                self,
                x,
                lora_A=lora_A,
                lora_B=lora_B,
                scaling=scaling,
                base_layer=base_layer,
                base_result=base_result,
                adapter_name=adapter_name,
            )
            return plain
        weight, bias = _local(base_layer)
        with torch.no_grad():
            low_rank = _local(lora_B)[0] @ lora_A.weight
            norm = torch.linalg.norm(weight + scaling * low_rank, dim=1)
            norm = self._over_ranks(norm.to(weight.dtype))
        scale = self.computed(self.weight) / norm
        if base_result is not None:
            result = base_result
        elif self.of_rows:
            result = base_layer(x)
        else:  # its input has been entered (`adoption.adapters.ColumnAdapter`)
            result = base_layer.own_features(x)
        added = lora_B(lora_A(x)) * scaling
        if not self.of_rows:
            result, added = own_part(result), own_part(added)
        if bias is not None:
            result = result - bias
        out = (scale - 1) * result + scale * added
        split: Tensor = out if self.of_rows else lora_B.marked_output(out)
        return split


def as_magnitude(module: nn.Module, base: AdoptedLinear) -> None:
    """Split the magnitudes of DoRA as the layer is whose features they belong to, in place."""
    of_rows = base.placement == "row"
    split = Sharding(dims={"weight": 0}, parts=base.parts, undivided=base.sharding.undivided)
    as_sharded(module, Sharding() if of_rows else split, AdapterMagnitude).of_rows = of_rows


def _local(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight ``[out, in]`` and bias of the features that this rank computes."""
    if isinstance(layer, AdoptedLinear):
        return layer.local_parameters()
    return layer.weight, layer.bias
