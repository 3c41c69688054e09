"""`lightning-megatron preprocess`: its options, and what it says."""

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")

from lightning_megatron.cli import main
from lightning_megatron.data.tokens.corpus import Corpus
from tests.data.preprocessing.corpus_files import save_tokenizer

MARKERS = '{"user": "Q: ", "assistant": "A: "}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": null}\n{"body": "three"}\n')
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["preprocess", "--tokenizer", "tok", "-o", "out", "--workers", "1", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "a.jsonl", "--text-key", "body")
    assert code == 0
    assert out.splitlines() == [
        "out: 2 documents, 10 tokens of 258, 1 shards (uint16)",
        "left out 1 records without text",
    ]
    code, out, _ = run(capsys, "a.jsonl", "--text-key", "body")
    assert (code, out.splitlines()[1:]) == (
        0,
        ["nothing to do: it was made from the same sources and options"],
    )


@pytest.mark.parametrize(
    ("separator", "text"), [("§", "a§b§c"), ("→", "a→b→c"), (r"\t§", "a\t§b\t§c")]
)
def test_separators_of_any_characters(
    folder: Path, capsys: pytest.CaptureFixture[str], separator: str, text: str
) -> None:
    (folder / "text.txt").write_text(text, "utf-8")
    code, out, _ = run(capsys, "text.txt", "--separator", separator)
    assert (code, out.startswith("out: 3 documents, 6 tokens")) == (0, True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["b.jsonl"], "b.jsonl: does not exist; nearest: a.jsonl"),
        (["x/*.txt"], "x/*.txt: no file matches this pattern"),
        (["a.jsonl", "a.jsonl"], "a.jsonl: named twice"),
        (["a.jsonl", "tok/../a.jsonl"], "a.jsonl: named twice"),
        (["tok/tokenizer.json", "bad.csv"], "bad.csv: format unknown"),
        (["a.jsonl"], "a.jsonl:1: no field 'text'; name the one that holds the text with "),
        (["lines.jsonl"], "lines.jsonl:3: no JSON (Expecting value"),
        (["list.json"], "list.json:1: is a list; every line must be one object"),
        (["number.jsonl"], "number.jsonl:1: 'text' is a int, not text"),
        (["half.jsonl"], "half.jsonl:2: '\\udc9f' is half of a UTF-16 pair"),
        (["latin.txt"], "latin.txt, byte 0: byte 3 is no UTF-8"),
        (["cut.jsonl.gz"], "cut.jsonl.gz: is cut off or damaged"),
        (["bad.parquet"], "bad.parquet: no Parquet file, or a damaged one"),
        (["bad.arrow"], "bad.arrow: no stream of Arrow record batches"),
        (["empty.txt"], "there is no text in the sources"),
        (["a.jsonl", "--eos", "<ende>"], "--eos=<ende>: no token of the tokenizer; nearest: <end>"),
        (["a.jsonl", "--tokenizer", "./no"], "--tokenizer=./no: does not exist"),
        (["a.jsonl", "--tokenizer", "a.jsonl"], "a.jsonl: is no tokenizer"),
        (["a.jsonl", "--tokenizer", "bare"], "does not say which token ends a document; name one "),
        (["a.jsonl", "--workers", "0"], "nearest valid: --workers=1"),
        (["a.jsonl", "--separator", ""], "--separator='': must be some text"),
        (["a.jsonl", "--answers", "all"], "--answers needs --chat"),
        (["a.jsonl", "--chat", "--chat-markers", "Q"], "must be a JSON object of texts"),
        (["a.jsonl", "--chat", "--special-tokens"], "leave out --special-tokens"),
        (["latin.txt", "--chat", "--chat-markers", MARKERS], "latin.txt: is plain text"),
        (["a.jsonl", "--chat", "--chat-markers", MARKERS], "a.jsonl:1: keys ['body']: not a conv"),
    ],
)
def test_mistakes(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    (folder / "bad.csv").touch()
    (folder / "empty.txt").touch()
    (folder / "lines.jsonl").write_text('{"text": "a"}\n\nb\n')
    (folder / "list.json").write_text('[{"text": "a"}]')
    (folder / "number.jsonl").write_text('{"text": 1}')
    (folder / "half.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "a\\udc9f"}')
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9])
    (folder / "bad.parquet").write_bytes(b"PAR1")
    (folder / "bad.arrow").write_bytes(b"ARROW1")
    (folder / "bare").mkdir()
    (folder / "bare" / "tokenizer.json").write_text((folder / "tok/tokenizer.json").read_text())
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert said in err


def test_one_bad_document_leaves_the_finished_shards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.jsonl").write_text('{"text": "a"}\n' * 9 + '{"text": }\n')
    code, _, err = run(capsys, "a.jsonl", "--shard-mb", "0.00005")
    assert code == 2
    assert "a.jsonl:10: no JSON" in err
    assert len(list((folder / "out").glob("*.idx"))) == 2


def test_conversations_have_loss_on_answers_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "1+1", "completion": "2"}, {"prompt": "2+2", "completion": "4"}]
    (folder / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    chat = ["chat.jsonl", "--chat", "--chat-markers", MARKERS]
    code, out, _ = run(capsys, *chat)
    assert (code, out.split(",")[0]) == (0, "out: 2 documents")
    corpus = Corpus(folder / "out")
    ids, mask = corpus.read(1), corpus.mask(1)
    assert mask is not None
    assert len(ids) == len("Q: 2+2") + len("A: 4") + 2  # each ends with <end>
    assert mask.tolist() == [0] * 10 + [1, 1]
    assert ids[-1] == 256
    assert corpus.verify() == []
    code, _, err = run(capsys, *chat, "--answers", "last")
    assert code == 2
    assert "chat was {'answers': 'all'" in err
