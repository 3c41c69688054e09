"""Copies of the same tensors on several ranks, compared bit for bit.

Data-parallel ranks that replicate weights start from equal bits and make equal updates, so they
stay equal, as do tensor-parallel ranks in what they all hold (norms, biases). A bit that flips in
one rank's memory, or a core that computes wrongly now and then, ends that for good: from then on
the ranks train different models and average their gradients, and nothing else shows it (the Llama 3
report, arXiv 2407.21783, counts six such silent corruptions in 54 days).

What is compared is a *fingerprint* of each tensor, made where it lies, by reading it once. Its bits
are taken as integers ``x``, in rows of `COLUMNS`, and

    fingerprint = sum_ij x_ij * w_j   (mod 2**64),   w_j odd

so that a single flipped bit, which changes it by ``2**k * w_j``, is always seen, and any other
difference but for one in 2**64 or an exchange of rows. Fingerprints of tensors that the same ranks
hold are condensed into one number, which these ranks compare; only if it differs do they compare
tensor by tensor. The bits of most ranks are the right ones. Of two that differ, nobody can tell.
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
"""Which ranks hold a tensor: the axes along which they differ, and the lowest of them."""

COLUMNS = 1024
_ODD = 0x9E3779B97F4A7C15
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor of which other ranks hold copies."""

    name: str
    """The parameter, or what the optimizer keeps of it; the same for all holders."""
    tensor: Tensor
    """What this rank holds: plain."""
    holders: Holders
    """Who holds the same."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor whose copies are not equal."""

    name: str
    holders: Holders
    """Who holds it."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks whose copies are equal, the largest group first."""

    @property
    def wrong(self) -> tuple[int, ...]:
        """Ranks whose bits are not those of most; empty where no bits are those of most."""
        total = sum(map(len, self.groups))
        if 2 * len(self.groups[0]) <= total:
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that other bits would make another: int64, on the tensor's device, not waited for.

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
        # Where it lies must not matter, as it is another place on every rank.
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
    """The fingerprints of many tensors; waits for each device once."""
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


def condense(held: Sequence[Held], prints: Sequence[int]) -> dict[Holders, str]:
    """One number for all tensors that the same ranks hold."""
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
    """Keys that ranks know different values of.

    Args:
        everyone: of each rank, what it knows.

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
    """The tensors whose copies differ, in an order that is the same on every rank.

    Args:
        everyone: of each rank, fingerprints by holders and name.
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
    """The ranks that hold wrong bits, the most frequent first."""
    counts = Counter(rank for one in found for rank in one.wrong)
    return [rank for rank, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


@cache
def _weights(device: torch.device) -> Tensor:
    odd = [((2 * i + 1) * _ODD) % 2**64 for i in range(COLUMNS)]
    signed = [value - 2**64 if value >= 2**63 else value for value in odd]
    return torch.tensor(signed, dtype=torch.int64, device=device)
