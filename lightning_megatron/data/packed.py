"""Rows of a corpus as samples of a language model.

A row is ``seq_len`` tokens of one or more documents (`data.packing`). The label of a token is the
next token of its document. -100, which no loss counts, stands where there is none: at the end of a
document, on padding, and, in data with answers, before tokens that are not part of one.

The rows of a batch are written into one array for all of them: ``__getitems__``, which a DataLoader
asks for a whole batch, returns `Rows`, and `collate_rows` takes the batch out of them as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_megatron.data.packing import Packing
from lightning_megatron.data.tokens.corpus import Corpus
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
        self._padding = padding if padding is not None else corpus.eos_id or 0
        self._vocab_size = vocab_size or corpus.vocab_size
        self._goes_on = corpus.lengths[packing.documents] > packing.stops

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
        return read_rows([(self, index) for index in indices])

    def write(self, index: int, row: Mapping[str, Any]) -> None:
        """Write a row into arrays `[seq_len]`.

        Args:
            index: number of the row.
            row: `tokens`, `labels`, and `documents` if they are wanted.
        """
        packing, corpus, at = self.packing, self.corpus, 0
        tokens, labels, documents = row["tokens"], row["labels"], row.get("documents")
        first, last = packing.offsets[index : index + 2].tolist()
        pieces = slice(first, last)
        columns = (packing.documents, packing.starts, packing.stops, self._goes_on)
        number = -1
        for number, (document, start, stop, more) in enumerate(
            zip(*(column[pieces].tolist() for column in columns), strict=True)
        ):
            read = corpus.read(document, start, stop + more)
            answers = corpus.mask(document, start, stop + more)
            end = at + stop - start
            tokens[at:end] = read[: stop - start]
            labels[at : at + len(read) - 1] = read[1:]
            labels[at + len(read) - 1 : end] = IGNORED
            if answers is not None:
                labels[at : at + len(read) - 1][answers[1:] == 0] = IGNORED
            if documents is not None:
                documents[at:end] = number
            at = end
        if at < packing.capacity:
            tokens[at:] = self._padding
            labels[at:] = IGNORED
            if documents is not None:
                documents[at:] = number + 1
        self._check(index, tokens[:at])

    def _check(self, index: int, tokens: Any) -> None:
        limit = self._vocab_size
        if len(tokens) and (tokens.min() < 0 or (limit is not None and tokens.max() >= limit)):
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            documents = sorted({document for document, _, _ in self.packing.row(index)})
            raise TokenFileError(
                f"{self.corpus.path}: token {wrong} in one of the documents {documents}, where the "
                f"vocabulary has {limit} tokens; `lightning-megatron data verify` finds what is "
                "damaged, and another tokenizer needs `lightning-megatron preprocess` again"
            )


class BlendedTokens(Dataset[dict[str, Tensor]]):
    """Rows of several corpora, numbered one corpus after the other.

    Args:
        sources: rows of each corpus, of one length.
    """

    draws_random_numbers = False

    def __init__(self, sources: Sequence[PackedTokens]) -> None:
        self.sources = list(sources)
        self._ends = np.cumsum([len(source) for source in sources], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample: dict[str, Tensor] = self.__getitems__([index])[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return several rows."""
        places = np.searchsorted(self._ends, indices, side="right").tolist()
        return read_rows(
            [
                (self.sources[place], index - int(self._ends[place]) + len(self.sources[place]))
                for place, index in zip(places, indices, strict=True)
            ]
        )


def read_rows(rows: Sequence[tuple[PackedTokens, int]]) -> Rows:
    """Read rows of corpora into one batch."""
    source = rows[0][0]
    names = ("tokens", "labels", *(("documents",) if source.documents else ()))
    shape = (len(rows), source.packing.capacity)
    batch = {name: np.empty(shape, dtype=np.int64) for name in names}
    for number, (tokens, index) in enumerate(rows):
        tokens.write(index, {name: batch[name][number] for name in names})
    return Rows({name: torch.from_numpy(array) for name, array in batch.items()})
