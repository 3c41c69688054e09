"""`lightning-megatron data`: show, verify and bench, and what they say about mistakes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.cli import main
from lightning_megatron.cli.data_bench import measure
from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.manifest import Manifest, Shard, TokenizerIdentity
from lightning_megatron.errors import ConfigError


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


class Counted(pl.LightningDataModule):
    """Three batches an epoch; says which were taken."""

    def __init__(self, batch_size: int = 4, batches: int = 3, several: bool = False) -> None:
        super().__init__()
        self.batch_size, self.batches, self.several = batch_size, batches, several
        self.taken: list[int] = []
        self.stages: list[str | None] = []

    @override
    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    @override
    def train_dataloader(self) -> Any:
        return {"a": _Loader(self), "b": _Loader(self)} if self.several else _Loader(self)


class _Loader:
    def __init__(self, data: Counted) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.data.batches):
            self.data.taken.append(number)
            yield {"weights": torch.ones(self.data.batch_size, 2), "tokens": torch.ones(
                self.data.batch_size, 7, dtype=torch.long)}  # fmt: skip


class TestBench:
    def test_counts(self) -> None:
        data = Counted()
        found = measure(data, 0.0, 5, warmup=2)
        assert data.taken == [0, 1, 2, 0, 1, 2, 0, 1]
        assert data.stages == ["fit"]
        assert (found.batches, found.samples, found.tokens) == (5, 20, 140)
        assert 0 < found.wait <= found.elapsed
        assert found.rates["samples_per_s"] == 20 / found.elapsed

    def test_rests_after_each_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rests: list[float] = []
        monkeypatch.setattr("time.sleep", rests.append)
        measure(Counted(), 0.0, 5, warmup=2, step=0.25)
        assert rests == [0.25] * 7

    def test_several_loaders(self) -> None:
        found = measure(Counted(several=True), 0.0, 2)
        assert (found.samples, found.tokens) == (8, None)

    def test_no_batches(self) -> None:
        with pytest.raises(ConfigError, match="gives no batches"):
            measure(Counted(batches=0), 0.0, 2)

    def test_options(self, capsys: pytest.CaptureFixture[str]) -> None:
        name = f"{__name__}.Counted"
        args = ["--data", name, "--data.batch_size=8", "--batches=3", "--step-ms=0.1"]
        code, out, _ = run(capsys, "bench", *args)
        assert code == 0
        assert out.splitlines()[0] == f"data         {name}"
        assert "\nbatches      3 of 8 samples" in out
        assert "\nwait share   " in out
        assert json.loads(run(capsys, "bench", *args, "--json")[1])["tokens"] == 3 * 8 * 7

    @pytest.mark.parametrize("batch_size", [8, 2])
    def test_config(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, batch_size: int
    ) -> None:
        (tmp_path / "run.yaml").write_text(
            "trainer: {max_steps: 3}\nmodel: {class_path: not.There}\n"
            f"data:\n  class_path: {__name__}.Counted\n  init_args: {{batch_size: 8}}\n"
        )
        args = [] if batch_size == 8 else ["--data.batch_size=2"]
        code, out, _ = run(capsys, "bench", "-c", tmp_path / "run.yaml", "--batches=2", *args)
        assert code == 0
        assert f"\nbatches      2 of {batch_size} samples" in out

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--data", "TextDataModul"], "did you mean TextDataModule?"),
            (["--data=TextDataModule", "--data.batchsize=4"], "did you mean `batch_size`?"),
            (["--data=TextDataModule", "--batchs=4"], "no option `batchs`"),
            ([], "no datamodule; nearest valid: --data TextDataModule"),
            (["--config=nowhere"], "no such file, and no recipe of that name"),
            (["--batches=0"], "batches=0: must be a whole number of at least 1"),
            (["--step-ms=-1"], "step_ms=-1.0: must be at least 0"),
        ],
    )
    def test_mistakes(
        self, capsys: pytest.CaptureFixture[str], args: list[str], message: str
    ) -> None:
        code, out, err = run(capsys, "bench", *args)
        assert (code, out) == (2, "")
        assert message in err

    def test_config_without_data(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("trainer: {max_steps: 3}\n")
        code, _, err = run(capsys, "bench", "-c", tmp_path / "run.yaml")
        assert code == 2
        assert "has no `data`; give --data CLASS" in err
