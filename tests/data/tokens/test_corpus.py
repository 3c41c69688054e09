"""Corpora of many token files: read like one, and nothing missing goes unnoticed."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.manifest import Manifest, TokenizerIdentity
from lightning_megatron.errors import NoSuchTokensError, TokenFileError
from tests.data.tokens.megatron_files import index_bytes, write_pair

SHARDS = {"a": [[5, 6, 7], []], "b": [], "c.v2": [[1, 2, 3, 4], [8]]}
DOCUMENTS = [[5, 6, 7], [], [1, 2, 3, 4], [8]]


def preprocessed(
    directory: Path, shards: dict[str, list[list[int]]] = SHARDS, masked: bool = False
) -> Path:
    """Write a directory with a manifest."""
    directory.mkdir(exist_ok=True)
    entries = []
    for name, documents in shards.items():
        writer = IndexedWriter(directory / name, "uint16")
        for document in documents:
            writer.add(document, [token % 2 for token in document] if masked else None)
        entries.append(writer.close())
    tokenizer = TokenizerIdentity(name="bpe", vocab_size=500, eos_id=3)
    Manifest(tokenizer=tokenizer, dtype="uint16", shards=tuple(entries), complete=True).write(
        directory
    )
    return directory


def bare(directory: Path) -> Path:
    """Write a directory of pairs alone."""
    directory.mkdir()
    for name, documents in SHARDS.items():
        write_pair(directory / name, documents)
    return directory


def lists(corpus: Corpus) -> list[list[int]]:
    return [corpus.read(number).tolist() for number in range(len(corpus))]


@pytest.mark.parametrize("make", [preprocessed, bare])
def test_reads_like_one(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    corpus = Corpus(make(tmp_path / "web"))
    assert lists(corpus) == DOCUMENTS
    assert corpus.lengths.tolist() == [3, 0, 4, 1]
    assert corpus.lengths.dtype == np.int32
    assert (len(corpus), corpus.total, corpus.dtype) == (4, 8, np.dtype("uint16"))
    assert corpus.read(2, 1, 3).tolist() == [2, 3]
    assert corpus.mask(2) is None
    assert corpus.problems() == corpus.verify() == []
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match=f"document {wrong} of 4"):
            corpus.read(wrong)


def test_knows_its_tokenizer(tmp_path: Path) -> None:
    corpus = Corpus(preprocessed(tmp_path / "web"))
    assert corpus.tokenizer is not None
    assert (corpus.tokenizer.name, corpus.vocab_size, corpus.eos_id) == ("bpe", 500, 3)


def test_of_bare_pairs_knows_no_tokenizer(tmp_path: Path) -> None:
    corpus = Corpus(bare(tmp_path / "web"))
    assert (corpus.tokenizer, corpus.vocab_size, corpus.eos_id) == (None, None, None)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_of_one_pair(tmp_path: Path, suffix: str) -> None:
    write_pair(tmp_path / "c.v2", SHARDS["c.v2"])
    assert lists(Corpus(tmp_path / f"c.v2{suffix}")) == SHARDS["c.v2"]


def test_masks(tmp_path: Path) -> None:
    corpus = Corpus(preprocessed(tmp_path / "chat", masked=True))
    mask = corpus.mask(2, 1)
    assert mask is not None
    assert mask.tolist() == [0, 1, 0]
    assert corpus.verify() == []


def test_pickles_as_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessed(tmp_path / "web")
    monkeypatch.chdir(tmp_path)
    corpus = Corpus("web")
    assert len(corpus.lengths) == 4
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 500
    monkeypatch.chdir("/")
    assert lists(pickle.loads(pickled)) == DOCUMENTS


def test_opening_touches_no_shard(tmp_path: Path) -> None:
    preprocessed(tmp_path / "web")
    for name in ("a.idx", "a.bin"):
        (tmp_path / "web" / name).unlink()
    corpus = Corpus(tmp_path / "web")
    assert len(corpus) == 4
    assert corpus.read(2).tolist() == [1, 2, 3, 4]
    with pytest.raises(TokenFileError, match=r"a\.bin: not found, but manifest\.json names it"):
        corpus.read(0)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("name", ["a.idx", "a.bin", "a.mask.bin"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [(Path.unlink, "not found"), (cut, "was cut"), (lengthen, "is too long")],
)
def test_damage_is_found_by_sizes(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    preprocessed(tmp_path / "chat", masked=True)
    damage(tmp_path / "chat" / name)
    corpus = Corpus(tmp_path / "chat")
    (problem,) = corpus.problems()
    assert str(tmp_path / "chat" / name) in problem
    assert message in problem
    assert corpus.verify() == [problem]
    with pytest.raises(TokenFileError, match=message):
        corpus.read(0)


def test_a_cut_index_of_bare_pairs(tmp_path: Path) -> None:
    bare(tmp_path / "web")
    cut(tmp_path / "web" / "a.idx")
    with pytest.raises(TokenFileError, match=r"a\.idx: was cut"):
        Corpus(tmp_path / "web")


@pytest.mark.parametrize("size", [5, 4])
def test_cut_tokens_of_bare_pairs(tmp_path: Path, size: int) -> None:
    bare(tmp_path / "web")
    os.truncate(tmp_path / "web" / "a.bin", size)
    corpus = Corpus(tmp_path / "web")
    (problem,) = corpus.problems()
    assert "a.bin: was cut" in problem
    assert corpus.verify() == [problem]
    with pytest.raises(TokenFileError, match=r"a\.bin: was cut"):
        _ = corpus.lengths


def test_other_content_is_found_by_hashes(tmp_path: Path) -> None:
    preprocessed(tmp_path / "web")
    content = bytearray((tmp_path / "web" / "a.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "web" / "a.bin").write_bytes(content)
    corpus = Corpus(tmp_path / "web")
    assert corpus.problems() == []
    (fault,) = corpus.verify()
    assert "a.bin: other content than when it was written (SHA-256)" in fault


def test_tokens_of_another_vocabulary(tmp_path: Path) -> None:
    corpus = Corpus(preprocessed(tmp_path / "web", {"a": [[5, 500]]}))
    (fault,) = corpus.verify()
    assert "a.bin: token 1 is 500, but the vocabulary has 500 tokens" in fault


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (index_bytes([2, 1], code=8), "2 documents, 3 tokens of uint16"),
        (index_bytes([3, 0], code=3), "2 documents, 3 tokens of int16"),
    ],
)
def test_shards_that_are_not_what_the_manifest_says(
    tmp_path: Path, index: bytes, message: str
) -> None:
    preprocessed(tmp_path / "web", {"a": [[1, 2, 3]]})
    (tmp_path / "web" / "a.idx").write_bytes(index)
    manifest = Manifest.read(tmp_path / "web")
    shard = replace(manifest.shards[0], sizes={"a.idx": len(index)})
    replace(manifest, shards=(shard,)).write(tmp_path / "web")
    (problem,) = Corpus(tmp_path / "web").problems()
    assert f"{message}, and 1 documents, 3 tokens of uint16 by manifest.json" in problem


def test_a_mask_that_the_manifest_does_not_name(tmp_path: Path) -> None:
    preprocessed(tmp_path / "web")
    (tmp_path / "web" / "a.mask.bin").write_bytes(bytes(3))
    (problem,) = Corpus(tmp_path / "web").problems()
    assert "a.mask.bin: manifest.json does not name it, and it would change the loss" in problem


def test_incomplete(tmp_path: Path) -> None:
    preprocessed(tmp_path / "web")
    replace(Manifest.read(tmp_path / "web"), complete=False).write(tmp_path / "web")
    with pytest.raises(TokenFileError, match=r"web: incomplete: .*run it again with --resume"):
        Corpus(tmp_path / "web")


def test_types_of_several_tokenizers(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1]], code=8)
    write_pair(tmp_path / "b", [[1]], code=4)
    with pytest.raises(TokenFileError, match=r"several types \(a uint16, b int32\)"):
        Corpus(tmp_path)


@pytest.mark.parametrize(("kept", "missing"), [("a.idx", "a.bin"), ("a.bin", "a.idx")])
@pytest.mark.parametrize("path", ["", "a"])
def test_half_of_a_pair(tmp_path: Path, kept: str, missing: str, path: str) -> None:
    write_pair(tmp_path / "a", [[1]])
    (tmp_path / missing).unlink()
    with pytest.raises(TokenFileError, match=rf"{missing}: not found|has no index {missing}"):
        Corpus(tmp_path / path)


def test_a_name_that_stands_for_two(tmp_path: Path) -> None:
    preprocessed(tmp_path / "web")
    write_pair(tmp_path / "web", [[1]])
    with pytest.raises(TokenFileError, match="both a directory and the prefix"):
        Corpus(tmp_path / "web")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("wbe", "did you mean {}/web?"),
        ("cod", "did you mean {}/code?"),
        ("", "there are web in it"),
        ("xyz", "`lightning-megatron preprocess` makes them from text"),
        ("none/web", "{}/none is no directory"),
    ],
)
def test_names_that_may_have_been_meant(tmp_path: Path, given: str, meant: str) -> None:
    preprocessed(tmp_path / "web")
    code = tmp_path / "code"
    code.mkdir()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSuchTokensError) as caught:
        Corpus(tmp_path / given)
    assert meant.format(tmp_path) in str(caught.value)
