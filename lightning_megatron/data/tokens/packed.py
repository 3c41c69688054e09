"""Rows of a corpus as samples of a language model.

A row is ``seq_len`` tokens of one or more documents (`data.tokens.packing`). The label of a token
is the next token of its document. -100, which no loss counts, stands where there is none: at the
end of a document, on padding, and, in data with answers, before tokens that are not part of one.

The rows of a batch are written into one array for all of them: ``__getitems__``, which a DataLoader
asks for a whole batch, returns `Rows`, and `collate_rows` takes the batch out of them as it is.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.packing import Packing
from lightning_megatron.errors import TokenFileError

IGNORED = -100
"""Label of a token that predicts nothing."""


class Rows(Sequence[dict[str, Tensor]]):
    """Samples that are parts of one batch.

    Args:
        batch: tensors with one row for each sample.
    """

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = dict(batch)

    def __len__(self) -> int:
        """Number of samples."""
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: Any) -> Any:
        """Return one sample."""
        return {name: tensor[index] for name, tensor in self.batch.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(len(self)))


def collate_rows(samples: Any) -> Any:
    """Make a batch; for a DataLoader's ``collate_fn``."""
    return samples.batch if isinstance(samples, Rows) else default_collate(samples)


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Rows of one corpus.

    A sample is a dict of `tokens` and `labels`, int64 `[seq_len]`, and if asked for `documents`,
    int64 `[seq_len]`: the number within the row of each token's document, or of the padding.

    Args:
        corpus: tokens.
        packing: contents of the rows.
        documents: whether samples say which document each token is of.
        padding: token at the end of rows that are not full.
        vocab_size: number that tokens must be below; None for that of the corpus, if it knows it.

    Raises:
        TokenFileError: on reading a row with a token outside of the vocabulary.
    """

    draws_random_numbers = False

    def __init__(
        self,
        corpus: Corpus,
        packing: Packing,
        *,
        documents: bool = False,
        padding: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.corpus = corpus
        self.packing = packing
        self.documents = documents
        self.padding = padding if padding is not None else corpus.eos_id or 0
        self.vocab_size = vocab_size or corpus.vocab_size
        self._pieces: _Pieces | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.packing)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample: dict[str, Tensor] = self.__getitems__([index])[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return several rows."""
        if self._pieces is None:
            self._pieces = _Pieces([self])
        return self._pieces.read(indices)


class BlendedTokens(Dataset[dict[str, Tensor]]):
    """Rows of several corpora, numbered one corpus after the other.

    Args:
        sources: rows of each corpus, of one length.
    """

    draws_random_numbers = False

    def __init__(self, sources: Sequence[PackedTokens]) -> None:
        self._pieces = _Pieces(sources)

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample: dict[str, Tensor] = self._pieces.read([index])[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return several rows."""
        return self._pieces.read(indices)


class _Pieces:
    """Where the pieces of all rows are, as if the shards of all corpora were one file.

    21 bytes for each piece, so that a batch is read with one copy per piece and a few operations on
    all of it. A shard is mapped when it is first read from.
    """

    def __init__(self, sources: Sequence[PackedTokens]) -> None:
        first = sources[0]
        self._capacity = first.packing.capacity
        self._documents = first.documents
        self._padding = first.padding
        limits = [source.vocab_size for source in sources if source.vocab_size is not None]
        self._vocab_size = min(limits, default=None)
        self._shards = [(s.corpus, i) for s in sources for i in range(len(s.corpus.shards))]
        sizes = [shard.tokens for source in sources for shard in source.corpus.shards]
        self._bases = np.cumsum([0, *sizes], dtype=np.int64).tolist()[:-1]
        self._mapped: list[tuple[Any, Any] | None] = [None] * len(self._shards)
        counts = [len(source.packing.documents) for source in sources]
        before = np.cumsum([0, *counts], dtype=np.int64)
        offsets = [s.packing.offsets[:-1] + n for s, n in zip(sources, before, strict=False)]
        self._offsets = np.concatenate([*offsets, before[-1:]])
        self._sizes = np.concatenate([s.packing.stops - s.packing.starts for s in sources])
        self._goes_on = np.concatenate(
            [s.corpus.lengths[s.packing.documents] > s.packing.stops for s in sources]
        )
        self._places = np.empty(len(self._sizes), dtype=np.int64)
        shard = 0
        for source, begin, end in zip(sources, before, before[1:], strict=False):
            shard = self._find(source, self._places[begin:end], shard)

    def _find(self, source: PackedTokens, places: Any, shard: int) -> int:
        """Fill in where the pieces of a source are; returns the first shard of the next."""
        corpus, documents = source.corpus, source.packing.documents
        ends = np.cumsum([s.documents for s in corpus.shards], dtype=np.int64)
        # Pieces come in any order: take those of a shard together.
        order = np.argsort(documents, kind="stable") if len(ends) > 1 else None
        known = documents if order is None else documents[order]
        bounds = np.searchsorted(known, ends)
        begin = 0
        for number, end in enumerate(bounds.tolist()):
            these = slice(begin, end) if order is None else order[begin:end]
            within = documents[these] - (ends[number - 1] if number else 0)
            found = corpus.shard(number).places(within) + source.packing.starts[these]
            places[these] = found + self._bases[shard + number]
            begin = end
        return shard + len(ends)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is mapped: workers map it anew."""
        return {**vars(self), "_mapped": [None] * len(self._shards)}

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, rows: Sequence[int]) -> Rows:
        """Read rows into one batch."""
        indices = np.asarray(rows, dtype=np.int64)
        firsts = self._offsets[indices]
        counts = self._offsets[indices + 1] - firsts
        ends = np.cumsum(counts)
        number = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # of a piece in its row
        pieces = np.repeat(firsts, counts) + number
        sizes, places = self._sizes[pieces], self._places[pieces]
        filled = np.cumsum(sizes, dtype=np.int64)
        lengths = np.diff(filled[ends - 1], prepend=0)
        starts = np.arange(len(indices)) * self._capacity
        at = filled - sizes + np.repeat(starts - (filled[ends - 1] - lengths), counts)
        names = ("tokens", "labels", *(("documents",) if self._documents else ()))
        # One block: the next one gets the same pages again. Of several, the pages would go back to
        # the system each time, and mapping them costs more than all of the copying.
        block = np.empty((len(names), len(indices), self._capacity), dtype=np.int64)
        batch = dict(zip(names, block, strict=True))
        tokens, labels = batch["tokens"], batch["labels"]
        flat, targets = tokens.reshape(-1), labels.reshape(-1)
        spans = [*zip(at.tolist(), sizes.tolist(), places.tolist(), strict=True)]
        views = [self._at(place) for *_, place in spans]
        for (first, size, _), (view, _, place) in zip(spans, views, strict=True):
            flat[first : first + size] = view[place : place + size]
        short = np.flatnonzero(lengths < self._capacity).tolist()
        for row in short:
            tokens[row, lengths[row] :] = self._padding
        self._check(flat, spans)
        targets[:-1] = flat[1:]
        last = at + sizes - 1
        targets[last] = IGNORED
        cut = np.flatnonzero(self._goes_on[pieces])
        for piece in cut.tolist():
            view, _, place = views[piece]
            targets[last[piece]] = view[place + spans[piece][1]]
        if len(cut):  # a lone token at the end of a document is in no row but as this label
            following = (places[cut] + sizes[cut]).tolist()
            self._check(targets[last[cut]], [(i, 1, place) for i, place in enumerate(following)])
        for (first, size, _), (_, answers, place) in zip(spans, views, strict=True):
            if answers is not None:  # of the tokens that are the labels
                none = answers[place + 1 : place + size + 1] == 0
                targets[first : first + len(none)][none] = IGNORED
        for row in short:
            labels[row, lengths[row] :] = IGNORED
        if self._documents:
            documents = batch["documents"].reshape(-1)
            for (first, size, _), document in zip(spans, number.tolist(), strict=True):
                documents[first : first + size] = document
            for row in short:
                batch["documents"][row, lengths[row] :] = counts[row]
        return Rows({name: torch.from_numpy(array) for name, array in batch.items()})

    def _at(self, place: int) -> tuple[Any, Any, int]:
        """Tokens of the shard at a place, its answers if it has any, and the place within it."""
        shard = bisect_right(self._bases, place) - 1
        mapped = self._mapped[shard]
        if mapped is None:
            corpus, number = self._shards[shard]
            file = corpus.shard(number)
            mapped = self._mapped[shard] = file.tokens, file.answers
        return *mapped, place - self._bases[shard]

    def _check(self, flat: Any, spans: Sequence[tuple[int, int, int]]) -> None:
        limit = self._vocab_size
        if flat.min() >= 0 and (limit is None or flat.max() < limit):
            return
        for first, size, place in spans:
            piece = flat[first : first + size]
            wrong = np.flatnonzero((piece < 0) | (piece >= (2**62 if limit is None else limit)))
            if len(wrong):
                shard = bisect_right(self._bases, place) - 1
                corpus, number = self._shards[shard]
                at = place - self._bases[shard] + int(wrong[0])
                raise TokenFileError(
                    f"{corpus.shard(number).prefix}.bin: token {at:,} is {piece[wrong[0]]}, and "
                    f"the vocabulary has {limit} tokens; `lightning-megatron data verify` finds "
                    "what is damaged, and another tokenizer needs `preprocess` again"
                )
