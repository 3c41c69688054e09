"""Records of a piece of a file: each with its place, for messages about it.

Of text that is cut at any byte, a range ``[start, stop)`` has the records that begin in it. A
record begins at the start of the file and behind every occurrence of the separator. This depends
on the bytes around the place alone, so ranges that meet have every record once, whoever reads them.

A compressed file can only be read forwards: a reader that is asked for ranges in ascending order
unpacks it once.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_megatron.data.preprocessing.sources import Reading, Source, import_pyarrow
from lightning_megatron.errors import ConfigError

_CHUNK = 1 << 20
_ROWS = 1024
"""Rows of a table that are held at a time."""


@dataclass(frozen=True)
class Record:
    """One document.

    Attributes:
        source: file that it is in.
        place: where it begins: a byte of the text, or a row of the table.
        content: its text, or all its fields.
        cost: bytes of the source that it took.
    """

    source: Source
    place: int
    content: Any
    cost: int

    @property
    def name(self) -> str:
        """File and line or row, for a message."""
        return where(self.source, self.place)


class TextRanges:
    """Byte ranges of a text file.

    Args:
        path: the file.
        compressed: whether it is gzip.
        separator: bytes between records; None if the file is one record.
    """

    def __init__(self, path: str, compressed: bool, separator: bytes | None) -> None:
        self.path = path
        self._separator = separator
        opened = gzip.open(path) if compressed else Path(path).open("rb")  # noqa: SIM115
        self._file = cast(BinaryIO, opened)
        self._buffer = bytearray()
        # The next record begins at byte `cursor` of the buffer, byte `base + cursor` of the text.
        self._base, self._cursor, self._stop = 0, 0, 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def records(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield place and bytes of the records that begin in a range."""
        if self._separator is None:
            self._file.seek(0)
            yield 0, self._file.read()
            return
        self._begin(start, self._separator)
        self._stop = stop
        while (place := self._base + self._cursor) < stop:
            record = self._next(self._separator)
            if record is None:
                return
            yield place, record

    def _begin(self, start: int, separator: bytes) -> None:
        """Go to the first record that begins at `start` or later."""
        if self._stop <= start <= self._base + self._cursor:
            return  # the record that was read last begins before `start`
        # A separator that ends at `start` makes a record begin there.
        self._base = max(0, start - len(separator))
        self._file.seek(self._base)
        self._buffer, self._cursor = bytearray(), 0
        if start:
            end = self._search(separator, 0)
            self._cursor = len(self._buffer) if end is None else end

    def _next(self, separator: bytes) -> bytes | None:
        """Return the record at the cursor without its separator; None at the end of the file."""
        # A separator may begin in the one before: of three line feeds, each pair is one.
        end = self._search(separator, max(0, self._cursor - len(separator) + 1))
        begin = self._cursor
        if end is None:
            self._cursor = len(self._buffer)
            return bytes(self._buffer[begin:]) or None
        self._cursor = end
        return bytes(self._buffer[begin : max(begin, end - len(separator))])

    def _search(self, separator: bytes, first: int) -> int | None:
        """Return the end of the first separator from byte `first` of the buffer on."""
        while (found := self._buffer.find(separator, first)) < 0:
            chunk = self._file.read(_CHUNK)
            if not chunk:
                return None
            passed = max(0, self._cursor - len(separator))
            first = max(first, len(self._buffer) - len(separator) + 1) - passed
            self._buffer += chunk
            del self._buffer[:passed]
            self._base += passed
            self._cursor -= passed
        return found + len(separator)


class Records:
    """Reader of pieces of sources, which keeps the file open that it has read last.

    Args:
        reading: which fields are wanted, and what separates documents.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._ranges: TextRanges | None = None

    def of(self, source: Source, start: int, stop: int) -> Iterator[Record]:
        """Yield the records of a piece.

        Args:
            source: the file.
            start: first byte of its text, or first block.
            stop: end of these.

        Raises:
            ConfigError: a record cannot be read.
        """
        if source.kind in ("parquet", "arrow"):
            yield from self._rows(source, start, stop)
            return
        boundary = self._reading.boundary(source.kind)
        if self._ranges is None or self._ranges.path != source.path:
            if self._ranges is not None:
                self._ranges.close()
            self._ranges = TextRanges(source.path, source.compressed, boundary)
        for place, line in self._ranges.records(start, stop):
            content = self._content(source, place, line)
            yield Record(source, place, content, len(line) + len(boundary or b""))

    def _content(self, source: Source, place: int, line: bytes) -> Any:
        try:
            text = line.decode("utf-8-sig" if place == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{where(source, place)}: byte {place + error.start} is no UTF-8 "
                f"({error.reason}); convert the file, with iconv for example"
            ) from error
        if source.kind == "txt":
            return text if self._reading.separator != "\n" else text.removesuffix("\r")
        if not text.strip():
            return None
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{where(source, place)}: no JSON ({error}); every line must be one object"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"{where(source, place)}: is a {type(record).__name__}; every line must be one "
                "object"
            )
        key = self._reading.text_key
        if key is None:
            return record
        if key not in record:
            raise ConfigError(
                f"{where(source, place)}: no field {key!r}; name the one that holds the text with "
                f"--text-key: {', '.join(record)}"
            )
        return self._text(source, place, record[key])

    def _text(self, source: Source, place: int, value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"{where(source, place)}: {self._reading.text_key!r} is a "
                f"{type(value).__name__}, not text; name another field with --text-key"
            )
        return value

    def _rows(self, source: Source, start: int, stop: int) -> Iterator[Record]:
        key = self._reading.text_key
        assert source.blocks is not None
        tables = _parquet_tables if source.kind == "parquet" else _arrow_tables
        for block, first, table, last in tables(source.path, key, start, stop):
            rows = table.to_pylist() if key is None else table.column(key).to_pylist()
            for index, row in enumerate(rows):
                # A block's cost is counted with its last row: rows have no size of their own.
                cost = source.blocks[block] if last and index == len(rows) - 1 else 0
                content = row if key is None else self._text(source, first + index, row)
                yield Record(source, first + index, content, cost)


def where(source: Source, place: int) -> str:
    """Return the file and the line or row of a record, for a message."""
    if source.kind in ("parquet", "arrow"):
        return f"{source.path}, row {place + 1}"
    if source.kind == "txt":
        return f"{source.path}, byte {place}"
    lines = 1
    with gzip.open(source.path) if source.compressed else open(source.path, "rb") as file:
        while place > 0 and (chunk := file.read(min(place, _CHUNK))):
            lines += chunk.count(b"\n")
            place -= len(chunk)
    return f"{source.path}:{lines}"


def _parquet_tables(
    path: str, column: str | None, start: int, stop: int
) -> Iterator[tuple[int, int, Any, bool]]:
    """Block, number of the first row, rows, and whether they end the block."""
    parquet, errors = import_pyarrow("parquet")
    columns = None if column is None else [column]
    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i).num_rows for i in range(stop)]
            for block in range(start, stop):
                row, end = sum(groups[:block]), sum(groups[: block + 1])
                batches = file.iter_batches(_ROWS, [block], columns, use_threads=False)
                for batch in batches:
                    yield block, row, batch, row + len(batch) == end
                    row += len(batch)
    except errors as error:
        raise ConfigError(f"{path}: damaged ({error}); fetch it again") from error


def _arrow_tables(
    path: str, column: str | None, start: int, stop: int
) -> Iterator[tuple[int, int, Any, bool]]:
    """Block, number of the first row, rows, and whether they end the block."""
    pyarrow, errors = import_pyarrow()
    try:
        with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
            row = 0
            for block, batch in zip(range(stop), stream, strict=False):
                if block >= start:
                    yield block, row, batch, True
                row += len(batch)
    except errors as error:
        raise ConfigError(f"{path}: damaged ({error}); fetch it again") from error
