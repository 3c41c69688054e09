"""Tokens of many documents in a pair of files, in Megatron-LM's indexed format, version 1.

``PREFIX.bin`` holds the tokens of all documents one after the other, nothing else. ``PREFIX.idx``
says where each document is. All numbers are little-endian:

=====================  ==============================  ===========================================
bytes                  type                            content
=====================  ==============================  ===========================================
9                      ``MMIDIDX`` and two zeros       name of the format
8                      uint64                          version: 1
1                      uint8                           type of the tokens: 1 uint8, 2 int8,
                                                       3 int16, 4 int32, 5 int64, 8 uint16
8                      uint64                          S, the number of sequences
8                      uint64                          D + 1, one more than the documents
4 S                    int32                           length of each sequence, in tokens
8 S                    int64                           offset of each sequence in ``.bin``, in bytes
8 (D + 1)              int64                           number of the first sequence of each
                                                       document, and S at the end
=====================  ==============================  ===========================================

Almost always a document is one sequence. Where it has several (Megatron's ``--split-sentences``),
they are read as one document here.

``PREFIX.mask.bin`` is an addition for conversations: one byte per token of ``.bin``, 1 where the
token counts in the loss. Megatron does not read it; its readers find nothing changed.

Both files are mapped into memory, and the processes of a node share the pages that they read.
Opening reads the index once: documents must follow each other without a gap and end where the
tokens end, so a file that was cut is an error and never other tokens. Changed tokens are found by
the hashes of a manifest.
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from lightning_megatron.data.tokens.manifest import TYPE_CODES, Shard, sync_directory
from lightning_megatron.errors import TokenFileError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_TYPES = {code: np.dtype(name).newbyteorder("<") for name, code in TYPE_CODES.items()}
_FLOATS = {6: "float64", 7: "float32"}
_OTHERS = dict.fromkeys((2, 3), ", Fast-LLM's with spans of documents")
"""Whose other versions are."""
_OLD_MAGIC = b"TNTIDX\0\0"
_UINT16_BELOW = 65_500
"""Vocabularies below this size are written as uint16, as Megatron does."""
_PIECE = 1 << 22
"""Tokens that `verify` looks at in one go."""

Tokens = NDArray[Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type that Megatron-LM writes tokens of such a vocabulary with.

    >>> token_dtype(50_257), token_dtype(128_256)
    (dtype('uint16'), dtype('int32'))
    """
    return np.dtype("<u2" if vocab_size < _UINT16_BELOW else "<i4")


class Header(NamedTuple):
    """Start of an index file."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int


def read_header(prefix: Path) -> Header:
    """Read the start of ``PREFIX.idx`` and compare the file's size with it.

    Raises:
        TokenFileError: the file is missing, cut, or not of version 1.
    """
    path = index_file(prefix)
    try:
        with path.open("rb", buffering=0) as file:
            start, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise TokenFileError(f"{path}: not found; {_remedy(prefix)}") from None
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from error
    return _header(path, start, size)


def index_file(prefix: Path) -> Path:
    """Path of ``PREFIX.idx``."""
    return prefix.with_name(f"{prefix.name}.idx")


def token_file(prefix: Path) -> Path:
    """Path of ``PREFIX.bin``."""
    return prefix.with_name(f"{prefix.name}.bin")


def mask_file(prefix: Path) -> Path:
    """Path of ``PREFIX.mask.bin``."""
    return prefix.with_name(f"{prefix.name}.mask.bin")


class IndexedTokens:
    """Documents of one pair of files, mapped into memory.

    It pickles as its path, so that workers of a DataLoader map the files anew.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.

    Attributes:
        dtype: type of the tokens.
        total: number of tokens.

    Raises:
        TokenFileError: a file is missing, was cut, or is not of version 1.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        header = read_header(self.prefix)
        self.dtype = header.dtype
        index = _map(index_file(self.prefix), "u1")
        count = header.sequences
        ends = np.cumsum([HEADER.size, 4 * count, 8 * count, 8 * (header.documents + 1)])
        lengths, pointers, documents = (
            index[start:end].view(kind)
            for start, end, kind in zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
        )
        self._lengths: Tokens = lengths
        self._starts: Tokens = pointers
        self._divisor = self.dtype.itemsize
        self._check_sequences()
        self._tokens = _map(token_file(self.prefix), self.dtype)
        self.total = len(self._tokens)
        self._check_end()
        if header.documents != count or not _counts_up(documents):
            self._merge(documents)
        self._size = len(self._lengths)
        mask = mask_file(self.prefix)
        self._mask = _map(mask, "u1") if mask.exists() else None
        if self._mask is not None and len(self._mask) != self.total:
            raise TokenFileError(
                f"{mask}: {len(self._mask):,} bytes for {self.total:,} tokens, where there must be "
                f"one each; {_remedy(self.prefix)}"
            )

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._size

    def __repr__(self) -> str:
        """Say what it is."""
        return (
            f"IndexedTokens({str(self.prefix)!r}, {len(self):,} documents, {self.total:,} tokens)"
        )

    def __reduce__(self) -> tuple[type["IndexedTokens"], tuple[Path]]:
        """Pickle as the path."""
        return type(self), (self.prefix.absolute(),)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document, int32 [documents]."""
        return np.array(self._lengths, np.int32)  # the file's are not aligned

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask file."""
        return self._mask is not None

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Return tokens [start, stop) of a document, as a view of the file.

        Raises:
            IndexError: there is no such document, or it is shorter.
        """
        first, last = self._range(document, start, stop)
        return self._tokens[first:last]

    def mask(self, document: int, start: int = 0, stop: int | None = None) -> Tokens | None:
        """Return whether tokens [start, stop) count in the loss, uint8; None without a mask file.

        Raises:
            IndexError: there is no such document, or it is shorter.
        """
        if self._mask is None:
            return None
        first, last = self._range(document, start, stop)
        return self._mask[first:last]

    @property
    def tokens(self) -> Tokens:
        """Tokens of all documents, as a view of the file."""
        return self._tokens

    @property
    def answers(self) -> Tokens | None:
        """Whether each token counts in the loss, uint8; None without a mask file."""
        return self._mask

    def places(self, documents: Any) -> NDArray[np.int64]:
        """Return where some documents begin in `tokens`.

        Raises:
            TokenFileError: the index says that one lies outside of the file.
        """
        places, rest = np.divmod(self._starts[documents].astype(np.int64), self._divisor)
        outside = (places < 0) | (places + self._lengths[documents] > self.total) | (rest != 0)
        if outside.any():
            document = int(np.asarray(documents)[outside.argmax()])
            raise TokenFileError(
                f"{index_file(self.prefix)}: document {document:,} lies outside of "
                f"{token_file(self.prefix).name}; {_remedy(self.prefix)}"
            )
        return places

    def faults(self, vocab_size: int | None = None) -> Iterator[str]:
        """Read all tokens and yield what is wrong with them: each must be in the vocabulary."""
        remedy = _remedy(self.prefix)
        path = token_file(self.prefix)
        for first in range(0, self.total, _PIECE):
            piece = self._tokens[first : first + _PIECE]
            if piece.min() < 0:
                at = first + int((piece < 0).argmax())
                yield f"{path}: token {at:,} is negative ({self._tokens[at]}); {remedy}"
                break
            if vocab_size is not None and piece.max() >= vocab_size:
                at = first + int((piece >= vocab_size).argmax())
                yield (
                    f"{path}: token {at:,} is {self._tokens[at]}, but the vocabulary has "
                    f"{vocab_size:,} tokens; {remedy}"
                )
                break
        for first in range(0, self.total if self.has_mask else 0, _PIECE):
            assert self._mask is not None
            if self._mask[first : first + _PIECE].max() > 1:
                yield f"{mask_file(self.prefix)}: holds other values than 0 and 1; {remedy}"
                break

    def _range(self, document: int, start: int, stop: int | None) -> tuple[int, int]:
        if not 0 <= document < self._size:
            raise IndexError(f"{self.prefix}: document {document} of {self._size}")
        length = int(self._lengths[document])
        end = length if stop is None else stop
        if not 0 <= start <= end <= length:
            raise IndexError(
                f"{self.prefix}: tokens {start} to {end} of document {document}, which has {length}"
            )
        first = int(self._starts[document]) // self._divisor
        return first + start, first + end

    def _check_sequences(self) -> None:
        """Raise unless each sequence begins where the one before it ends."""
        end = 0
        for first in range(0, len(self._lengths), _PIECE):
            lengths = self._lengths[first : first + _PIECE].astype(np.int64) * self._divisor
            ends = end + np.cumsum(lengths)
            wrong = (ends - lengths != self._starts[first : first + _PIECE]) | (lengths < 0)
            if wrong.any():
                raise TokenFileError(
                    f"{index_file(self.prefix)}: damaged: sequence {first + wrong.argmax():,} does "
                    f"not begin where the one before it ends; {_remedy(self.prefix)}"
                )
            end = int(ends[-1])

    def _check_end(self) -> None:
        count = len(self._lengths)
        end = int(self._starts[-1]) + int(self._lengths[-1]) * self._divisor if count else 0
        there = self.total * self._divisor
        if end == there:
            return
        what = "was cut" if there < end else "holds more than the index says"
        raise TokenFileError(
            f"{token_file(self.prefix)}: {what}: {there:,} bytes, and {end:,} by "
            f"{index_file(self.prefix).name}; {_remedy(self.prefix)}"
        )

    def _merge(self, documents: Tokens) -> None:
        """Take the sequences of each document as one."""
        bounds = documents.astype(np.int64)
        count = len(self._lengths)
        if bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
            raise TokenFileError(
                f"{index_file(self.prefix)}: damaged: its documents do not cover its {count:,} "
                f"sequences one after the other; {_remedy(self.prefix)}"
            )
        starts = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])[bounds]
        lengths = np.diff(starts)
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise TokenFileError(
                f"{index_file(self.prefix)}: document {lengths.argmax():,} has 2**31 tokens or "
                "more; split it"
            )
        self._lengths, self._starts = lengths.astype(np.int32), starts[:-1] * self._divisor


class IndexedWriter:
    """Writer of one pair of files, which are there in full or not at all.

    Tokens go to ``PREFIX.bin.part`` at once; `close` gives the files their names, the index last.
    A writer that is left by an error, as a context manager, leaves nothing.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.
        dtype: type of the tokens, see `token_dtype`.

    Raises:
        ValueError: the format has no such type.
    """

    def __init__(self, prefix: str | Path, dtype: Any) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.name not in TYPE_CODES:
            names = ", ".join(TYPE_CODES)
            raise ValueError(f"dtype={self.dtype.name}: must be one of {names}")
        self._code = TYPE_CODES[self.dtype.name]
        self._limits = np.iinfo(self.dtype)
        self._lengths: list[NDArray[np.int64]] = []
        self._bin = _HashedFile(token_file(self.prefix))
        self._mask: _HashedFile | None = None

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Give the files their names, or remove them after an error."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def add(self, ids: Any, answers: Any = None) -> None:
        """Write a document.

        Args:
            ids: its tokens.
            answers: 1 for each token that counts in the loss, for conversations; for all documents
                of a pair or for none.

        Raises:
            ValueError: a token does not fit the type, or the mask does not fit the tokens.
        """
        flat = np.asarray(ids)
        self.add_many(flat, [len(flat)], answers)

    def add_many(self, flat: Any, lengths: Any, answers: Any = None) -> None:
        """Write documents whose tokens stand one after the other.

        Args:
            flat: tokens of all of them.
            lengths: number of tokens of each.
            answers: 1 for each token that counts in the loss.

        Raises:
            ValueError: a token does not fit the type, the lengths do not add up, or the mask does
                not fit the tokens.
        """
        tokens, counts = np.asarray(flat), np.asarray(lengths, np.int64)
        if tokens.ndim != 1 or counts.sum() != len(tokens) or (counts < 0).any():
            raise ValueError(f"lengths of {counts.sum():,} tokens for {tokens.size:,}")
        if len(counts) and counts.max() > np.iinfo(np.int32).max:
            raise ValueError(f"a document of {counts.max():,} tokens: the format ends at 2**31 - 1")
        if len(tokens) and tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens of type {tokens.dtype}: must be whole numbers")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= self._limits.max:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ValueError(f"token {wrong}: must lie in [0, {self._limits.max}] of {self.dtype}")
        self._add_answers(tokens, answers)
        self._bin.write(np.ascontiguousarray(tokens, self.dtype))
        self._lengths.append(counts)

    def close(self) -> Shard:
        """Write the index, wait for the disk, give the files their names.

        Returns:
            The entry of a manifest, with the hash of each file.
        """
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        count = len(lengths)
        index = _HashedFile(index_file(self.prefix))
        index.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
        index.write(lengths.astype("<i4"))
        index.write(((np.cumsum(lengths) - lengths) * self.dtype.itemsize).astype("<i8"))
        index.write(np.arange(count + 1, dtype="<i8"))
        files = [self._bin, *([self._mask] if self._mask is not None else []), index]
        for file in files:
            file.finish()
        # No moment has an index that belongs to other tokens.
        index_file(self.prefix).unlink(missing_ok=True)
        mask_file(self.prefix).unlink(missing_ok=True)
        for file in files:
            file.part.replace(file.path)
        sync_directory(self.prefix.parent)
        return Shard(
            name=self.prefix.name,
            documents=count,
            tokens=int(lengths.sum()),
            sha256={file.path.name: file.hash.hexdigest() for file in files},
            sizes={file.path.name: file.size for file in files},
        )

    def discard(self) -> None:
        """Remove what was written."""
        for file in (self._bin, self._mask):
            if file is not None:
                file.file.close()
                file.part.unlink(missing_ok=True)

    def _add_answers(self, tokens: Tokens, answers: Any) -> None:
        if answers is None:
            if self._mask is not None and len(tokens):
                raise ValueError("a document without answers after documents with answers")
            return
        if self._mask is None:
            if self._bin.size:
                raise ValueError("a document with answers after documents without answers")
            self._mask = _HashedFile(mask_file(self.prefix))
        mask = np.asarray(answers)
        if mask.shape != tokens.shape or ((mask != 0) & (mask != 1)).any():
            raise ValueError(f"answers must be 0 or 1 for each of {len(tokens):,} tokens")
        self._mask.write(np.ascontiguousarray(mask, np.uint8))


class _HashedFile:
    """File under a temporary name, and the hash of what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(f"{path.name}.part")
        self.file: BinaryIO = self.part.open("wb")
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, content: bytes | Tokens) -> None:
        data = content if isinstance(content, bytes) else content.view(np.uint8).data
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def _header(path: Path, start: bytes, size: int) -> Header:
    prefix = path.with_suffix("")
    if start.startswith(_OLD_MAGIC):
        raise TokenFileError(
            f"{path}: an index of fairseq's older format (TNTIDX), which is not read: write the "
            "tokens again, Megatron-LM's way with `--dataset-impl mmap`"
        )
    if not start.startswith(MAGIC[: len(start)]) or not start:
        raise TokenFileError(
            f"{path}: not an index of tokens: it begins with {start[:9]!r} instead of {MAGIC!r}"
        )
    if len(start) < HEADER.size:
        raise TokenFileError(f"{path}: was cut: {size} bytes; {_remedy(prefix)}")
    _, version, code, sequences, bounds = HEADER.unpack(start)
    if version != VERSION:
        raise TokenFileError(
            f"{path}: version {version} of the format{_OTHERS.get(version, '')}; version 1, "
            "Megatron-LM's, is the only one that is read: write the tokens again with "
            "`lightning-megatron preprocess`"
        )
    if code not in _TYPES:
        what = f"numbers of type {_FLOATS[code]}" if code in _FLOATS else f"type {code}"
        raise TokenFileError(
            f"{path}: tokens must be whole numbers (types {', '.join(map(str, _TYPES))}), and it "
            f"says {what}; write the tokens again with `lightning-megatron preprocess`"
        )
    if bounds == 0:
        raise TokenFileError(f"{path}: damaged: no documents, not even none; {_remedy(prefix)}")
    expected = HEADER.size + 12 * sequences + 8 * bounds
    if size == expected + sequences and sequences:
        raise TokenFileError(
            f"{path}: an index with modes, of Megatron-LM's multimodal data, which is not read: "
            "write the text's tokens on their own"
        )
    if size != expected:
        what = "was cut" if size < expected else "is longer than it says"
        raise TokenFileError(
            f"{path}: {what}: {size:,} bytes, and {expected:,} by its own header; {_remedy(prefix)}"
        )
    return Header(_TYPES[code], sequences, bounds - 1)


def _map(path: Path, dtype: Any) -> Tokens:
    itemsize = np.dtype(dtype).itemsize
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # An empty file cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError:
        raise TokenFileError(f"{path}: not found, its index is there; {_MAKE_AGAIN}") from None
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from error
    if size % itemsize:
        raise TokenFileError(
            f"{path}: was cut: {size:,} bytes are no multiple of the {itemsize} of a token; "
            f"{_MAKE_AGAIN}"
        )
    return np.frombuffer(content, dtype)


def _counts_up(documents: Tokens) -> bool:
    return all(
        np.array_equal(piece, np.arange(first, first + len(piece)))
        for first in range(0, len(documents), _PIECE)
        for piece in (documents[first : first + _PIECE],)
    )


_MAKE_AGAIN = "copy the files again, or write them again with `lightning-megatron preprocess`"


def _remedy(prefix: Path) -> str:
    return f"copy {prefix.name}.* again, or write them again with `lightning-megatron preprocess`"
