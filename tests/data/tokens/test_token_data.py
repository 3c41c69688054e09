import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.token_data import TokenData
from lightning_megatron.errors import ConfigError, TokenFileError
from lightning_megatron.module import LanguageModel
from tests.data.tokens.corpora import VOCABULARY, bare_corpus, corpus


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Two corpora with manifests, and one pair of files."""
    corpus(tmp_path / "web")
    corpus(tmp_path / "code", seed=1)
    bare_corpus(tmp_path / "bare", seed=2)
    return tmp_path


def make(tokens: Path, *names: str, **options: Any) -> TokenData:
    train = {str(tokens / name): 1.0 for name in names or ("web", "code")}
    options = {"seq_len": 16, "batch_size": 4, "num_workers": 0} | options
    return TokenData(options.pop("train", train), **options)


def read(data: TokenData, count: int = 12) -> list[list[int]]:
    data.setup("fit")
    rows = [row for batch in data.train_dataloader() for row in batch["tokens"].tolist()]
    return rows[:count]


def test_order_is_that_of_the_seed_whatever_reads_it(tokens: Path) -> None:
    expected = read(make(tokens))
    assert len(expected) == 12
    assert read(make(tokens, num_workers=2)) == expected
    assert read(make(tokens, batch_size=3)) == expected
    assert read(make(tokens, "code", "web")) == expected
    assert read(make(tokens, seed=1)) != expected


def test_one_corpus(tokens: Path) -> None:
    data = make(tokens, train=str(tokens / "web"), documents=True)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {name: (t.shape, t.dtype) for name, t in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "documents"), (torch.Size([4, 16]), torch.int64)
    )
    assert data.epochs(1000)[str(tokens / "web")] > 10


def test_weights_change_after_so_many_rows(tokens: Path) -> None:
    web, code = str(tokens / "web"), str(tokens / "code")
    data = make(tokens, train={web: 1.0, code: 0.0}, stages={8: {code: 1.0}}, batch_size=1)
    read(data)
    assert (data.epochs(8)[code], data.epochs(9)[code] > 0) == (0.0, True)
    assert data.epochs(8)[web] == data.epochs(90)[web]


def test_validation_is_read_whole_and_in_order(tokens: Path) -> None:
    paths = [str(tokens / "bare"), str(tokens / "web")]
    data = make(tokens, val=paths, pack="none")
    data.setup("validate")
    loaders = data.val_dataloader()
    assert data.val_names == paths
    for path, loader in zip(paths, loaders, strict=True):
        rows = [row for batch in loader for row in batch["labels"]]
        lengths = Corpus(path).lengths
        assert sum(int((row != -100).sum()) for row in rows) == (lengths - 1).sum()
    assert make(tokens, val={"held out": paths[0]}).val_names == ["held out"]
    assert make(tokens, train=tokens / "web", val=tokens / "bare").val_names == paths[:1]


def test_without_validation_lightning_is_offered_none(tokens: Path) -> None:
    from lightning.pytorch.utilities.model_helpers import is_overridden

    for val, offered in ((None, False), (str(tokens / "web"), True)):
        data = make(tokens, val=val)
        assert is_overridden("val_dataloader", data) is offered
        assert is_overridden("train_dataloader", data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0, "batch_size": 1.5, "num_workers": -1}, "seq_len=0(?s:.*)batch_size=1.5"),
        ({"pack": "best"}, "pack='best': must be one of 'best-fit', 'concat', 'none'"),
        ({"documents": "no"}, "documents='no'"),
        ({"train": {}}, "train: no source"),
        ({"train": ["a", "b"]}, r"nearest valid: {'a': 1.0, 'b': 1.0}"),
        ({"train": {"a": -1.0}}, "weight of 'a' is -1.0"),
        ({"train": {"a": float("nan")}}, "weight of 'a' is nan"),
        ({"train": {"a": 0.0}}, "all weights are 0"),
        ({"train": {"a": 1.0, "b": 1e-9}}, "'b' has a weight of 1.0e-09 of all"),
        ({"train": {"a": 1.0}, "stages": {5: {"b": 1.0}}}, r"stages\[5\]: 'b' is no source"),
        ({"train": {"a": 1.0}, "stages": {-5: {"a": 1.0}}}, r"stages=\[-5\]"),
        ({"train": {"a": 1.0}, "stages": {0: {"a": 1.0}}}, r"stages\[0\]: .*train"),
        ({"val": ["a", "a"]}, "'a' stands there twice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_are_wrong(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **options)


def test_files_that_are_wrong_are_told_before_anything_runs(tokens: Path) -> None:
    with pytest.raises(TokenFileError, match="wen: no tokens there: did you mean .*web"):
        make(tokens, "wen")
    file = tokens / "code" / "00000.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(TokenFileError, match=r"code/00000.bin: was cut"):
        make(tokens)
    with pytest.raises(TokenFileError, match=r"code/00000.bin: was cut"):
        make(tokens, "web", val=str(tokens / "code"))
    file.unlink()
    with pytest.raises(TokenFileError, match=r"code/00000.bin: not found"):
        make(tokens)


def test_tokenizers_that_do_not_fit(tokens: Path) -> None:
    corpus(tokens / "other", name="bytes", sha256="cd")
    with pytest.raises(ConfigError, match="'bytes' of 32 tokens, .*'words'.*one vocabulary"):
        make(tokens, "web", "other")
    with pytest.raises(ConfigError, match="was made with 'words' of 32 tokens, another one"):
        make(tokens, tokenizer="bytes")
    with pytest.warns(UserWarning, match="bare has none: nothing tells which tokenizer"):
        make(tokens, "web", "bare", tokenizer="words")
    directory = tokens / "tokenizer"
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="another one"):
        make(tokens, tokenizer=str(directory))
    corpus(tokens / "own", sha256=hashlib.sha256(b"{}").hexdigest())
    for given in (directory, directory / "tokenizer.json"):
        make(tokens, "own", tokenizer=str(given))


class _Trainer:
    """As much of a Trainer as the datamodule asks for."""

    def __init__(self, vocab_size: int) -> None:
        self.lightning_module = LanguageModel(
            {"vocab_size": vocab_size, "hidden_size": 8, "num_layers": 1, "num_heads": 1}
        )
        self.world_size = 2


def test_a_model_that_does_not_know_all_tokens(tokens: Path) -> None:
    data = make(tokens)
    data.trainer = _Trainer(VOCABULARY - 1)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="model has a vocab_size of 31; nearest valid: .*=32"):
        data.setup("fit")
    unknown = make(tokens, "bare")
    unknown.trainer = _Trainer(VOCABULARY // 2)  # type: ignore[assignment]
    unknown.setup("fit")
    with pytest.raises(TokenFileError, match="vocabulary has 16 tokens"):
        next(iter(unknown.train_dataloader()))


def test_rows_that_are_longer_than_a_table_of_positions(tokens: Path) -> None:
    data = make(tokens)
    data.trainer = _Trainer(VOCABULARY)  # type: ignore[assignment]
    config = data.trainer.lightning_module.config
    short = replace(config, positions="learned", max_seq_len=15)
    data.trainer.lightning_module.config = short  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="max_seq_len=15 tokens; nearest valid: seq_len=15"):
        data.setup("fit")
    data.trainer.lightning_module.config = replace(short, max_seq_len=16)  # type: ignore[assignment]
    data.setup("fit")


def test_stages_of_epochs_that_end_early(tokens: Path) -> None:
    web, code = str(tokens / "web"), str(tokens / "code")

    def loader(at: int, **options: Any) -> Any:
        data = make(tokens, train={web: 1.0, code: 0.0}, stages={at: {code: 1.0}}, batch_size=1)
        data.setup("fit")
        data.trainer = pl.Trainer(accelerator="cpu", logger=False, **options)
        return data.train_dataloader()

    with pytest.raises(ConfigError, match=r"limit_train_batches=4 with stages=\[5\]: .*val_check"):
        loader(5, limit_train_batches=4)
    with pytest.raises(ConfigError, match=r"limit_train_batches=0.1 with"):
        loader(9, limit_train_batches=0.1)
    loader(4, limit_train_batches=4)
    loader(5)
    loader(5, fast_dev_run=True)


def test_too_little_to_train_on(tokens: Path) -> None:
    data = make(tokens, "bare", batch_size=1000)
    data.setup("fit")
    with pytest.raises(ConfigError, match="1 data-parallel ranks: .* have .* fewer than a batch"):
        data.train_dataloader()
    bare_corpus(tokens / "ones", longest=1)
    with pytest.raises(ConfigError, match="ones'.*nothing to predict"):
        make(tokens, "web", "ones").setup("fit")
    with pytest.raises(ConfigError, match="ones'.*nothing to predict"):
        make(tokens, val=str(tokens / "ones")).setup("fit")
    weights = {str(tokens / "web"): 1.0, str(tokens / "ones"): 0.0}
    make(tokens, train=weights).setup("fit")
