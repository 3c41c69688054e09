"""Pairs of token files: Megatron-LM's format to the byte, and every way they can be damaged."""

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.tokens.indexed import IndexedTokens, IndexedWriter
from lightning_megatron.errors import TokenFileError
from tests.data.tokens.megatron_files import index_bytes, token_bytes, write_pair

DOCUMENTS = [[5, 6, 7], [], [300], [1, 2, 3, 4]]


def lists(tokens: IndexedTokens) -> list[list[int]]:
    return [tokens.read(number).tolist() for number in range(len(tokens))]


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_writes_the_bytes_of_megatron(tmp_path: Path, code: int) -> None:
    dtype = {3: "int16", 4: "int32", 5: "int64", 8: "uint16"}[code]
    with IndexedWriter(tmp_path / "web.v2", dtype) as writer:
        writer.add(DOCUMENTS[0])
        writer.add_many(np.array([300, 1, 2, 3, 4]), [0, 1, 4])
    assert (tmp_path / "web.v2.bin").read_bytes() == token_bytes(DOCUMENTS, code)
    assert (tmp_path / "web.v2.idx").read_bytes() == index_bytes([3, 0, 1, 4], code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web.v2.bin", "web.v2.idx"]


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_reads_the_bytes_of_megatron(tmp_path: Path, code: int) -> None:
    tokens = IndexedTokens(write_pair(tmp_path / "web", DOCUMENTS, code))
    assert lists(tokens) == DOCUMENTS
    assert tokens.lengths.tolist() == [3, 0, 1, 4]
    assert tokens.lengths.dtype == np.int32
    assert (len(tokens), tokens.total) == (4, 8)
    assert tokens.mask(0) is None
    assert list(tokens.faults(301)) == []


def test_documents_of_several_sequences_are_one(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "web", DOCUMENTS)
    (tmp_path / "web.idx").write_bytes(index_bytes([3, 0, 1, 4], bounds=[0, 2, 2, 4]))
    tokens = IndexedTokens(prefix)
    assert lists(tokens) == [[5, 6, 7], [], [300, 1, 2, 3, 4]]
    assert tokens.lengths.tolist() == [3, 0, 5]


def test_as_many_documents_as_sequences_and_yet_others(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "web", DOCUMENTS)
    (tmp_path / "web.idx").write_bytes(index_bytes([3, 0, 1, 4], bounds=[0, 2, 2, 2, 4]))
    assert lists(IndexedTokens(prefix)) == [[5, 6, 7], [], [], [300, 1, 2, 3, 4]]


def test_no_documents(tmp_path: Path) -> None:
    IndexedWriter(tmp_path / "web", "uint16").close()
    assert (tmp_path / "web.idx").read_bytes() == index_bytes([])
    tokens = IndexedTokens(tmp_path / "web")
    assert (len(tokens), tokens.total, tokens.lengths.tolist()) == (0, 0, [])


def test_parts_of_documents(tmp_path: Path) -> None:
    tokens = IndexedTokens(write_pair(tmp_path / "web", DOCUMENTS))
    assert tokens.read(3, 1, 3).tolist() == [2, 3]
    assert tokens.read(3, 4).tolist() == []
    assert not tokens.read(3).flags.owndata
    assert not tokens.read(3).flags.writeable
    for wrong in ((4,), (-1,), (0, 0, 4), (0, 2, 1), (0, -1), (0, 4)):
        with pytest.raises(IndexError):
            tokens.read(*wrong)


def test_pickles_as_its_path(tmp_path: Path) -> None:
    documents = [list(range(1000))]
    tokens = IndexedTokens(write_pair(tmp_path / "web", documents))
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 500
    assert lists(pickle.loads(pickled)) == documents


class TestMask:
    def test_is_read_back(self, tmp_path: Path) -> None:
        with IndexedWriter(tmp_path / "chat", "int32") as writer:
            writer.add([5, 6, 7], [0, 1, 1])
            writer.add_many([8, 9], [0, 2], np.array([True, False]))
        tokens = IndexedTokens(tmp_path / "chat")
        masks = [tokens.mask(number) for number in range(3)]
        assert [m.tolist() for m in masks if m is not None] == [[0, 1, 1], [], [1, 0]]
        assert [m.tolist() for m in [tokens.mask(0, 1, 2)] if m is not None] == [[1]]
        assert (tmp_path / "chat.mask.bin").read_bytes() == bytes([0, 1, 1, 1, 0])
        assert (tmp_path / "chat.idx").read_bytes() == index_bytes([3, 0, 2], code=4)
        assert list(tokens.faults()) == []

    def test_of_another_size(self, tmp_path: Path) -> None:
        write_pair(tmp_path / "chat", DOCUMENTS)
        (tmp_path / "chat.mask.bin").write_bytes(bytes(7))
        with pytest.raises(TokenFileError, match=r"chat\.mask\.bin: 7 bytes for 8 tokens"):
            IndexedTokens(tmp_path / "chat")

    def test_with_other_values(self, tmp_path: Path) -> None:
        write_pair(tmp_path / "chat", DOCUMENTS)
        (tmp_path / "chat.mask.bin").write_bytes(bytes([0, 1, 2, 1, 0, 0, 0, 0]))
        (fault,) = IndexedTokens(tmp_path / "chat").faults()
        assert "mask.bin: holds other values than 0 and 1" in fault

    @pytest.mark.parametrize("first", [None, [1, 1]])
    def test_for_all_documents_or_none(self, tmp_path: Path, first: list[int] | None) -> None:
        writer = IndexedWriter(tmp_path / "chat", "uint16")
        writer.add([1, 2], first)
        with pytest.raises(ValueError, match="a document with"):
            writer.add([3, 4], None if first else [1, 1])

    @pytest.mark.parametrize("answers", [[1], [0, 2], [0.5, 1]])
    def test_that_does_not_fit(self, tmp_path: Path, answers: Any) -> None:
        with pytest.raises(ValueError, match="answers must be 0 or 1 for each of 2 tokens"):
            IndexedWriter(tmp_path / "chat", "uint16").add([1, 2], answers)

    def test_of_older_files_goes(self, tmp_path: Path) -> None:
        with IndexedWriter(tmp_path / "web", "uint16") as writer:
            writer.add([1, 2], [1, 0])
        with IndexedWriter(tmp_path / "web", "uint16") as writer:
            writer.add([3, 4])
        tokens = IndexedTokens(tmp_path / "web")
        assert lists(tokens) == [[3, 4]]
        assert tokens.mask(0) is None


class TestWriter:
    def test_nothing_has_its_name_before_the_end(self, tmp_path: Path) -> None:
        writer = IndexedWriter(tmp_path / "web", "uint16")
        writer.add([1, 2], [1, 0])
        assert {path.suffix for path in tmp_path.iterdir()} == {".part"}
        shard = writer.close()
        assert (shard.name, shard.documents, shard.tokens) == ("web", 1, 2)
        assert shard.sizes == {path.name: path.stat().st_size for path in tmp_path.iterdir()}

    def test_leaves_nothing_after_an_error(self, tmp_path: Path) -> None:
        def fail() -> None:
            with IndexedWriter(tmp_path / "web", "uint16") as writer:
                writer.add([1, 2], [1, 0])
                raise KeyError

        pytest.raises(KeyError, fail)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("tokens", "lengths", "message"),
        [
            ([1, 65536], [2], "token 65536: must lie in"),
            ([-1, 2], [2], "token -1: must lie in"),
            ([1.0, 2.0], [2], "must be whole numbers"),
            ([1, 2], [1], "lengths of 1 tokens for 2"),
            ([1, 2], [3, -1], "lengths of 2 tokens for 2"),
        ],
    )
    def test_refuses(self, tmp_path: Path, tokens: Any, lengths: Any, message: str) -> None:
        writer = IndexedWriter(tmp_path / "web", "uint16")
        with pytest.raises(ValueError, match=message):
            writer.add_many(tokens, lengths)
        assert writer.close().tokens == 0

    @pytest.mark.parametrize("dtype", ["float32", "uint32"])
    def test_refuses_types_that_the_format_has_not(self, tmp_path: Path, dtype: str) -> None:
        with pytest.raises(ValueError, match=f"dtype={dtype}: must be one of uint8, int8"):
            IndexedWriter(tmp_path / "web", dtype)


class TestDamage:
    @pytest.mark.parametrize("name", ["web.idx", "web.bin"])
    def test_no_cut_file_is_opened(self, tmp_path: Path, name: str) -> None:
        prefix = write_pair(tmp_path / "web", DOCUMENTS)
        whole = (tmp_path / name).read_bytes()
        for size in reversed(range(len(whole))):
            os.truncate(tmp_path / name, size)
            with pytest.raises(TokenFileError, match=name):
                IndexedTokens(prefix)
        (tmp_path / name).write_bytes(whole + b"\0")
        with pytest.raises(TokenFileError, match=name):
            IndexedTokens(prefix)

    def test_no_changed_index_gives_other_tokens(self, tmp_path: Path) -> None:
        prefix = write_pair(tmp_path / "web", DOCUMENTS)
        whole = (tmp_path / "web.idx").read_bytes()
        read = []
        with (tmp_path / "web.idx").open("r+b", buffering=0) as file:
            for place, value in enumerate(whole):
                os.pwrite(file.fileno(), bytes([value ^ 1]), place)
                with suppress(TokenFileError):
                    IndexedTokens(prefix)
                    read.append(place)
                os.pwrite(file.fileno(), bytes([value]), place)
        # The bounds of documents may move by one: hashes of the manifest are for that.
        assert {place for place in read if place < 34 + 12 * 4} == set()
        assert len(read) <= 5

    @pytest.mark.parametrize("name", ["web.idx", "web.bin"])
    def test_a_missing_file(self, tmp_path: Path, name: str) -> None:
        prefix = write_pair(tmp_path / "web", DOCUMENTS)
        (tmp_path / name).unlink()
        with pytest.raises(TokenFileError, match=rf"{name}: not found.*preprocess"):
            IndexedTokens(prefix)

    def test_files_of_two_pairs(self, tmp_path: Path) -> None:
        write_pair(tmp_path / "web", DOCUMENTS)
        (tmp_path / "web.bin").write_bytes(token_bytes([range(9)]))
        with pytest.raises(TokenFileError, match="holds more than the index says: 18 bytes"):
            IndexedTokens(tmp_path / "web")

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (b"", "not an index of tokens"),
            (b"PK\3\4 some archive of forty bytes, or more", "not an index of tokens"),
            (b"TNTIDX\0\0" + bytes(60), r"fairseq's older format .*--dataset-impl mmap"),
            (index_bytes([8], version=2), "version 2 of the format, Fast-LLM's"),
            (index_bytes([8], version=4), "version 4 of the format; version 1"),
            (index_bytes([8], code=6), "numbers of type float64"),
            (index_bytes([8], code=9), "type 9"),
            (index_bytes([4, 4]) + bytes(2), "multimodal data, which is not read"),
            (index_bytes([4, 4], bounds=[]), "damaged"),
            (index_bytes([4, 4], bounds=[0, 1]), "do not cover its 2 sequences"),
            (index_bytes([4, 4], bounds=[1, 2]), "do not cover its 2 sequences"),
            (index_bytes([4, 4], bounds=[0, 3, 1, 2]), "do not cover its 2 sequences"),
            (index_bytes([9, -1]), "sequence 1 does not begin where the one before it ends"),
        ],
    )
    def test_of_the_index(self, tmp_path: Path, index: bytes, message: str) -> None:
        prefix = write_pair(tmp_path / "web", DOCUMENTS)
        (tmp_path / "web.idx").write_bytes(index)
        with pytest.raises(TokenFileError, match=message) as caught:
            IndexedTokens(prefix)
        assert str(tmp_path / "web.idx") in str(caught.value)

    @pytest.mark.parametrize(
        ("documents", "code", "message"),
        [
            ([[1, 2], [3, 500]], 8, "token 3 is 500, but the vocabulary has 500 tokens"),
            ([[1, 2], [-3, 5]], 4, r"token 2 is negative \(-3\)"),
        ],
    )
    def test_tokens_of_no_vocabulary(
        self, tmp_path: Path, documents: list[list[int]], code: int, message: str
    ) -> None:
        with pytest.raises(AssertionError, match=message):
            assert (
                list(IndexedTokens(write_pair(tmp_path / "web", documents, code)).faults(500)) == []
            )
