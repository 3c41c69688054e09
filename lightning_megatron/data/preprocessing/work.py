"""Work of one process: a part of the text becomes a shard.

Documents go through `encode_batch_fast` a hundred kilobytes at a time: that call, unlike the
one for single documents, does not keep the place of each token in the text, and crosses from Python
to the tokenizer once for many documents.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.preprocessing.chat import ChatEncoder, ChatFormat, RecordError
from lightning_megatron.data.preprocessing.parts import Part
from lightning_megatron.data.preprocessing.records import Record, Records
from lightning_megatron.data.preprocessing.sources import Reading, Source
from lightning_megatron.data.preprocessing.tokenizer import folder, load_tokenizer
from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.manifest import Shard
from lightning_megatron.errors import ConfigError

_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 17, 1024
"""Bytes and documents after which a batch goes to the tokenizer."""

Report = Callable[[int, int], None]
"""Is told the bytes of the sources and the tokens of every batch."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all processes know.

    Attributes:
        sources: files.
        reading: how they are read.
        tokenizer: its directory or file.
        eos_id: token that is put behind each document, if any.
        special_tokens: whether the tokenizer adds those that its post-processor names.
        chat: how conversations become text; None: records are texts.
        dtype: type of the tokens on disk.
        directory: where shards are written before they get their place.
    """

    sources: tuple[Source, ...]
    reading: Reading
    tokenizer: Path
    eos_id: int | None
    special_tokens: bool
    chat: ChatFormat | None
    dtype: str
    directory: Path


@dataclass(frozen=True)
class Made:
    """What came of a part.

    Attributes:
        shard: entry of the manifest; None if the part has no document.
        empty: records without text, which are left out.
    """

    shard: Shard | None
    empty: int


class Worker:
    """Makes shards of parts.

    Args:
        job: what all processes know.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tokenizer = load_tokenizer(job.tokenizer)
        self._chat: ChatEncoder | None = None
        if job.chat is not None:
            self._chat = ChatEncoder(folder(job.tokenizer), job.chat, self._tokenizer)
        self._records = Records(job.reading)

    def make(self, part: Part, report: Report) -> Made:
        """Write the shard of a part.

        Args:
            part: which text.
            report: is told of each batch.

        Returns:
            The shard, and what was left out.

        Raises:
            ConfigError: a record cannot be read.
        """
        job, empty = self._job, 0
        writer = IndexedWriter(job.directory / part.name, job.dtype)
        try:
            for batch in self._batches(part):
                documents, tokens = self._write(writer, batch)
                empty += len(batch) - documents
                report(sum(record.cost for record in batch), tokens)
            shard = writer.close()
        except BaseException:  # raised again; no half shard stays, whatever ended it
            writer.discard()
            raise
        if not shard.documents:
            return Made(None, empty)
        return Made(replace(shard, source=_description(part, job)), empty)

    def _batches(self, part: Part) -> Iterator[list[Record]]:
        batch: list[Record] = []
        size = 0
        for piece in part.pieces:
            source = self._job.sources[piece.source]
            for record in self._records.of(source, piece.start, piece.stop):
                batch.append(record)
                size += len(record.content or ())
                if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _write(self, writer: IndexedWriter, batch: list[Record]) -> tuple[int, int]:
        """Write documents; their number and that of their tokens."""
        filled = [record for record in batch if record.content]
        if self._chat is not None:
            return self._write_chats(writer, filled, self._chat)
        texts = [record.content for record in filled]
        special, end = self._job.special_tokens, self._job.eos_id
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except TypeError:
            _refuse_surrogates(filled)
            raise
        rows: list[list[int]] = [ids for encoding in encodings if (ids := encoding.ids)]
        if end is not None:
            for row in rows:
                if not special or row[-1] != end:  # a post-processor may have put it there
                    row.append(end)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        total = int(lengths.sum())
        flat: Any = np.fromiter(chain.from_iterable(rows), self._job.dtype, total)
        writer.add_many(flat, lengths)
        return len(rows), total

    def _write_chats(
        self, writer: IndexedWriter, batch: list[Record], encoder: ChatEncoder
    ) -> tuple[int, int]:
        try:
            chats = encoder.encode([record.content for record in batch])
        except RecordError as error:
            raise ConfigError(f"{batch[error.index].name}: {error.why}") from None
        except TypeError:
            _refuse_surrogates(batch)
            raise
        for chat in chats:
            writer.add(chat.ids, chat.answers)
        return len(chats), sum(len(chat.ids) for chat in chats)


def _refuse_surrogates(batch: list[Record]) -> None:
    """Name the record that no tokenizer takes: JSON can escape halves of characters."""
    for record in batch:
        try:
            json.dumps(record.content, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise ConfigError(
                f"{record.name}: {half!r} is half of a UTF-16 pair and stands for no character; "
                "repair the text, with .encode('utf-16', 'surrogatepass').decode('utf-16', "
                "'replace') for example"
            ) from None


def _description(part: Part, job: Job) -> str:
    """Which text a shard is made of."""
    first, last = part.pieces[0], part.pieces[-1]
    begin, end = job.sources[first.source], job.sources[last.source]
    if len(part.pieces) == 1:
        whole = begin.text_bytes if begin.blocks is None else len(begin.blocks)
        if (first.start, first.stop) == (0, whole):
            return begin.path
        return f"{begin.path} [{first.start}:{first.stop}]"
    return f"{begin.path} [{first.start}:] to {end.path} [:{last.stop}]"
