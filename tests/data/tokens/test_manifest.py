"""The manifest of a directory of tokens: written, read, and refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data.tokens.manifest import Manifest, Shard, TokenizerIdentity
from lightning_megatron.errors import TokenFileError

MANIFEST = Manifest(
    tokenizer=TokenizerIdentity(name="bpe", vocab_size=500, eos_id=3, sha256="ab"),
    dtype="uint16",
    shards=(
        Shard(name="a", documents=2, tokens=9, sha256={"a.bin": "cd"}, sizes={"a.bin": 18}),
        Shard(name="b", documents=1, tokens=4, source="b.jsonl.gz"),
    ),
    complete=True,
    options={"append_eos": True, "fields": ["text"]},
)


def test_is_read_back(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST
    assert (MANIFEST.documents, MANIFEST.tokens) == (3, 13)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_the_old_one_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    (tmp_path / "manifest.json.part").mkdir()
    with pytest.raises(OSError, match=r"manifest\.json\.part"):
        Manifest(**{**vars(MANIFEST), "complete": False}).write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST


def test_fields_of_later_releases_are_left_out(tmp_path: Path) -> None:
    change(tmp_path, ("language",), "en")
    change(tmp_path, ("shards", 0, "language"), "en", again=True)
    assert Manifest.read(tmp_path) == MANIFEST


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"manifest\.json: not found.*preprocess"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"version": 1', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "not a manifest of tokens"),
        (b"{}", "'version' is missing|'dtype' is missing"),
    ],
)
def test_not_a_manifest(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(TokenFileError, match=rf"manifest\.json: .*({message})"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), 2, "version 2; this release reads version 1 only: upgrade"),
        (("version",), 0, "version 0; this release reads version 1 only: delete"),
        (("dtype",), 16, "dtype=16"),
        (("dtype",), "unknown", "dtype='unknown'"),
        (("complete",), "yes", "complete='yes'"),
        (("tokenizer",), "bpe", "'bpe' instead of an object"),
        (("tokenizer", "vocab_size"), None, "vocab_size=None"),
        (("tokenizer", "eos_id"), "3", "eos_id='3'"),
        (("shards",), {}, "shards is no list"),
        (("shards", 1, "name"), "a", "shard 'a' stands there twice"),
        (("shards", 1, "name"), "../a", r"'../a' is no name of a file"),
        (("shards", 0, "sizes"), {"/etc/a": 1}, "'/etc/a' is no name of a file"),
        (("shards", 0, "sizes"), {"a.bin": "18"}, "sizes of shard 'a'"),
        (("shards", 0, "documents"), -1, "shard 'a' has a negative size"),
    ],
)
def test_wrong_values(tmp_path: Path, place: tuple[Any, ...], value: Any, message: str) -> None:
    change(tmp_path, place, value)
    with pytest.raises(TokenFileError, match=message):
        Manifest.read(tmp_path)


def change(directory: Path, place: tuple[Any, ...], value: Any, again: bool = False) -> None:
    if not again:
        MANIFEST.write(directory)
    content = json.loads((directory / "manifest.json").read_text())
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (directory / "manifest.json").write_text(json.dumps(content))
