"""Who reads the same samples: told by the first batches of a run, where the user divides the data.

The strategy divides a map-style dataset itself. An iterable dataset, or a loader of the user's own,
must give each data-parallel rank samples of its own, and the ranks of tp, cp and pp that work on
one batch the same samples; one that does not know of the ranks, or that knows only of all
processes, trains on something else, and no number shows it. A fingerprint of the first batch of
each rank does. It costs one small message in a run.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology

_REMEDY = (
    "divide the stream by trainer.strategy.data_parallel_rank and data_parallel_size, for a stream "
    "of Hugging Face's datasets split_dataset_by_node(dataset, data_parallel_rank, "
    "data_parallel_size); a map-style dataset in torch's DataLoader needs "
    "nothing"
)


_TELLING = 8
"""Number of different values from which on equal integers are no accident."""
_LOOKED_AT = 4096


def fingerprints(batch: Any) -> tuple[str, str]:
    """Hashes of a batch: of all of it, and of what no augmentation changes.

    The second is that of integers (tokens, labels) and texts, if these tell batches apart: if they
    have enough different values. Else it is the first.
    """
    whole, fixed = hashlib.sha256(), hashlib.sha256()
    values: set[Any] = set()
    for part in _leaves(batch):
        if isinstance(part, Tensor):
            flat = part.detach().cpu().contiguous().flatten()
            seen = str((tuple(part.shape), part.dtype)).encode()
            seen += flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            if not part.is_floating_point() and not part.is_complex():
                fixed.update(seen)
                values.update(flat[:_LOOKED_AT].tolist())
        else:
            seen = repr(part).encode()
            if isinstance(part, int | str | bytes):
                fixed.update(seen)
                values.add(part)
        whole.update(seen)
    return whole.hexdigest(), (fixed if len(values) >= _TELLING else whole).hexdigest()


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)
    elif isinstance(batch, Tensor | int | float | str | bytes):
        yield batch


def compare_batches(batch: Any, names: list[str], topology: Topology, group: Any) -> None:
    """Warn where data-parallel ranks read the same; collective over all processes.

    Args:
        batch: the first of this rank.
        names: of the loaders that the user divides.
        topology: which rank this is.
        group: all processes, for objects on the host.

    Raises:
        ConfigError: ranks that work on the same batch read different samples.
    """
    mine = topology.batch.rank, *fingerprints(batch)
    found = Peers(group).all_gather(mine)
    whose = " and ".join(names)
    whole = {at: seen for at, seen, _ in reversed(found)}
    odd = [rank for rank, (at, seen, _) in enumerate(found) if whole[at] != seen]
    if odd:
        first = next(rank for rank, (at, _, _) in enumerate(found) if at == found[odd[0]][0])
        raise ConfigError(
            f"{whose}: processes {first} and {odd[0]} work on the same samples (tp, cp or pp ranks "
            "of one data-parallel rank), but read different ones; nearest valid: " + _REMEDY
        )
    same: dict[str, list[int]] = {}
    for rank, seen in sorted({at: fixed for at, _, fixed in found}.items()):
        same.setdefault(seen, []).append(rank)
    for ranks in same.values():
        if len(ranks) > 1:
            rank_zero_warn(
                f"{whose}: the first batch is the same on the data-parallel ranks {ranks}, which "
                f"then train on each sample {len(ranks)} times; " + _REMEDY
            )
