"""Whether a model computes the same as a pipeline, tried in one process.

Every cut between two items is made: the first stage runs to the cut, the second one from what it
sent to the end.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.adoption.classes import become
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.errors import ConfigError


def pipeline_fault(
    model: nn.Module, items: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Say what is wrong with a model as a pipeline of these items; None: nothing.

    Args:
        model: the model; a copy of it with the same weights runs, in evaluation.
        items: names of the items, in order.
        args: arguments of a call.
        kwargs: keyword arguments of the call.
    """
    weights: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    whole = copy.deepcopy(model, weights).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        expected = _tensors(whole(*args, **kwargs))
    trunk = become(whole, AdoptedTrunk)
    trunk.name_items(items)
    for cut in range(1, len(items)):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                found = _tensors(trunk.run_in_two(cut, tuple(args), dict(kwargs)))
        except ConfigError as error:
            return str(error)
        except Exception as error:
            return f"cut before {items[cut]}: {type(error).__name__}: {error}"
        if not all(map(torch.equal, found, expected)) or len(found) != len(expected):
            return f"cut before {items[cut]}: another output than that of the whole"
    return None


def _tensors(output: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
