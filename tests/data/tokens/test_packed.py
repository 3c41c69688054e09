import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.packed import (
    IGNORED,
    BlendedTokens,
    PackedTokens,
    Rows,
    collate_rows,
)
from lightning_megatron.data.tokens.packing import PACKINGS, best_fit, pack
from lightning_megatron.errors import TokenFileError
from tests.data.tokens.corpora import bare_corpus, corpus


def packed(path: Path, how: str = "best-fit", **options: object) -> PackedTokens:
    tokens = Corpus(path)
    return PackedTokens(tokens, pack(how, tokens.lengths, 16), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", PACKINGS)
def test_labels_are_the_next_tokens_of_the_same_document(tmp_path: Path, how: str) -> None:
    texts = bare_corpus(tmp_path / "a", longest=40)
    data = packed(tmp_path / "a", how, documents=True)
    pairs = []
    for index in range(len(data)):
        sample = data[index]
        place = 0
        for number, (document, start, stop) in enumerate(data.packing.row(index)):
            text, end = texts[document], place + stop - start
            assert sample["tokens"][place:end].tolist() == text[start:stop]
            following = (text + [IGNORED])[start + 1 : stop + 1]
            assert sample["labels"][place:end].tolist() == following
            assert set(sample["documents"][place:end].tolist()) == {number}
            pairs += [(document, start + i) for i, y in enumerate(following) if y != IGNORED]
            place = end
        assert (sample["labels"][place:] == IGNORED).all()
        assert (sample["documents"][place:] == len(data.packing.row(index))).all()
    assert sorted(pairs) == [(d, i) for d, text in enumerate(texts) for i in range(len(text) - 1)]


def test_padding_is_the_end_of_a_document(tmp_path: Path) -> None:
    corpus(tmp_path / "a", documents=1)
    data = packed(tmp_path / "a", "none")
    length = len(Corpus(tmp_path / "a").read(0)) - 16 * (len(data) - 1)
    assert data[0]["tokens"][length:].tolist() == [3] * (16 - length)
    assert set(data[0]) == {"tokens", "labels"}
    with pytest.raises(IndexError):
        data[len(data)]


def test_loss_on_answers_only(tmp_path: Path) -> None:
    bare_corpus(tmp_path / "a", answers=True)
    bare_corpus(tmp_path / "b")
    answers, all_of_it = packed(tmp_path / "a"), packed(tmp_path / "b")
    seen = 0
    for index in range(len(answers)):
        labels, whole = answers[index]["labels"], all_of_it[index]["labels"]
        assert torch.equal(labels, torch.where(whole % 2 == 1, whole, IGNORED))
        seen += int((labels != whole).sum())
    assert seen


def test_a_batch_is_read_at_once_and_by_samples_alike(tmp_path: Path) -> None:
    bare_corpus(tmp_path / "a")
    bare_corpus(tmp_path / "b", seed=1)
    first, second = packed(tmp_path / "a"), packed(tmp_path / "b")
    data = BlendedTokens([first, second])
    assert len(data) == len(first) + len(second)
    rows = data.__getitems__([0, len(first), len(data) - 1])
    assert isinstance(rows, Rows)
    expected = [first[0], second[0], second[len(second) - 1]]
    for one, other in zip(rows, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    order = [*range(len(data))]
    ours = DataLoader(data, 4, sampler=order, collate_fn=collate_rows, num_workers=1)
    plain = DataLoader(data, 4, sampler=order)
    single = [data[index] for index in order]
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["labels"], other["labels"])
        assert torch.equal(one["tokens"][0], single.pop(0)["tokens"])
        del single[: len(one["tokens"]) - 1]
    with pytest.raises(IndexError):
        data[-1]


def test_workers_get_paths_and_not_tokens(tmp_path: Path) -> None:
    bare_corpus(tmp_path / "a")
    data = packed(tmp_path / "a")
    row = data[1]["tokens"]
    pickled = pickle.dumps(data)
    assert Corpus(tmp_path / "a").read(data.packing.row(1)[0][0]).tobytes() not in pickled
    assert torch.equal(pickle.loads(pickled)[1]["tokens"], row)


def test_a_token_outside_of_the_vocabulary_ends_in_an_error(tmp_path: Path) -> None:
    bare_corpus(tmp_path / "a")
    highest = max(
        int(sample["tokens"].max()) for sample in packed(tmp_path / "a").__getitems__(range(30))
    )
    data = packed(tmp_path / "a", vocab_size=highest)
    with pytest.raises(
        TokenFileError, match=rf"a.bin: token .* is {highest}, .* has {highest} tok"
    ):
        data.__getitems__([*range(len(data))])


def test_so_does_a_label_that_is_no_token_of_any_row(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "uint16") as writer:
        writer.add([1, 2, 3, 4, 9])
    corpus = Corpus(tmp_path / "a")
    data = PackedTokens(corpus, best_fit(corpus.lengths, 4), vocab_size=9)
    with pytest.raises(TokenFileError, match=r"a.bin: token 4 is 9, .* has 9 tokens"):
        data[0]
