"""Samplers that put samples of similar length together, so that little of a batch is padding.

A batch is padded to its longest sample, so a batch of lengths 10, 12 and 500 is two thirds padding.
Two samplers avoid that. Both take the length of every sample, and both have one order for all
numbers of data-parallel ranks, which follows from (seed, epoch) and is divided afterwards:

* `LengthGrouped` yields samples, like any `ResumableSampler`; the loader cuts batches of equal
  numbers of samples. It shuffles all samples, sorts windows of some dozens of batches by length,
  and shuffles the batches within each window.
* `TokenBudget` yields batches of equal numbers of *tokens*, padding included: many short samples or
  a few long ones. Time and memory of a step are then about the same for every batch.

What a batch of `TokenBudget` is. It is the batch of the *whole job*: its padded size,
samples times the longest, is at most ``tokens_per_batch``, whatever the number of ranks. Rank ``r``
of ``n`` reads ``batch[r::n]`` of the batch sorted by length, so that ranks have equally many
samples of about the same lengths, and each has a part of every batch: equally many batches.
The position in an epoch is a number of batches, which means the same under any number of ranks.

How batches are made. Samples are sorted by length, once. From the longest on, samples whose lengths
differ by at most ``max_padding`` form a group; where they do not suffice for two batches, it has
more. Its batches have as many samples as the budget allows for its longest one, rounded down to a
multiple of ``samples_multiple``, and what does not fill a batch belongs to the next group. Each
epoch shuffles the samples within each group, and then the batches of all groups. Batch sizes and
the number of batches are therefore equal in all epochs, which Lightning, having asked for the
length of a loader once, relies on. Grouping costs one sort; an epoch of ``N`` samples costs two
``randperm`` and a sort.

Why ranks divide ``samples_multiple``. Each rank needs a sample of every batch, and a loss that is
a mean over samples needs equally many on each. So the numbers of samples are multiples of
``samples_multiple``, and the number of data-parallel ranks must divide it: choose a number that all
layouts of the run divide. The samples that remain of an epoch are dropped
(``drop_last=True``) or join the last, shortest batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from lightning_megatron.data.reading.sampler import ResumableSampler
from lightning_megatron.errors import ConfigError, below_one, raise_if_any, switches, whole_numbers

Lengths = Sequence[int] | npt.NDArray[Any] | torch.Tensor
"""Length of each sample, in tokens."""


class LengthGrouped(ResumableSampler):
    """Sampler that reads samples of similar length one after the other.

    It goes into ``DataLoader(sampler=...)``, and resumes like any `ResumableSampler`, under any
    number of ranks and any batch size. Collate with `data.reading.collate.Pad`.

    Args:
        lengths: length of each sample.
        batch_size: number of samples of the whole job's batch: ``batch_size`` of the loader times
            the data-parallel ranks. Another number loads the same samples with more padding.
        window: number of batches whose samples are sorted together. More of them leave less padding
            and mix samples less.
        seed: seed of the orders.

    Raises:
        ConfigError: an option is out of range, or a length is.

    Example:
        >>> sampler = LengthGrouped([7, 1, 8, 2, 9, 3], batch_size=3)
        >>> indices = list(sampler)
        >>> sorted(sorted(indices[i : i + 3]) for i in (0, 3))
        [[0, 2, 4], [1, 3, 5]]
    """

    def __init__(
        self, lengths: Lengths, *, batch_size: int, window: int = 100, seed: int = 0
    ) -> None:
        raise_if_any(whole_numbers(1, batch_size=batch_size, window=window))
        self._lengths = torch.from_numpy(checked_lengths(lengths))
        self._batch_size = batch_size
        self._window = window
        super().__init__(len(self._lengths), seed=seed)

    def order(self) -> torch.Tensor:
        """Return all indices of the current epoch, of all ranks."""
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        shuffled = torch.randperm(self._samples, generator=generator)
        # Longest first within each window; the order of equal lengths is that of the shuffle.
        lengths = self._lengths[shuffled]
        by_length = torch.argsort(lengths, descending=True, stable=True)
        windows = by_length // (self._batch_size * self._window)
        shuffled = shuffled[by_length[torch.argsort(windows, stable=True)]]
        # Then whole batches change places within their window; an incomplete one stays the last.
        batches = self._samples // self._batch_size
        numbers = torch.randperm(batches, generator=generator)
        places = numbers[torch.argsort(numbers // self._window, stable=True)]
        whole = batches * self._batch_size
        grouped = shuffled[:whole].view(batches, self._batch_size)[places]
        return torch.cat([grouped.flatten(), shuffled[whole:]])


class _Group(NamedTuple):
    """Neighbours in the order of lengths, which are shuffled together."""

    stop: int
    """Samples until its end, counted from the longest."""
    sizes: tuple[int, ...]
    """Number of samples of each of its batches."""


class TokenBudget(Sampler[list[int]]):
    """Batch sampler whose batches, over all ranks together, have about equally many tokens.

    It goes into ``DataLoader(batch_sampler=...)``. The strategy gives each data-parallel rank its
    part of every batch, and takes the sampler back to where a checkpoint was saved, under any
    number of ranks that divides ``samples_multiple``. Collate with `data.reading.collate.Pad`.

    Args:
        lengths: length of each sample.
        tokens_per_batch: largest padded size of a batch of the whole job: the number of samples
            times the longest.
        samples_multiple: number that the number of samples of each batch is a multiple of. The
            number of data-parallel ranks must divide it.
        pad_multiple: number that padded lengths are multiples of, as in ``Pad(multiple=...)``.
        max_padding: share of a batch, at most, that is padding because samples are shuffled among
            others of similar length. More of it mixes samples better. Lengths that few samples have
            may leave more.
        shuffle: whether each epoch makes other batches and has an order of its own; otherwise the
            longest samples come first.
        drop_last: whether the samples that remain (fewer than ``samples_multiple``) are left out of
            the epoch. They join the last of the shortest batches otherwise.
        seed: seed of the orders.

    Attributes:
        samples_multiple: see above.

    Raises:
        ConfigError: an option or a length is out of range, or ``samples_multiple`` samples of the
            greatest length exceed the budget.

    Example:
        >>> lengths = [7, 1, 8, 2, 9, 3]
        >>> list(TokenBudget(lengths, tokens_per_batch=18, shuffle=False))
        [[4, 2], [0, 5], [3, 1]]
    """

    was_read = False
    """Whether a pass has begun."""

    def __init__(
        self,
        lengths: Lengths,
        *,
        tokens_per_batch: int,
        samples_multiple: int = 1,
        pad_multiple: int = 1,
        max_padding: float = 0.1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        counts = {"tokens_per_batch": tokens_per_batch, "samples_multiple": samples_multiple}
        problems = whole_numbers(1, **counts, pad_multiple=pad_multiple)
        problems += below_one(max_padding=max_padding)
        raise_if_any(problems + switches(shuffle=shuffle, drop_last=drop_last))
        given = checked_lengths(lengths)
        padded = -(-given // pad_multiple) * pad_multiple
        self._by_length = np.argsort(-padded, kind="stable")
        self._padded = padded[self._by_length]
        self._budget = tokens_per_batch
        self.samples_multiple = samples_multiple
        self._max_padding = max_padding
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self._groups = self._make_groups()
        self._batches = sum(len(group.sizes) for group in self._groups)
        options = (
            tokens_per_batch,
            samples_multiple,
            pad_multiple,
            max_padding,
            shuffle,
            drop_last,
        )
        self._digest = sha256(repr((options, seed)).encode() + given.tobytes()).hexdigest()
        self._rank, self._ranks = 0, 1
        self._epoch = self._start = self._position = 0

    @property
    def epoch(self) -> int:
        """Epoch whose order is read."""
        return self._epoch

    @property
    def sampler(self) -> "TokenBudget":
        """Itself: Lightning tells the epoch to the sampler of a batch sampler only."""
        return self

    def divided(self, rank: int, ranks: int) -> "TokenBudget":
        """Return a sampler of one rank's part of the same batches.

        Raises:
            ConfigError: the ranks cannot share the batches evenly.
        """
        raise_if_any(self.problems(ranks))
        part = copy(self)
        part._rank, part._ranks = rank, ranks
        return part

    def problems(self, ranks: int) -> list[str]:
        """Why so many data-parallel ranks cannot share the batches; nothing where they can."""
        if self.samples_multiple % ranks == 0:
            return []
        nearest = -(-self.samples_multiple // ranks) * ranks
        return [
            f"TokenBudget(samples_multiple={self.samples_multiple}) with {ranks} data-parallel "
            "ranks: these read equally many samples of every batch; nearest valid: "
            f"samples_multiple={nearest}"
        ]

    def batches(self, start: int = 0) -> Iterator[npt.NDArray[np.int64]]:
        """Batches of the current epoch, of all ranks together, each with its longest sample first.

        Args:
            start: number of batches that are skipped.
        """
        sizes = np.array([size for group in self._groups for size in group.sizes])
        stops = np.cumsum(sizes)
        ranked = np.arange(len(self._padded))
        numbers = np.arange(self._batches)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            shuffled = torch.randperm(len(self._padded), generator=generator).numpy()
            # Samples that are dropped belong to the last group: others in every epoch.
            ends = np.array([group.stop for group in self._groups[:-1]])
            ranked = shuffled[np.argsort(np.searchsorted(ends, shuffled, "right"), kind="stable")]
            numbers = torch.randperm(self._batches, generator=generator).numpy()
        return (
            self._by_length[np.sort(ranked[stops[number] - sizes[number] : stops[number]])]
            for number in numbers[start:]
        )

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        self._position = start
        self.was_read = True
        return self._parts(self.batches(start))

    def _parts(self, batches: Iterator[npt.NDArray[np.int64]]) -> Iterator[list[int]]:
        for batch in batches:
            self._position += 1
            yield batch[self._rank :: self._ranks].tolist()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, equal on every rank and in every epoch."""
        return self._batches

    def seek(self, epoch: int, consumed: int) -> None:
        """Begin the next pass in ``epoch``, after ``consumed`` batches of the whole job."""
        self._epoch = epoch
        self._start = self._position = consumed

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` at its first batch; nothing changes if it has begun already."""
        if epoch != self._epoch:
            self.seek(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, the batches handed out so far, and a digest of the lengths and options."""
        consumed = min(self._position, self._batches)
        return {"digest": self._digest, "epoch": self._epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, under any division.

        Raises:
            ConfigError: the state is of other lengths or options, which make other batches.
        """
        self.check(state)
        self.seek(state["epoch"], state["consumed"])

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` if ``state`` is that of other batches."""
        if state["digest"] != self._digest:
            raise ConfigError(
                "TokenBudget: the checkpoint is of a run with other lengths or options, whose "
                "batches held other samples, so that those which were read cannot be told from the "
                "others; nearest valid: the same samples, tokens_per_batch, samples_multiple, "
                "pad_multiple, max_padding, shuffle, drop_last and seed as before, or load the "
                "weights alone"
            )

    def _make_groups(self) -> list[_Group]:
        samples, multiple = len(self._padded), self.samples_multiple
        rest = samples % multiple
        raise_if_any(self._budget_problems(rest))
        stop, end = 0, samples - rest
        groups: list[_Group] = []
        while stop < end:
            longest = int(self._padded[stop])
            size = min(self._budget // longest // multiple * multiple, end - stop)
            shortest = longest * (1 - self._max_padding)
            similar = int(np.searchsorted(-self._padded[stop:end], -shortest, "right"))
            # Two at least, or the longest samples would meet in the same batches in all epochs.
            count = min(max(similar // size, 2), (end - stop) // size)
            stop += count * size
            groups.append(_Group(stop, (size,) * count))
        if rest and not self._drop_last:
            groups += self._with_rest(groups.pop(), rest)
        return groups

    def _with_rest(self, last: _Group, rest: int) -> list[_Group]:
        """The last group with the samples that remain in its last batch, or one of their own."""
        *sizes, size = last.sizes
        multiple, samples = self.samples_multiple, len(self._padded)
        short = multiple + rest
        longest = self._padded[last.stop - sum(last.sizes)]
        if (size + rest) * longest <= self._budget:
            return [_Group(samples, (*sizes, size + rest))]
        if short * longest <= self._budget:
            # The last batch is full: it is divided in two, as the budget allows both.
            left = size - multiple
            return [_Group(samples, (*sizes, *([left] if left else []), short))]
        # Only the shortest are short enough.
        before = (*sizes, *([size - multiple] if size > multiple else []))
        ahead = [_Group(samples - short, before)] if before else []
        return [*ahead, _Group(samples, (short,))]

    def _budget_problems(self, rest: int) -> list[str]:
        multiple, samples = self.samples_multiple, len(self._padded)
        longest = int(self._padded[0])
        least = multiple * longest
        if least > self._budget:
            return [
                f"tokens_per_batch={self._budget}, samples_multiple={multiple}: so many samples of "
                f"the greatest length, {longest}, are {least} tokens; nearest valid: "
                f"tokens_per_batch={least}, or cut long samples (Fragments, Pad(max_length=...))"
            ]
        if samples < multiple:
            return [
                f"samples_multiple={multiple} with {samples} samples: a batch has at least so "
                f"many; nearest valid: samples_multiple={samples}"
            ]
        short = multiple + rest
        least = short * int(self._padded[samples - short]) if samples >= short else 0
        if rest and not self._drop_last and least > self._budget:
            return [
                f"tokens_per_batch={self._budget}, samples_multiple={multiple}: {rest} of "
                f"{samples} samples remain and fit into no batch; nearest valid: drop_last=True, "
                f"or tokens_per_batch={least}"
            ]
        return []


def checked_lengths(lengths: Lengths) -> npt.NDArray[np.int64]:
    """Lengths as an array.

    Raises:
        ConfigError: there are none, or one is no positive whole number.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or not given.size or not np.issubdtype(given.dtype, np.integer):
        raise ConfigError(
            f"lengths of shape {given.shape} and type {given.dtype}: must be one whole number for "
            "each of at least one sample; nearest valid: lengths=[len(sample) for sample in data]"
        )
    if (lowest := int(given.min())) < 1:
        raise ConfigError(
            f"lengths[{int(given.argmin())}]={lowest}: must be at least 1; nearest valid: leave "
            "empty samples out"
        )
    return given.astype(np.int64)
