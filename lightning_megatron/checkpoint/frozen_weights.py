"""Weights that training does not change, which a checkpoint may leave out.

Where adapters are trained, the model below them comes from somewhere else and stays as it is.
``CheckpointConfig(weights="trainable")`` leaves it out of checkpoints. In its place they hold a sum
over the bits of every weight that was left out: a run that goes on from such a checkpoint has to
begin with the same weights, and an error says so where it does not.

The sum is that of the elements' bits as whole numbers, modulo 2**64. It depends neither on the
layout nor on the order of the elements.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.chunks import Chunk, parameter_names
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RANGE = 1 << 64


def frozen_names(module: nn.Module, canonical: Mapping[str, str]) -> set[str]:
    """Canonical names of the parameters of this rank that do not learn."""
    names = parameter_names(module, canonical)
    return {name for parameter, name in names.items() if not parameter.requires_grad}


def sums_of(chunks: Mapping[str, Chunk], names: Collection[str], peers: Peers) -> dict[str, int]:
    """Return the sum over the bits of each of some tensors, on every rank; collective.

    Args:
        chunks: this rank's part of the model, by name.
        names: names of the tensors of which this rank may have parts.
        peers: the ranks.
    """
    mine = {
        (name, chunk.offsets, chunk.sizes): _sum(chunk.tensor)
        for name, chunk in chunks.items()
        if name in names
    }

    def add(everyone: list[dict[Any, int]]) -> dict[str, int]:
        once = {place: value for sums in reversed(everyone) for place, value in sums.items()}
        found: dict[str, int] = {}
        for (name, _, _), value in once.items():
            found[name] = (found.get(name, 0) + value) % _RANGE
        return found

    return peers.run("the sums of frozen weights", lambda: mine, add)


def _sum(tensor: Tensor) -> int:
    whole_numbers = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return int(whole_numbers.sum(dtype=torch.int64).item()) % _RANGE


def check_sums(stored: Mapping[str, int], found: Mapping[str, int], what: str) -> None:
    """Compare weights that a checkpoint has left out with those of the module.

    Args:
        stored: sums in the checkpoint.
        found: sums of the module.
        what: beginning of the message.

    Raises:
        ConfigError: the module has others, or lacks some.
    """
    other = [name for name, value in stored.items() if found.get(name) != value]
    if other:
        lacking = [name for name in other if name not in found]
        named = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
        raise ConfigError(
            f"{what}: checkpoint.weights='trainable' left out {len(stored)} weights that do not "
            f"learn, and {len(other)} of them "
            f"{'are not in the module' if len(lacking) == len(other) else 'differ'} ({named}); "
            "nearest valid: the model that training began with, loaded before the run, in the same "
            "number format"
        )
