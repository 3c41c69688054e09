"""Operations of the items of a trunk, counted by running them on the meta device.

A meta tensor has a shape and no values, so a forward pass on it computes nothing and costs
milliseconds whatever the size. Each item is run on the output of the one before while
``torch.utils.flop_counter`` counts matrix products, convolutions and attention: those of parallel
layers, not yet split, and those of the user's own modules. A mixture of experts counts those of the
experts that a token uses, whichever these are. What else an item does counts one
operation for each element of its output, so that an embedding or a norm is not free. Behind the
last item comes the loss: a cross entropy over the vocabulary takes `LOSS_OPERATIONS` per element of
the trunk's output.

Only the forward is counted: the backward of products takes twice as long, on every item.

Running an item takes an input. That of the first is guessed from its first layer (tokens for an
embedding, features for a linear layer), or is Lightning's ``example_input_array``. An item may tell
its operations itself, by a method ``flops(sequence_length)`` for one sequence. One that neither
tells nor runs (it looks at values, or needs further arguments) is taken for dense: 2 operations per
parameter and token.
"""

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron._torch.graphs import tree_flatten, tree_map
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.layers.sequential import PipelineSequential

log = logging.getLogger(__name__)

LOSS_OPERATIONS = 5
"""Operations of a cross entropy per logit: maximum, difference, exponential, sum, pick."""


@dataclass(frozen=True)
class ItemFlops:
    """Operations of the forward of every item, for one microbatch of one sample."""

    flops: tuple[float, ...]
    """Operations of the items, in order; the last with the loss."""
    estimated: tuple[str, ...]
    """Names of the items that could not be run."""


def count_item_flops(
    trunk: PipelineSequential, sequence_length: int | None, example: Any = None
) -> ItemFlops:
    """Count the operations of every item; neither the items nor random numbers are touched.

    Args:
        trunk: whole and not yet split; its parameters may be on any device.
        sequence_length: tokens of a sample; None takes the example as it is.
        example: what the trunk is called with, tensors of any device; a tuple holds several
            arguments.
    """
    args, samples, tokens = _as_arguments(example, sequence_length)
    flops: list[float] = []
    estimated: list[str] = []
    made = 0
    with torch.random.fork_rng(devices=[]):
        for name, item in zip(trunk.item_names, trunk.items(), strict=True):
            own = getattr(item, "flops", None)
            run = _run(name, item, _inputs(item, args, sequence_length, first=not flops))
            if run is not None:
                output, counted = run
                args = (output,)
                made = _numel(output)
            if callable(own):
                flops.append(own(tokens // samples) * samples)
            elif run is not None:
                flops.append(counted + made)
            else:
                estimated.append(name)
                flops.append(2 * tokens * sum(p.numel() for p in item.parameters()))
        if run is not None:
            flops[-1] += LOSS_OPERATIONS * made
    return ItemFlops(tuple(flops), tuple(estimated))


def _as_arguments(example: Any, length: int | None) -> tuple[tuple[Any, ...] | None, int, int]:
    """The example as arguments on the meta device, its samples, and its tokens in all."""
    tensors = [leaf for leaf in tree_flatten(example)[0] if isinstance(leaf, Tensor)]
    if length is not None or not tensors:
        return _to_meta(example) if tensors else None, 1, length or 1
    first = tensors[0]
    samples = first.shape[0] if first.ndim > 1 else 1
    features = first.shape[-1] if first.is_floating_point() and first.ndim > 1 else 1
    tokens = max(first.numel() // max(features, 1), 1)
    return _to_meta(example), max(samples, 1), tokens


def _to_meta(example: Any) -> tuple[Any, ...]:
    moved = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, example)
    return moved if isinstance(moved, tuple) else (moved,)


def _inputs(
    item: nn.Module, args: tuple[Any, ...] | None, length: int | None, *, first: bool
) -> Iterator[tuple[Any, ...]]:
    """Arguments to try: what the item before made, and what the item seems to take."""
    guessed = None if length is None else _guess(item, length)
    candidates = [args, guessed]
    # An example has a length of its own, so one that is asked for goes first.
    yield from (c for c in (reversed(candidates) if first else candidates) if c is not None)


def _guess(item: nn.Module, length: int) -> tuple[Tensor] | None:
    """An input of one sample of ``length`` tokens, from the first layer that tells."""
    for layer in item.modules():
        weight = getattr(layer, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.get_default_dtype()
        if hasattr(layer, "num_embeddings"):
            return (torch.zeros(1, length, dtype=torch.long, device="meta"),)
        if isinstance(layer, nn.Conv1d):
            return (torch.zeros(1, layer.in_channels, length, dtype=dtype, device="meta"),)
        if isinstance(layer, nn.MultiheadAttention):
            shape = (1, length) if layer.batch_first else (length, 1)
            return (torch.zeros(*shape, layer.embed_dim, device="meta"),)
        features = getattr(layer, "in_features", None)
        if features is None and isinstance(weight, Tensor) and weight.ndim == 1:
            features = weight.numel()  # a norm
        if isinstance(layer, Router):
            features = layer.weight.shape[1]
        if isinstance(features, int):
            return (torch.zeros(1, length, features, dtype=dtype, device="meta"),)
    return None


def _run(name: str, item: nn.Module, inputs: Iterator[tuple[Any, ...]]) -> tuple[Any, float] | None:
    """Output and operations on the first of ``inputs`` that the item takes; None without one."""
    for args in inputs:
        try:
            # Autograd stays on: without it torch's own encoder layers take a path of their own.
            with warnings.catch_warnings(), torch.enable_grad(), torch.device("meta"):
                warnings.simplefilter("ignore")  # they come again when there is something to see
                copied = _on_meta(item)
                with FlopCounterMode(display=False) as counter:
                    output = copied(*_cast(args, copied))
        except Exception as error:  # whatever a user's module raises where there are no values
            log.debug("item %s does not run on the meta device: %s", name, error)
            continue
        if _numel(output):
            output = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)
            return output, counter.get_total_flops()
    return None


def _on_meta(item: nn.Module) -> nn.Module:
    """A copy on the meta device, in evaluation mode; values are not copied."""
    replaced: dict[int, Any] = {}
    plain = (value for module in item.modules() for value in vars(module).values())
    for value in itertools.chain(item.parameters(), item.buffers(), plain):
        if isinstance(value, nn.Parameter):
            replaced[id(value)] = nn.Parameter(value.detach().to("meta"), value.requires_grad)
        elif isinstance(value, Tensor):
            replaced[id(value)] = value.detach().to("meta")
    return copy.deepcopy(item, replaced).eval()


def _cast(args: tuple[Any, ...], item: nn.Module) -> tuple[Any, ...]:
    """Floating-point ``args`` in the type of the item's parameters."""
    dtype = next((p.dtype for p in item.parameters() if p.is_floating_point()), None)
    if dtype is None:
        return args
    cast: tuple[Any, ...] = tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, args
    )
    return cast


def _numel(output: Any) -> int:
    return sum(math.prod(x.shape) for x in tree_flatten(output)[0] if isinstance(x, Tensor))
