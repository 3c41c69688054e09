"""Text to shards: the same bytes whoever makes them, and whenever the run is killed."""

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")

from lightning_megatron.data.preprocessing import run as run_module
from lightning_megatron.data.preprocessing.run import PreprocessOptions, preprocess
from lightning_megatron.data.preprocessing.sources import Reading
from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.manifest import Manifest
from lightning_megatron.errors import ConfigError, TokenFileError
from tests.data.preprocessing.corpus_files import TEXTS, files_of, save_corpus, save_tokenizer

EOS = 256


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> "Made":
    return Made(tmp_path_factory.mktemp("made"))


class Made:
    """A corpus, its tokenizer, and what one process makes of it without interruption."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = save_tokenizer(directory / "tokenizer")
        self.sources = save_corpus(directory / "text")
        self.options = PreprocessOptions(tokenizer=str(directory / "tokenizer"), shard_bytes=2000)
        self.output = directory / "tokens"
        self.outcome = preprocess(self.sources, self.output, self.options)
        self.files = files_of(self.output)


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.read(i).tolist() for i in range(len(corpus))]


def test_every_document_in_order(made: Made) -> None:
    corpus = Corpus(made.output)
    assert documents(corpus) == [[*made.tokenizer.encode(t).ids, EOS] for t in TEXTS] * 4
    assert corpus.problems() == []
    assert corpus.verify() == []
    assert made.outcome.empty == 2  # the blank lines of two files
    manifest = made.outcome.manifest
    assert manifest.tokenizer.eos_id == EOS
    assert manifest.tokenizer.vocab_size == 258
    assert len(manifest.shards) == made.outcome.made > 5
    assert {Path(shard.source.split(" [")[0]).name for shard in manifest.shards} >= {
        "a.jsonl",
        "b.jsonl.gz",
        "c.parquet",
    }


def test_any_number_of_processes_writes_the_same(made: Made, tmp_path: Path) -> None:
    preprocess(made.sources, tmp_path / "tokens", made.options, workers=3)
    assert files_of(tmp_path / "tokens") == made.files


@contextmanager
def killing(number: int, total: int = 0, done: int = 0) -> Any:
    """Progress bar that kills its process when it is told of a batch for the n-th time."""
    told = []

    def report(size: int, tokens: int) -> None:
        told.append(size)
        if len(told) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    yield report


def killed(action: Callable[[], object]) -> bool:
    """Run `action` in a process of its own; whether that was killed."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_at_replacement(number: int) -> None:
    """Kill this process instead of the n-th time that a file gets its name."""
    really, times = Path.replace, []

    def replace(self: Path, target: Any) -> Path:
        times.append(target)
        if len(times) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return really(self, target)

    Path.replace = replace  # type: ignore[method-assign,assignment]  # in a process that ends


# The first gives the manifest its name; each shard has two files, which are named twice (in the
# run's own directory, then in its place), and a note: all moments of a shard, then others.
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 23])
def test_kill_between_any_two_steps_of_a_shard(made: Made, tmp_path: Path, number: int) -> None:
    output = tmp_path / "tokens"

    def run() -> None:
        kill_at_replacement(number)
        preprocess(made.sources, output, made.options)

    assert killed(run)
    with pytest.raises(TokenFileError):
        Corpus(output)
    outcome = preprocess(made.sources, output, made.options, resume=True)
    assert files_of(output) == made.files
    assert outcome.made == len(made.outcome.manifest.shards) - max(0, (number - 2) // 5)


def test_kill_twice_while_text_is_read(made: Made, tmp_path: Path) -> None:
    output = tmp_path / "tokens"
    for number in (4, 3):
        assert killed(
            lambda number=number: preprocess(
                made.sources,
                output,
                made.options,
                resume=True,
                progress=lambda *bytes: killing(number, *bytes),
            )
        )
    with pytest.raises(ConfigError, match="is unfinished: [1-9].* --resume"):
        preprocess(made.sources, output, made.options)
    preprocess(made.sources, output, made.options, resume=True)
    assert files_of(output) == made.files


def test_workers_end_with_the_command_that_was_killed(made: Made, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from lightning_megatron.data.preprocessing.run import PreprocessOptions, preprocess
from tests.data.preprocessing.test_run import killing
options = PreprocessOptions(tokenizer={made.options.tokenizer!r}, shard_bytes=2000)
output = Path({str(tmp_path / "tokens")!r})
preprocess({made.sources!r}, output, options, workers=2, progress=lambda *b: killing(3, *b))
"""
    # The pipe of the output ends when the last worker does.
    end = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=240, cwd=Path.cwd()
    )
    assert end.returncode == -signal.SIGKILL, end.stderr.decode()
    preprocess(made.sources, tmp_path / "tokens", made.options, resume=True)
    assert files_of(tmp_path / "tokens") == made.files


def test_second_run_does_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "make_shards", None)
    stat = os.stat(made.sources[0])
    os.utime(made.sources[0])  # the content counts, not the time
    shard_bytes_as_before = replace(made.options, shard_bytes=None)
    for options in (made.options, shard_bytes_as_before):
        outcome = preprocess(made.sources, made.output, options)
        assert outcome.made == 0
        assert outcome.manifest == made.outcome.manifest
    os.utime(made.sources[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files_of(made.output) == made.files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"append_eos": False}, "append_eos was True, and is False"),
        ({"eos": "<pad>"}, "the token that ends documents was 256, and is 257"),
        ({"reading": Reading(separator="\n")}, r"separator was None, and is '\\n'"),
        ({"shard_bytes": 500}, "shard_bytes was 2000, and is 500"),
    ],
)
def test_other_options_are_refused(made: Made, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*--overwrite"):
        preprocess(made.sources, made.output, replace(made.options, **change))
    assert files_of(made.output) == made.files


def test_other_sources_are_refused_by_name_or_made_again(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    options = PreprocessOptions(tokenizer=str(tmp_path / "tokenizer"))
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    a, b, c = (str(tmp_path / f"{name}.txt") for name in "abc")
    preprocess([a, b], tmp_path / "tokens", options)
    with pytest.raises(ConfigError, match="the order of the sources"):
        preprocess([b, a], tmp_path / "tokens", options)
    Path(b).write_text("B")
    with pytest.raises(ConfigError, match=f"{b} has changed, {c} is new, {a} is gone"):
        preprocess([b, c], tmp_path / "tokens", options, resume=True)
    preprocess([b, c], tmp_path / "tokens", options, overwrite=True)
    assert [len(ids) for ids in documents(Corpus(tmp_path / "tokens"))] == [2, 2]
    assert documents(Corpus(tmp_path / "tokens"))[0] != documents(Corpus(tmp_path / "tokens"))[1]


def test_lost_shard_is_made_again(made: Made, tmp_path: Path) -> None:
    output = tmp_path / "tokens"
    output.mkdir()
    for name, content in made.files.items():
        (output / name).write_bytes(content)
    (output / "shard-00001.bin").unlink()
    (output / "shard-00003.idx").write_bytes(b"")
    said = "shard-00001.bin is missing, shard-00003.idx has 0 bytes.*--resume"
    with pytest.raises(ConfigError, match=said):
        preprocess(made.sources, output, made.options)
    assert preprocess(made.sources, output, made.options, resume=True).made == 2
    assert files_of(output) == made.files


def test_two_runs_at_a_time_are_refused(made: Made, tmp_path: Path) -> None:
    @contextmanager
    def second(*sizes: int) -> Any:
        with pytest.raises(ConfigError, match="another run"):
            preprocess(made.sources, tmp_path, made.options, resume=True)
        yield lambda size, tokens: None

    preprocess(made.sources, tmp_path, made.options, progress=second)
    assert files_of(tmp_path) == made.files


def test_worker_that_is_killed(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatron.data.preprocessing import workers

    monkeypatch.setattr(workers, "_serve", _die)
    with pytest.raises(
        ConfigError, match=r"killed by SIGKILL while it made shard-0000\d; .*memory"
    ):
        preprocess(made.sources, tmp_path, made.options, workers=2)


def _die(connection: Any, job: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_document_ends_once_if_the_tokenizer_ends_it(tmp_path: Path) -> None:
    made = save_tokenizer(tmp_path / "tokenizer")
    from tokenizers import processors

    made.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", EOS)]
    )
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("ab")
    options = PreprocessOptions(tokenizer=str(tmp_path / "tokenizer"), special_tokens=True)
    preprocess([str(tmp_path / "text.txt")], tmp_path / "out", options)
    assert Corpus(tmp_path / "out").read(0).tolist()[2:] == [EOS]


def test_output_inside_of_a_source(made: Made, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    for shards in (1, 0):
        outcome = preprocess([str(tmp_path)], tmp_path / "tokens", made.options)
        assert (outcome.made, outcome.manifest.documents) == (shards, 1)
    (tmp_path / "tokens" / "b.txt").write_text("the user's own")
    outcome = preprocess([str(tmp_path)], tmp_path / "tokens", made.options, overwrite=True)
    assert outcome.manifest.documents == 2


def test_separator_between_documents_of_a_text_file(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("one\n\ntwo\nlines\n\n\nthree")
    options = PreprocessOptions(
        tokenizer=str(tmp_path / "tokenizer" / "tokenizer.json"),
        reading=Reading(separator="\n\n"),
        append_eos=False,
        shard_bytes=4,
    )
    preprocess([str(tmp_path / "*.gz")], tmp_path / "tokens", options)
    found = [tokenizer.decode(ids) for ids in documents(Corpus(tmp_path / "tokens"))]
    assert found == ["one", "two\nlines", "three"]


def test_dataset_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"body": TEXTS}).to_json(tmp_path / "data" / "train.jsonl")
    options = PreprocessOptions(
        tokenizer=str(tmp_path / "tokenizer"), reading=Reading(text_key="body"), append_eos=False
    )
    name = f"hf:{tmp_path / 'data'}"
    preprocess([name], tmp_path / "tokens", options)
    found = [tokenizer.decode(ids) for ids in documents(Corpus(tmp_path / "tokens"))]
    assert found == TEXTS
    with pytest.raises(ConfigError, match=r"'train\[:5\]' is 5 rows of files with 60"):
        preprocess([name], tmp_path / "other", replace(options, hub_split="train[:5]"))


def test_manifest_is_that_of_the_run(made: Made) -> None:
    assert Manifest.read(made.output) == made.outcome.manifest
