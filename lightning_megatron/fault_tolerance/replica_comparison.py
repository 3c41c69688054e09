"""Comparison of copies of tensors on several ranks by fingerprints.

Data-parallel ranks that replicate weights start from equal bits and make equal updates, so they
stay equal, and so do tensors that all tensor-parallel ranks hold (norms, biases). A flipped bit in
one rank's memory, or a core that now and then computes wrongly, ends that: the ranks then train
different models and average their gradients, and nothing else shows it (the Llama 3 report, arXiv
2407.21783, counts six such silent corruptions in 54 days).

The ranks compare a *fingerprint* of each tensor, computed on its device by reading it once. The
bits are integers ``x`` in rows of `COLUMNS`, and

    fingerprint = sum_ij x_ij * w_j   (mod 2**64),   w_j odd

A single flipped bit changes it by ``2**k * w_j`` and is always seen; other differences are seen but
for one in 2**64 and exchanges of rows. The fingerprints of all tensors that the same ranks hold are
condensed into one number; only if it differs do these ranks compare tensor by tensor. The bits of
the majority are right; two ranks that differ have none.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Holders = tuple[tuple[str, ...], int]
"""Ranks that hold a tensor, as the axes along which they differ and the lowest rank."""

COLUMNS = 1024
_ODD = 0x9E3779B97F4A7C15
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """Tensor of this rank of which other ranks hold copies."""

    name: str
    """Name of the parameter or optimizer state; the same for all holders."""
    tensor: Tensor
    """Plain local tensor."""
    holders: Holders
    """Ranks that hold it."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Tensor whose copies are not equal."""

    name: str
    holders: Holders
    """Ranks that hold it."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks whose copies are equal, the largest group first."""

    @property
    def wrong(self) -> tuple[int, ...]:
        """Ranks outside the majority; empty without a majority."""
        total = sum(map(len, self.groups))
        if 2 * len(self.groups[0]) <= total:
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))


def fingerprint(tensor: Tensor) -> Tensor:
    """Fingerprint of a tensor: int64 on its device, without synchronization.

    >>> a, b = torch.zeros(3), torch.zeros(3)
    >>> b.view(torch.int32)[1] = 1
    >>> bool(fingerprint(a) == fingerprint(b)), bool(fingerprint(a) == fingerprint(a.clone()))
    (False, True)
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if (flat.numel() * size) % 8 == 0:  # fewer words, and no conversion
        # The result must not depend on the offset, which differs between ranks.
        flat, size = flat if (flat.storage_offset() * size) % 8 == 0 else flat.clone(), 8
    words = flat.view(_WORDS[size])
    weights = _weights(tensor.device)
    rows = words.numel() // COLUMNS
    rest = words[rows * COLUMNS :]
    result = (rest.to(torch.int64) * weights[: rest.numel()]).sum()
    if rows:
        columns = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0, dtype=torch.int64)
        result = result + (columns * weights).sum()
    return result


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Fingerprints of many tensors; waits for each device once."""
    found = [fingerprint(tensor) for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for index, value in enumerate(found):
        places.setdefault(value.device, []).append(index)
    result = [0] * len(found)
    for indices in places.values():
        values = torch.stack([found[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            result[index] = int(value)
    return result


def condense(held: Sequence[SharedTensor], prints: Sequence[int]) -> dict[Holders, str]:
    """Digest of all tensors that the same ranks hold, by these ranks."""
    by_holders: dict[Holders, list[tuple[str, int]]] = {}
    for one, value in zip(held, prints, strict=True):
        by_holders.setdefault(one.holders, []).append((one.name, value))
    return {
        holders: hashlib.blake2b(
            array("q", [value for _, value in sorted(pairs)]).tobytes(), digest_size=8
        ).hexdigest()
        for holders, pairs in by_holders.items()
    }


def unequal(everyone: Sequence[Mapping[Any, Any]]) -> set[Any]:
    """Keys with different values on different ranks.

    Args:
        everyone: values of each rank.

    >>> unequal([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"c": 4}])
    {'b'}
    """
    first: dict[Any, Any] = {}
    found = set()
    for known in everyone:
        for key, value in known.items():
            if first.setdefault(key, value) != value:
                found.add(key)
    return found


def differences(everyone: Sequence[Mapping[tuple[Holders, str], int]]) -> list[Difference]:
    """Tensors whose copies differ, in the same order on every rank.

    Args:
        everyone: fingerprints of each rank, by holders and name.
    """
    found = []
    for key in sorted(unequal(everyone)):
        groups: dict[int, list[int]] = {}
        for rank, known in enumerate(everyone):
            if key in known:
                groups.setdefault(known[key], []).append(rank)
        ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
        found.append(Difference(name=key[1], holders=key[0], groups=tuple(map(tuple, ordered))))
    return found


def suspects(found: Iterable[Difference]) -> list[int]:
    """Ranks that hold wrong bits, the most frequent first."""
    counts = Counter(rank for one in found for rank in one.wrong)
    return [rank for rank, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


@cache
def _weights(device: torch.device) -> Tensor:
    odd = [((2 * i + 1) * _ODD) % 2**64 for i in range(COLUMNS)]
    signed = [value - 2**64 if value >= 2**63 else value for value in odd]
    return torch.tensor(signed, dtype=torch.int64, device=device)
