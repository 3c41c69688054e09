"""Batches of samples of unequal length: padding, truncation, and fragments of long samples.

* `Pad` is a ``collate_fn`` that pads samples to a common length: the longest of the batch, rounded
  up to a multiple (of 8 for tensor cores, of the tensor- and context-parallel degrees where a
  sequence is split), or the next of a few given lengths, so that compiled code sees few shapes.
* `Fragments` is a dataset that cuts long samples of another one into overlapping pieces.

Padding is at the end. There it has no influence in a causal model: no token sees a later one, its
labels are -100, and the loss of `LanguageModel` is that of the tokens that count.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_megatron.data.reading.lengths import Lengths, checked_lengths
from lightning_megatron.errors import ConfigError, raise_if_any, switches, whole_numbers

LENGTHS = "lengths"
"""Key of a batch under which `Pad` says how long its samples are without padding."""
IGNORED = -100
"""Label of a token that has no loss."""
_VALUES: Mapping[str, float] = {"labels": IGNORED, "documents": -1}
"""What to pad with; padding is a document of its own."""


class Pad:
    """Collate function for samples whose sequences have different lengths.

    A sample is a dict of tensors. Those whose first dimension is the length of the first tensor,
    such as `tokens`, `labels` and `documents`, are cut and padded; all others are collated as
    PyTorch does it. The batch also holds ``lengths``, int64 `[b]`: the number of tokens of
    each sample that are no padding, from which `DataMonitor` computes ``data/padding_fraction``.

    Args:
        multiple: number that the padded length is a multiple of.
        buckets: padded lengths to choose from, instead of any multiple.
        max_length: length to which longer samples are truncated at their end.
        values: what to pad with, by key; by default -100 for `labels`, -1 for
            `documents`, and 0.
        token_mask: whether the batch also holds `token_mask`, bool `[b, s]`, False for padding,
            which then goes to no expert of a mixture.

    Raises:
        ConfigError: an option is out of range; later, a sample that no bucket holds.

    Example:
        >>> samples = [{"tokens": torch.tensor([1, 2, 3])}, {"tokens": torch.tensor([4])}]
        >>> batch = Pad(multiple=4)(samples)
        >>> batch["tokens"].tolist(), batch["lengths"].tolist()
        ([[1, 2, 3, 0], [4, 0, 0, 0]], [3, 1])
    """

    def __init__(
        self,
        *,
        multiple: int = 1,
        buckets: Sequence[int] | None = None,
        max_length: int | None = None,
        values: Mapping[str, float] | None = None,
        token_mask: bool = False,
    ) -> None:
        problems = whole_numbers(1, multiple=multiple)
        problems += whole_numbers(1, **{} if max_length is None else {"max_length": max_length})
        problems += _bucket_problems(buckets, multiple, max_length)
        raise_if_any(problems + switches(token_mask=token_mask))
        self._multiple = multiple
        self._buckets = None if buckets is None else sorted(buckets)
        self._max_length = max_length
        self._values = {**_VALUES, **(values or {})}
        self._token_mask = token_mask

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of ``samples``."""
        lengths = [_length(sample) for sample in samples]
        kept = [min(length, self._max_length or length) for length in lengths]
        padded = self.padded_length(max(kept))
        batch: dict[str, Any] = {}
        for key in samples[0]:
            column = [_entry(sample, key) for sample in samples]
            if _is_sequence(column, lengths):
                pieces = zip(column, kept, strict=True)
                value = self._values.get(key, 0)
                batch[key] = _padded([piece[:length] for piece, length in pieces], padded, value)
            else:
                batch[key] = default_collate(column)
        batch[LENGTHS] = torch.tensor(kept)
        if self._token_mask:
            batch["token_mask"] = torch.arange(padded) < batch[LENGTHS][:, None]
        return batch

    def padded_length(self, longest: int) -> int:
        """Length of a batch whose longest sample has so many tokens.

        Raises:
            ConfigError: no bucket holds it.
        """
        if self._buckets is None:
            return -(-longest // self._multiple) * self._multiple
        place = bisect_left(self._buckets, longest)
        if place == len(self._buckets):
            raise ConfigError(
                f"buckets={self._buckets}: a sample has {longest} tokens; nearest valid: one more "
                f"bucket of at least {longest}, max_length={self._buckets[-1]} to truncate, or "
                "Fragments to cut long samples"
            )
        return self._buckets[place]


class Fragments(Dataset[dict[str, Any]]):
    """Dataset of the pieces of at most ``length`` tokens of another dataset's samples.

    A piece begins with the last ``overlap`` tokens of the piece before, as context: their labels
    are -100, so that every label of the sample counts once. Samples are dicts as `Pad` takes them,
    with `labels` that are shifted already. A sample is read anew for each of its pieces.

    Args:
        dataset: map-style dataset of long samples.
        lengths: length of each of its samples.
        length: largest length of a piece.
        overlap: number of tokens that a piece has in common with the one before.

    Attributes:
        lengths: length of each piece, int64 `[pieces]`, for samplers.

    Raises:
        ConfigError: an option is out of range, or ``lengths`` are not those of the dataset; on
            reading, the length of a sample is another one.

    Example:
        >>> sample = {"tokens": torch.arange(5), "labels": torch.arange(1, 6)}
        >>> pieces = Fragments([sample], [5], length=3, overlap=1)
        >>> [piece["tokens"].tolist() for piece in pieces]
        [[0, 1, 2], [2, 3, 4]]
        >>> [piece["labels"].tolist() for piece in pieces]
        [[1, 2, 3], [-100, 4, 5]]
    """

    def __init__(self, dataset: Any, lengths: Lengths, *, length: int, overlap: int = 0) -> None:
        raise_if_any(whole_numbers(1, length=length) + whole_numbers(0, overlap=overlap))
        given = checked_lengths(lengths)
        problems = []
        if overlap >= length:
            problems.append(
                f"overlap={overlap}, length={length}: a piece has tokens that the one before does "
                f"not have; nearest valid: overlap={length - 1}"
            )
        if len(given) != len(dataset):
            problems.append(
                f"lengths of {len(given)} samples for a dataset of {len(dataset)}: each has one; "
                "nearest valid: the lengths of this dataset"
            )
        raise_if_any(problems)
        self._dataset = dataset
        self._given = given
        self._length = length
        self._overlap = overlap
        self._step = length - overlap
        counts = 1 + -(-np.maximum(given - length, 0) // self._step)
        self._ends: npt.NDArray[np.int64] = np.cumsum(counts)
        sample = np.repeat(np.arange(len(given)), counts)
        first = (np.arange(len(sample)) - (self._ends - counts)[sample]) * self._step
        self.lengths: npt.NDArray[np.int64] = np.minimum(given[sample] - first, length)
        if not getattr(dataset, "draws_random_numbers", True):
            self.draws_random_numbers = False

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.lengths)

    def place(self, index: int) -> tuple[int, int, int]:
        """Sample of a piece, and where the piece begins and ends in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = int(np.searchsorted(self._ends, index, "right"))
        before = int(self._ends[sample - 1]) if sample else 0
        start = (index - before) * self._step
        return sample, start, start + int(self.lengths[index])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one piece."""
        number, start, stop = self.place(index)
        sample = self._dataset[number]
        whole = _length(sample)
        if whole != self._given[number]:
            raise ConfigError(
                f"lengths[{number}]={self._given[number]}: the sample has {whole} tokens; nearest "
                "valid: the lengths of this dataset"
            )
        piece = {
            key: value[start:stop] if _is_sequence([value], [whole]) else value
            for key, value in sample.items()
        }
        if start and self._overlap and "labels" in piece:
            piece["labels"] = piece["labels"].clone()
            piece["labels"][: self._overlap] = IGNORED
        return piece


def _length(sample: Any) -> int:
    """Length of the first tensor of a sample that is a sequence."""
    values = sample.values() if isinstance(sample, Mapping) else ()
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    raise ConfigError(
        f"a sample of type {type(sample).__name__}: must be a dict that holds a tensor with a "
        "length; nearest valid: {'tokens': tokens, 'labels': labels}"
    )


def _entry(sample: Mapping[str, Any], key: str) -> Any:
    if key not in sample:
        raise ConfigError(
            f"samples of a batch with {key!r} and without: all have the same keys; nearest valid: "
            "samples like the first of the batch"
        )
    return sample[key]


def _is_sequence(column: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether the values of a key are tensors as long as their samples."""
    return all(
        isinstance(value, Tensor) and value.ndim > 0 and len(value) == length
        for value, length in zip(column, lengths, strict=True)
    )


def _padded(pieces: Sequence[Tensor], length: int, value: float) -> Tensor:
    first = pieces[0]
    batch = first.new_full((len(pieces), length, *first.shape[1:]), value)
    for row, piece in zip(batch, pieces, strict=True):
        row[: len(piece)] = piece
    return batch


def _bucket_problems(
    buckets: Sequence[int] | None, multiple: int, max_length: int | None
) -> list[str]:
    if buckets is None:
        return []
    if not buckets:
        return ["buckets=[]: must hold a length; nearest valid: buckets=None"]
    if problems := whole_numbers(1, **{f"buckets[{i}]": b for i, b in enumerate(buckets)}):
        return problems
    problems = [
        f"buckets[{i}]={bucket}, multiple={multiple}: must be a multiple of it; nearest valid: "
        f"{-(-bucket // multiple) * multiple}"
        for i, bucket in enumerate(buckets)
        if bucket % multiple
    ]
    if max_length is not None and max_length > max(buckets):
        problems.append(
            f"max_length={max_length}, buckets={list(buckets)}: samples of that length fit into "
            f"none of them; nearest valid: max_length={max(buckets)}"
        )
    return problems
