"""Manifest of a directory of token files: what it holds, with which tokenizer it was made.

``manifest.json`` is written last, or again after each shard with ``complete: false`` so that an
interrupted run can go on where it was. It names each shard with its sizes and hashes, so that a
missing, truncated or exchanged file is found before training, and the tokenizer with the hash of
its file, so that a model of another vocabulary is refused.

The file holds JSON only; its ``version`` is 1. Readers refuse other versions.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_megatron.errors import TokenFileError

MANIFEST_FILE = "manifest.json"
VERSION = 1
TYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
"""Types that tokens can have, with the number that stands for each in an index."""


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """The tokenizer that made the tokens."""

    name: str
    """Directory, file or name on the Hub, as the user gave it."""
    vocab_size: int
    """Number of tokens, added ones included: every token is below it."""
    eos_id: int | None = None
    """Token that ends a document; None if the tokenizer has none."""
    sha256: str = ""
    """Hash of its tokenizer.json; empty if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of files, with its mask if it has one."""

    name: str
    """Prefix of its files within the directory."""
    documents: int
    """Number of documents."""
    tokens: int
    """Number of tokens."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Hash of each file, by the file's name."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each file, by the file's name."""
    source: str = ""
    """Text that it was made from, in the words of whoever made it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a directory of token files."""

    tokenizer: TokenizerIdentity
    dtype: str
    """Data type of the tokens, as numpy names it."""
    shards: tuple[Shard, ...]
    complete: bool
    """Whether all shards are there that were to be made."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the tokens depend on."""
    version: int = VERSION

    @property
    def documents(self) -> int:
        """Number of documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Number of tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @classmethod
    def read(cls, directory: str | Path) -> "Manifest":
        """Read the manifest of a directory.

        Raises:
            TokenFileError: there is none, or it is damaged or of another version.
        """
        path = Path(directory) / MANIFEST_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise TokenFileError(
                f"{path}: not found; `lightning-megatron preprocess` writes it"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise TokenFileError(f"{path}: cannot be read: {error}; {_REMEDY}") from error
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TokenFileError(f"{path}: not JSON ({error}); {_REMEDY}") from None
        version = content.get("version") if isinstance(content, dict) else None
        if isinstance(version, int) and version != VERSION:
            raise TokenFileError(
                f"{path}: version {version}; this release reads version {VERSION} only: "
                f"{'upgrade lightning-megatron' if version > VERSION else _REMEDY}"
            )
        try:
            return _manifest(content)
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise TokenFileError(f"{path}: not a manifest of tokens: {what}; {_REMEDY}") from None

    def write(self, directory: str | Path) -> None:
        """Write the manifest of a directory; a reader sees the old one or the new one."""
        content = json.dumps(asdict(self), indent=1, sort_keys=True).encode()
        replace_durably(Path(directory) / MANIFEST_FILE, content)


_REMEDY = "delete the directory and run `lightning-megatron preprocess` again"


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file that has its old content or the new one, whenever the machine stops."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(content: Any) -> Manifest:
    known = _typed(Manifest, content, version=int, dtype=str, complete=bool, options=dict)
    tokenizer = TokenizerIdentity(
        **_typed(TokenizerIdentity, content["tokenizer"], name=str, vocab_size=int, sha256=str)
    )
    if known["dtype"] not in TYPE_CODES:
        raise ValueError(f"dtype={known['dtype']!r} instead of one of {', '.join(TYPE_CODES)}")
    if not isinstance(tokenizer.eos_id, int | None):
        raise TypeError(f"eos_id={tokenizer.eos_id!r}")
    if not isinstance(content["shards"], list):
        raise TypeError("shards is no list")
    shards = tuple(_shard(each) for each in content["shards"])
    names = [shard.name for shard in shards]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    if twice:
        raise ValueError(f"shard {twice[0]!r} stands there twice")
    return Manifest(**{**known, "tokenizer": tokenizer, "shards": shards})


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)


def _shard(content: Any) -> Shard:
    types = {"name": str, "documents": int, "tokens": int, "sha256": dict, "sizes": dict}
    shard = Shard(**_typed(Shard, content, **types, source=str))
    for name in (shard.name, *shard.sha256, *shard.sizes):
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file in this directory")
    if shard.documents < 0 or shard.tokens < 0:
        raise ValueError(f"shard {shard.name!r} has a negative size")
    if not all(type(size) is int for size in shard.sizes.values()):
        raise TypeError(f"sizes of shard {shard.name!r}")
    return shard


def _typed(made: type, content: Any, **types: type) -> dict[str, Any]:
    """Known fields of an object, whose named ones are there and have their type."""
    if not isinstance(content, dict):
        raise TypeError(f"{content!r} instead of an object")
    for name, kind in types.items():
        if type(content[name]) is not kind:
            raise TypeError(f"{name}={content[name]!r}")
    known = {each.name for each in fields(made)}
    return {name: value for name, value in content.items() if name in known}
