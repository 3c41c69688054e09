"""Many pairs of token files that read like one.

A corpus is one of

* a directory with a manifest, as ``lightning-megatron preprocess`` writes it;
* a directory of pairs ``NAME.bin``, ``NAME.idx`` without one, in the order of their names;
* the PREFIX of one pair.

Documents are numbered through all shards. Opening reads the manifest, or the first 34 bytes of each
index, and maps no file: a shard is mapped when its first document is read. A corpus of 1,000 shards
opens in some hundredths of a second.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.tokens.indexed import (
    IndexedTokens,
    Tokens,
    index_file,
    mask_file,
    read_header,
    token_file,
)
from lightning_megatron.data.tokens.manifest import (
    MANIFEST_FILE,
    Manifest,
    Shard,
    TokenizerIdentity,
)
from lightning_megatron.errors import NoSuchTokensError, TokenFileError

_PIECE = 1 << 24
"""Bytes that are hashed in one go."""


class Corpus:
    """Documents of all shards.

    It pickles as its path.

    Args:
        path: directory of token files, or PREFIX of one pair.

    Attributes:
        path: what was given.
        manifest: content of its manifest; None without one.
        shards: its shards, in order.
        total: number of tokens.

    Raises:
        TokenFileError: there are no token files, or the manifest is damaged or incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest | None = None
        self._directory, names = _find(self.path)
        if names is None:
            self.manifest = Manifest.read(self._directory)
            if not self.manifest.complete:
                raise TokenFileError(
                    f"{self.path}: incomplete: `lightning-megatron preprocess` was interrupted "
                    "there; run it again with --resume"
                )
            self.shards = self.manifest.shards
            dtype = np.dtype(self.manifest.dtype)
        else:
            self.shards, dtype = _bare(self._directory, names)
        self.dtype: np.dtype[Any] = dtype
        self._starts = list(accumulate((s.documents for s in self.shards), initial=0))
        self.total = sum(shard.tokens for shard in self.shards)
        self._open: list[IndexedTokens | None] = [None] * len(self.shards)

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._starts[-1]

    def __repr__(self) -> str:
        """Say what it is."""
        return (
            f"Corpus({str(self.path)!r}, {len(self.shards):,} shards, {len(self):,} documents, "
            f"{self.total:,} tokens)"
        )

    def __reduce__(self) -> tuple[type["Corpus"], tuple[Path]]:
        """Pickle as the path."""
        return type(self), (self.path.absolute(),)

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """Tokenizer that made the tokens; None without a manifest."""
        return None if self.manifest is None else self.manifest.tokenizer

    @property
    def vocab_size(self) -> int | None:
        """Number that every token is below; None without a manifest."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Token that ends a document; None if there is none, or without a manifest."""
        return None if self.tokenizer is None else self.tokenizer.eos_id

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document, int32 [documents]. Maps all shards."""
        parts = (self.shard(number).lengths for number in range(len(self.shards)))
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def read(self, document: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Return tokens [start, stop) of a document, as a view of its file.

        Raises:
            IndexError: there is no such document, or it is shorter.
            TokenFileError: its shard is missing or damaged.
        """
        shard, number = self._find(document)
        return shard.read(number, start, stop)

    def mask(self, document: int, start: int = 0, stop: int | None = None) -> Tokens | None:
        """Return whether tokens [start, stop) count in the loss, uint8; None if all do.

        Raises:
            IndexError: there is no such document, or it is shorter.
            TokenFileError: its shard is missing or damaged.
        """
        shard, number = self._find(document)
        return shard.mask(number, start, stop)

    def shard(self, number: int) -> IndexedTokens:
        """Return a shard, mapped into memory.

        Raises:
            TokenFileError: it is missing, damaged, or not what the manifest says.
        """
        found = self._open[number]
        if found is None:
            entry = self.shards[number]
            for problem in self._size_problems(entry):
                raise TokenFileError(problem)
            found = IndexedTokens(self._directory / entry.name)
            there = (len(found), found.total, found.dtype)
            said = (entry.documents, entry.tokens, self.dtype)
            if there != said:
                raise TokenFileError(
                    f"{found.prefix}: {_shape(*there)}, and {_shape(*said)} by {self._authority}; "
                    f"{self._remedy}"
                )
            self._open[number] = found
        return found

    def problems(self) -> list[str]:
        """Return what is wrong, by the sizes and headers of the files: 0.1 ms per shard.

        Without a manifest the indices are read, too.
        """
        found = []
        for number, entry in enumerate(self.shards):
            problems = list(self._size_problems(entry))
            if not problems:
                try:
                    header = read_header(self._directory / entry.name)
                    said = entry.documents, self.dtype
                    # Without a manifest, only the whole index says how many tokens there must be.
                    if self.manifest is None or (header.documents, header.dtype) != said:
                        self.shard(number)
                except TokenFileError as error:
                    problems = [str(error)]
            found += problems
        return found

    def verify(self) -> list[str]:
        """Read everything and return what is wrong: hashes, places, tokens of no vocabulary."""
        return list(self.faults())

    def faults(self) -> Iterator[str]:
        """Yield what `verify` returns, shard by shard."""
        for number, entry in enumerate(self.shards):
            try:
                shard = self.shard(number)
                wrong = [
                    f"{self._directory / name}: other content than when it was written (SHA-256); "
                    f"{self._remedy}"
                    for name, expected in entry.sha256.items()
                    if _sha256(self._directory / name) != expected
                ]
                yield from wrong or shard.faults(self.vocab_size)
            except TokenFileError as error:
                yield str(error)
            except OSError as error:
                yield f"{error.filename}: cannot be read: {error.strerror}"

    def _find(self, document: int) -> tuple[IndexedTokens, int]:
        if not 0 <= document < self._starts[-1]:
            raise IndexError(f"{self.path}: document {document} of {self._starts[-1]}")
        number = bisect_right(self._starts, document) - 1
        return self._open[number] or self.shard(number), document - self._starts[number]

    def _size_problems(self, entry: Shard) -> Iterator[str]:
        for name, size in entry.sizes.items():
            path = self._directory / name
            try:
                there = path.stat().st_size
            except OSError:
                yield f"{path}: not found, but {self._authority} names it; {self._remedy}"
                continue
            if there != size:
                what = "was cut" if there < size else "is too long"
                yield (
                    f"{path}: {what}: {there:,} bytes, and {size:,} by {self._authority}; "
                    f"{self._remedy}"
                )
        mask = mask_file(self._directory / entry.name)
        if entry.sizes and mask.name not in entry.sizes and mask.exists():
            yield (
                f"{mask}: {self._authority} does not name it, and it would change the loss; "
                "delete it if it does not belong there"
            )

    @property
    def _authority(self) -> str:
        return "the index" if self.manifest is None else MANIFEST_FILE

    @property
    def _remedy(self) -> str:
        return "copy the file again, or run `lightning-megatron preprocess` again"


def _find(path: Path) -> tuple[Path, list[str] | None]:
    """Directory of the files, and names of the shards if no manifest says them."""
    alone = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    pair = alone.name != "" and index_file(alone).is_file()
    if not path.is_dir():
        if pair or (alone.name and token_file(alone).is_file()):
            return alone.parent, [alone.name]
        raise NoSuchTokensError(f"{path}: no tokens there: {_nearest(alone)}")
    if pair:
        raise TokenFileError(
            f"{path}: both a directory and the prefix of {index_file(alone)}; rename one of them"
        )
    if (path / MANIFEST_FILE).is_file():
        return path, None
    names = [file.stem for file in path.glob("*.idx") if not file.name.startswith(".")]
    lone = {f.stem for f in path.glob("*.bin") if not f.name.endswith(".mask.bin")} - {*names}
    if lone:
        raise TokenFileError(
            f"{token_file(path / min(lone))}: has no index {min(lone)}.idx; copy it again, or "
            "write both again with `lightning-megatron preprocess`"
        )
    if not names:
        raise NoSuchTokensError(
            f"{path}: no tokens there, neither {MANIFEST_FILE} nor pairs of .bin and .idx; "
            f"{_nearest(path)}"
        )
    return path, sorted(names)


def _nearest(path: Path) -> str:
    """Sentence about names that may have been meant."""
    hint = "`lightning-megatron preprocess` makes them from text"
    if path.is_dir():
        inside = sorted(p.parent.name for p in path.glob(f"*/{MANIFEST_FILE}"))
        return f"there are {', '.join(inside[:5])} in it" if inside else hint
    if not path.parent.is_dir():
        return f"{path.parent} is no directory; {hint}"
    names = {p.stem if p.suffix == ".idx" else p.name for p in path.parent.iterdir()}
    close = get_close_matches(path.name, sorted(names), n=1)
    return f"did you mean {path.parent / close[0]}?" if close else hint


def _bare(directory: Path, names: list[str]) -> tuple[tuple[Shard, ...], np.dtype[Any]]:
    """Shards by the headers and sizes of their files."""
    shards, dtypes = [], {}
    for name in names:
        prefix = directory / name
        header, tokens = read_header(prefix), token_file(prefix)
        try:
            size = tokens.stat().st_size
        except OSError:
            raise TokenFileError(
                f"{tokens}: not found, its index is there; copy it again"
            ) from None
        dtypes[header.dtype] = name
        shards.append(
            Shard(name=name, documents=header.documents, tokens=size // header.dtype.itemsize)
        )
    if len(dtypes) > 1:
        kinds = ", ".join(f"{name} {dtype.name}" for dtype, name in dtypes.items())
        raise TokenFileError(
            f"{directory}: its tokens have several types ({kinds}), so several tokenizers made "
            "them; put each tokenizer's files into a directory of their own"
        )
    return tuple(shards), next(iter(dtypes))


def _shape(documents: int, tokens: int, dtype: np.dtype[Any]) -> str:
    return f"{documents:,} documents, {tokens:,} tokens of {dtype.name}"


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()
