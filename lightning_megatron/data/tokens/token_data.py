"""Datamodule of token files: rows of fixed length out of one corpus or a blend of several.

What a run reads follows from seed and weights alone. Rows are made once, when the run begins, from
the lengths of the documents (`data.tokens.packing`); their order is arithmetic
(`data.tokens.blend`). So every process computes the same order by itself, nothing is written to
disk, and ranks, loader workers and batch sizes do not change it. A checkpoint holds the weights so
far and the number of rows read.

All that can be wrong with the files is looked for before training: files that are missing or cut,
corpora of different tokenizers, tokens that the model does not know.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron.data.tokens.blend import BLOCK
from lightning_megatron.data.tokens.blended import BlendOrder, BlendSampler
from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.packed import BlendedTokens, PackedTokens, collate_rows
from lightning_megatron.data.tokens.packing import PACKINGS, PackName, pack
from lightning_megatron.errors import (
    ConfigError,
    TokenFileError,
    raise_if_any,
    switches,
    whole_numbers,
)


class TokenData(pl.LightningDataModule):
    """Rows of tokens for language models, out of token files.

    Batches are dicts with `tokens` and `labels`, int64 `[batch_size, seq_len]`; labels are shifted,
    and -100 where no loss is wanted. With ``documents=True`` they also hold `documents`, which
    keeps attention within each document.

    Args:
        train: directory of token files (or PREFIX of one pair), or several with their weights.
        val: directories of token files for validation. Several have a loader each, in this order;
            a mapping gives them names (``val_names``).
        seq_len: number of tokens in a row.
        batch_size: number of rows in a batch of one data-parallel rank.
        pack: how documents are put into rows (`data.tokens.packing`): ``best-fit`` cuts none that
            fits into a row, ``concat`` cuts wherever a row is full, ``none`` gives each document
            rows of its own.
        documents: whether tokens see their own document only.
        stages: other weights of the sources of ``train``, from so many rows on that all ranks
            together have read: ``{256_000: {"tokens/web": 0.3, "tokens/code": 0.7}}``.
        tokenizer: directory or ``tokenizer.json`` of the tokenizer that the tokens must be of, or
            the name that they were preprocessed with.
        num_workers: number of loader processes of each rank.
        pin_memory: whether batches are copied to memory from which GPUs read faster.
        seed: seed of the order of training.

    Raises:
        ConfigError: an option is out of range, a tokenizer or a vocabulary does not fit, or there
            are too few tokens.
        TokenFileError: token files are missing or damaged.
    """

    def __init__(
        self,
        train: str | dict[str, float],
        *,
        val: str | list[str] | dict[str, str] | None = None,
        seq_len: int = 2048,
        batch_size: int = 8,
        pack: PackName = "best-fit",
        documents: bool = False,
        stages: dict[int, dict[str, float]] | None = None,
        tokenizer: str | None = None,
        num_workers: int = 2,
        pin_memory: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        first = _weights("train", train)
        later = {at: _weights(f"stages[{at}]", given) for at, given in (stages or {}).items()}
        if 0 in later:
            raise ConfigError("stages[0]: the weights from the beginning on are those of train")
        self.stages = {0: first, **later}
        self.val = _named(val)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.pack = pack
        self.documents = documents
        self.tokenizer = tokenizer
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.seed = seed
        raise_if_any(self._problems())
        # Before any process waits for others. Nothing is mapped, and lengths are not read.
        self._corpora = {path: Corpus(path) for path in (*first, *self.val.values())}
        raise_if_any(self._file_problems())
        self._warn_of_unknown_tokenizers()
        self._train: BlendedTokens | None = None
        self._order: BlendOrder | None = None
        self._val: list[PackedTokens] = []
        self._saved: dict[str, Any] | None = None
        if not self.val:
            # An empty list of loaders would be warned of; Lightning asks whether there is a method.
            for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
                setattr(self, name, getattr(super(), name))

    @property
    def val_names(self) -> list[str]:
        """Name of each validation loader."""
        return list(self.val)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Make the rows, once."""
        raise_if_any(
            self._vocabulary_problems(_vocabulary_of_model(self.trainer))
            + self._position_problems(_config_of_model(self.trainer))
        )
        if self._order is None and stage in ("fit", None):
            self._set_up_training()
        if not self._val:
            self._val = [self._rows(path) for path in self.val.values()]
            empty = [p for p, d in zip(self.val.values(), self._val, strict=True) if not len(d)]
            raise_if_any([f"val={path!r}: {_NO_ROWS}" for path in empty])

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return whole batches of the blend, from where the run is."""
        assert self._train is not None, "Lightning calls setup() first"
        assert self._order is not None
        self._check_size(self._order.samples)
        raise_if_any(self._stage_problems(self._order.samples))
        return self._loader(self._train, sampler=BlendSampler(self._order), drop_last=True)

    @override
    def val_dataloader(self) -> list[DataLoader[dict[str, Tensor]]]:
        """Return the rows of each validation corpus in order."""
        return [self._loader(rows) for rows in self._val]

    @override
    def test_dataloader(self) -> list[DataLoader[dict[str, Tensor]]]:
        """Return the rows of each validation corpus in order."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> list[DataLoader[dict[str, Tensor]]]:
        """Return the rows of each validation corpus in order."""
        return self.val_dataloader()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Weights so far; the strategy keeps the number of rows that were read."""
        if self._order is None:
            return self._saved or {}
        return {"train": json.dumps(self._order.state_dict())}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the order of the run up to where it stopped."""
        self._saved = state_dict
        if self._order is not None and "train" in state_dict:
            self._order.load_state_dict(json.loads(state_dict["train"]))

    def epochs(self, rows: int) -> dict[str, float]:
        """How often each source of the blend has been read when all ranks have read so many rows.

        Args:
            rows: global batch size times the number of steps.
        """
        assert self._order is not None, "call setup() first"
        return self._order.epochs(rows)

    def _set_up_training(self) -> None:
        sources = {path: self._rows(path) for path in self.stages[0]}
        sizes = {path: len(rows) for path, rows in sources.items()}
        used = {n for weights in self.stages.values() for n, weight in weights.items() if weight}
        raise_if_any([f"train={n!r}: {_NO_ROWS}" for n in sizes if n in used and not sizes[n]])
        self._order = BlendOrder(sizes, self.stages, self.seed)
        self._train = BlendedTokens(list(sources.values()))
        if self._saved is not None:
            self.load_state_dict(self._saved)
        epochs = self._order.epochs(self._order.samples)
        largest = sorted(sources, key=lambda path: -epochs[path] * sizes[path])
        for path in largest[:_SOURCES_TOLD]:
            rows = sources[path]
            rank_zero_info(
                f"{path}: {len(rows.corpus):,} documents, {rows.corpus.total:,} tokens in "
                f"{len(rows):,} rows of {self.seq_len} ({rows.packing.fill:.2%} full), read "
                f"{epochs[path]:.2f} times in an epoch of {self._order.samples:,} rows"
            )
        if len(sources) > _SOURCES_TOLD:
            rank_zero_info(f"and {len(sources) - _SOURCES_TOLD:,} other sources")

    def _rows(self, path: str) -> PackedTokens:
        corpus = self._corpora[path]
        return PackedTokens(
            corpus,
            pack(self.pack, corpus.lengths, self.seq_len),
            documents=self.documents,
            vocab_size=_vocabulary_of_model(self.trainer),
        )

    def _loader(
        self, data: Dataset[dict[str, Tensor]], **options: Any
    ) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            data,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.pin_memory,
            collate_fn=collate_rows,
            **options,
        )

    def _check_size(self, rows: int) -> None:
        ranks = self._ranks
        if rows < self.batch_size * ranks:
            raise ConfigError(
                f"batch_size={self.batch_size} on {ranks} data-parallel ranks: the sources of "
                f"train have {rows} rows of seq_len={self.seq_len}, fewer than a batch; nearest "
                f"valid: batch_size={max(rows // ranks, 1)}, or a smaller seq_len"
            )

    def _stage_problems(self, rows: int) -> list[str]:
        """Stages of a run that leaves out a part of each epoch, and so does not count all rows."""
        limit = getattr(self.trainer, "limit_train_batches", None)
        if limit is None or getattr(self.trainer, "fast_dev_run", False):
            return []
        size = self.batch_size * self._ranks
        batches = rows // size
        read = limit if isinstance(limit, int) else int(limit * batches)
        later = [at for at in self.stages if at > read * size]
        if read >= batches or not later or getattr(self.trainer, "max_epochs", None) == 1:
            return []
        return [
            f"limit_train_batches={limit} with stages={later}: an epoch of {rows} rows ends after "
            f"{read} batches, and the next one begins behind the rows that are left out, so that "
            "the weights would change too early; nearest valid: val_check_interval in place of "
            "limit_train_batches"
        ]

    @property
    def _ranks(self) -> int:
        """Number of data-parallel ranks."""
        strategy = getattr(self.trainer, "strategy", None)
        ranks: int = getattr(strategy, "data_parallel_size", getattr(self.trainer, "world_size", 1))
        return ranks

    # What may be wrong ---------------------------------------------------------------------------

    def _problems(self) -> list[str]:
        """Problems of the options by themselves."""
        problems = whole_numbers(1, seq_len=self.seq_len, batch_size=self.batch_size)
        problems += whole_numbers(0, num_workers=self.num_workers)
        problems += switches(documents=self.documents, pin_memory=self.pin_memory)
        if self.pack not in PACKINGS:
            problems.append(f"pack={self.pack!r}: must be one of {', '.join(map(repr, PACKINGS))}")
        for at, weights in self.stages.items():
            name = "train" if at == 0 else f"stages[{at}]"
            problems += _weight_problems(name, weights)
            for path in sorted({*weights} - {*self.stages[0]}):
                problems.append(
                    f"stages[{at}]: {path!r} is no source of train; name it there, with a weight "
                    "of 0 if it comes later"
                )
        if any(not isinstance(at, int) or at < 0 for at in self.stages):
            problems.append(
                f"stages={list(self.stages)[1:]}: must be numbers of rows; nearest valid: positive "
                "whole numbers"
            )
        return problems

    def _file_problems(self) -> list[str]:
        """Problems of the files, and of corpora that do not go together."""
        broken = [problem for corpus in self._corpora.values() for problem in corpus.problems()]
        if broken:
            raise TokenFileError("\n".join(broken))
        problems = []
        known = {p: c.tokenizer for p, c in self._corpora.items() if c.tokenizer is not None}
        first = next(iter(known), None)
        for path, tokenizer in known.items():
            assert first is not None
            other = known[first]
            if (tokenizer.vocab_size, tokenizer.sha256) != (other.vocab_size, other.sha256):
                problems.append(
                    f"{path!r} was made with tokenizer {tokenizer.name!r} of "
                    f"{tokenizer.vocab_size} tokens, {first!r} with {other.name!r} of "
                    f"{other.vocab_size}: a model has one vocabulary; preprocess both with the same"
                )
            problems += self._tokenizer_problems(path, tokenizer)
        return problems

    def _warn_of_unknown_tokenizers(self) -> None:
        unknown = [path for path, corpus in self._corpora.items() if corpus.tokenizer is None]
        if self.tokenizer is not None and unknown:
            rank_zero_warn(
                f"tokenizer={self.tokenizer!r} is compared with a manifest, and "
                f"{', '.join(unknown[:5])} has none: nothing tells which tokenizer made it"
            )

    def _tokenizer_problems(self, path: str, made_with: Any) -> list[str]:
        if self.tokenizer is None:
            return []
        given = Path(self.tokenizer)
        file = given / "tokenizer.json" if given.is_dir() else given
        if not file.is_file():
            same = self.tokenizer == made_with.name
        else:
            same = hashlib.sha256(file.read_bytes()).hexdigest() == made_with.sha256
        if same:
            return []
        return [
            f"tokenizer={self.tokenizer!r}: {path!r} was made with {made_with.name!r} of "
            f"{made_with.vocab_size} tokens, another one; give that, or run `lightning-megatron "
            f"preprocess --tokenizer {self.tokenizer}` again"
        ]

    def _vocabulary_problems(self, vocab_size: int | None) -> list[str]:
        """Problems of the corpora with a model that knows so many tokens."""
        return [
            f"{path!r} has tokens of a vocabulary of {corpus.vocab_size}, and the model has a "
            f"vocab_size of {vocab_size}; nearest valid: vocab_size={corpus.vocab_size}"
            for path, corpus in self._corpora.items()
            if vocab_size is not None and (corpus.vocab_size or 0) > vocab_size
        ]

    def _position_problems(self, config: Any) -> list[str]:
        """Problems of the rows with a model that has a table of positions."""
        longest = getattr(config, "max_seq_len", None)
        learned = getattr(config, "positions", None) == "learned"
        if not learned or not isinstance(longest, int) or self.seq_len <= longest:
            return []
        return [
            f"seq_len={self.seq_len}: the model has learned positions for max_seq_len={longest} "
            f"tokens; nearest valid: seq_len={longest}"
        ]


_SOURCES_TOLD = 20
"""Number of sources, the ones that are read most, of which a line is logged."""
_NO_ROWS = "no document has two tokens or more, so there is nothing to predict"


def _weights(name: str, given: Any) -> dict[str, float]:
    """Weights of paths."""
    if isinstance(given, str | Path):
        return {str(given): 1.0}
    if isinstance(given, Mapping):
        return {str(path): weight for path, weight in given.items()}
    paths = [str(path) for path in given] if isinstance(given, list | tuple) else []
    nearest = dict.fromkeys(paths or ["tokens"], 1.0)
    raise ConfigError(
        f"{name}={given!r}: must be a path, or paths with their weights; nearest valid: {nearest}"
    )


def _named(val: Any) -> dict[str, str]:
    """Paths by names."""
    if val is None:
        return {}
    if isinstance(val, Mapping):
        return {name: str(path) for name, path in val.items()}
    paths = [str(path) for path in ([val] if isinstance(val, str | Path) else val)]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    raise_if_any([f"val={paths}: {path!r} stands there twice" for path in twice])
    return {path: path for path in paths}


def _weight_problems(name: str, weights: Mapping[str, float]) -> list[str]:
    """Problems of weights, by themselves."""
    wrong = [
        path
        for path, weight in weights.items()
        if isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not (math.isfinite(weight) and weight >= 0)
    ]
    if wrong or not weights:
        what = f"weight of {wrong[0]!r} is {weights[wrong[0]]!r}" if wrong else "no source"
        return [f"{name}: {what}; weights must be numbers of at least 0"]
    total = sum(weights.values())
    if total == 0:
        return [f"{name}: all weights are 0; nearest valid: a positive one"]
    small = [path for path, weight in weights.items() if 0 < weight < total / BLOCK]
    return [
        f"{name}: {path!r} has a weight of {weights[path] / total:.1e} of all, and would never be "
        f"read; nearest valid: {1 / BLOCK:.1e}, or 0"
        for path in small
    ]


def _config_of_model(trainer: Any) -> Any:
    """The ``config`` of the module of a run, if it has one."""
    return getattr(getattr(trainer, "lightning_module", None), "config", None)


def _vocabulary_of_model(trainer: Any) -> int | None:
    """Number of tokens that the module of a run knows, if it says so in ``config.vocab_size``."""
    size = getattr(_config_of_model(trainer), "vocab_size", None)
    return size if isinstance(size, int) else None
