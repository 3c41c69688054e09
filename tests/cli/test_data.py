"""`lightning-megatron data`: show and verify, and what they say about mistakes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.cli import main
from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.manifest import Manifest, Shard, TokenizerIdentity


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["data", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Directory with two shards and a manifest."""
    directory = tmp_path / "web"
    directory.mkdir()
    shards = []
    for number in range(2):
        writer = IndexedWriter(directory / f"{number:05}", "uint16")
        writer.add_many([1, 2, 3, 4], [3, 1])
        shards.append(replace(writer.close(), source=f"part{number}.jsonl"))
    tokenizer = TokenizerIdentity(name="bpe", vocab_size=1500, eos_id=0, sha256="ab" * 32)
    options = {"append_eos": True}
    Manifest(
        tokenizer=tokenizer, dtype="uint16", shards=tuple(shards), complete=True, options=options
    ).write(directory)
    return directory


class TestShow:
    def test_text(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        code, out, err = run(capsys, "show", tokens, "--lengths")
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            f"path        {tokens}",
            "documents   4",
            "tokens      8",
            "dtype       uint16",
            "complete    yes",
            "tokenizer   bpe",
            "            1,500 tokens, end of document 0, SHA-256 abababababababab",
            "option      append_eos=true",
            "lengths     mean 2, p0 1, p25 1, p50 2, p75 3, p100 3",
            "",
            "SHARD  DOCUMENTS  TOKENS  BYTES  SOURCE",
            "00000          2       4     90  part0.jsonl",
            "00001          2       4     90  part1.jsonl",
        ]

    def test_json(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        code, out, _ = run(capsys, "show", tokens, tokens / "00000", "--json")
        facts, pair = json.loads(out)
        assert code == 0
        assert (facts["tokens"], facts["tokenizer"]["vocab_size"]) == (8, 1500)
        assert [shard["name"] for shard in facts["shards"]] == ["00000", "00001"]
        assert (pair["documents"], pair["problems"]) == (2, [])

    def test_many_shards(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        shards = tuple(Shard(name=f"{n:05}", documents=1, tokens=1) for n in range(25))
        replace(Manifest.read(tokens), shards=shards, complete=False).write(tokens)
        code, out, err = run(capsys, "show", tokens)
        assert code == 1
        assert "complete    no" in out
        assert out.splitlines()[-1] == "... and 5 more (--json lists them)"
        assert "incomplete; `preprocess --resume` goes on" in err

    def test_a_shard_that_is_not_there(
        self, capsys: pytest.CaptureFixture[str], tokens: Path
    ) -> None:
        (tokens / "00001.bin").unlink()
        code, out, err = run(capsys, "show", tokens)
        assert code == 1
        assert "tokens      8" in out
        assert f"{tokens}/00001.bin: not found, but manifest.json names it" in err

    def test_no_tokens(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        code, out, err = run(capsys, "show", tokens.parent / "wed")
        assert (code, out) == (2, "")
        assert f"did you mean {tokens}?" in err


class TestVerify:
    def test_intact(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        code, out, err = run(capsys, "verify", tokens)
        assert (code, err) == (0, "")
        assert out.startswith(f"{tokens}: valid (2 shards, 4 documents, 8 tokens, ")

    def test_without_hashes(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        code, out, _ = run(capsys, "verify", tokens / "00000")
        assert code == 0
        assert "readable, but without hashes to compare with" in out
        assert "of an unknown vocabulary" in out

    def test_damage(self, capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
        (tokens / "00001.bin").write_bytes(bytes(8))
        code, out, err = run(capsys, "verify", tokens, tokens / "00000", "--json")
        assert code == 1
        assert "00001.bin: other content than when it was written (SHA-256)" in err
        assert [len(facts["faults"]) for facts in json.loads(out)] == [1, 0]

    @pytest.mark.parametrize(("path", "code"), [("web", 1), ("wed", 2)])
    def test_what_cannot_be_opened(
        self, capsys: pytest.CaptureFixture[str], tokens: Path, path: str, code: int
    ) -> None:
        (tokens / "manifest.json").write_text("{")
        assert run(capsys, "verify", tokens.parent / path)[0] == code
