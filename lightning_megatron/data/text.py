"""Byte-level text from plain files, with the Python standard library as the text everybody has.

A byte-level model needs no tokenizer: its vocabulary is the 256 bytes. The files of a split are
joined (a zero byte ends each one) into one `uint8` tensor in memory, which is divided into windows
of `seq_len + 1` bytes; a window gives `seq_len` tokens and, shifted by one, `seq_len` labels.
Windows share their border byte, so that every byte but the first is a label exactly once per epoch.

The split is by file and depends only on the sorted file names and the seed: no text of a
validation file is seen in training, and every rank computes the same split without communication.
The sampler decides which windows a rank gets: Lightning inserts a distributed sampler for the
data-parallel ranks.
"""

import glob
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any

VOCAB_SIZE = 256
"""Number of different tokens of a byte-level model."""

_NO_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def standard_library_files() -> list[Path]:
    """Return the sorted source files of the running Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in files if _NO_TEXT.isdisjoint(path.relative_to(root).parts))


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows over one tensor of bytes.

    Args:
        text: bytes `[n]`, uint8.
        seq_len: number of tokens in a window.
    """

    draws_random_numbers = False

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text = text
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return max(0, (self.text.numel() - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens` and `labels` of one window, both int64 `[seq_len]`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq_len
        window = self.text[start : start + self.seq_len + 1].long()
        return {"tokens": window[:-1], "labels": window[1:]}


class TextDataModule(pl.LightningDataModule):
    """Windows of bytes from text files, for language models with a vocabulary of 256.

    Batches are dicts with `tokens` and `labels`, int64 `[batch_size, seq_len]`.

    Args:
        files: paths and glob patterns (`**` descends into folders); the sources of the installed
            Python standard library by default. All machines of a job must hold the same files.
        seq_len: number of tokens in a sequence.
        batch_size: number of sequences in a batch of one data-parallel rank.
        num_workers: number of loader processes of each rank.
        val_fraction: share of the bytes, in whole files, that is kept for validation.
        max_bytes: largest number of bytes to read; the files are taken in a random order.
        seed: seed of the order of files, hence of the split, and of the training windows' order.

    Raises:
        ConfigError: an option is out of range, no file matches, or a split holds too little text.
    """

    def __init__(
        self,
        files: list[str] | None = None,
        seq_len: int = 128,
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        max_bytes: int = 16_000_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.files = files
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.seed = seed
        self._train: ByteWindows | None = None
        self._val: ByteWindows | None = None
        raise_if_any(self._problems())

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read the text and split it, once."""
        if self._train is not None:
            return
        train_files, val_files = self._split(self._find())
        train = ByteWindows(_read(train_files), self.seq_len)
        val = ByteWindows(_read(val_files), self.seq_len)
        raise_if_any(
            [
                f"{name} text of {data.text.numel()} bytes with seq_len={self.seq_len} gives "
                f"{len(data)} sequences: at least {least} are needed; add files, raise "
                f"max_bytes={self.max_bytes} or val_fraction={self.val_fraction}, "
                f"or lower seq_len or batch_size"
                for name, data, least in (
                    ("training", train, self.batch_size),
                    ("validation", val, 1),
                )
                if len(data) < least
            ]
        )
        self._train = train
        self._val = val

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return shuffled whole batches of the training files."""
        # An own generator: else making an iterator draws from the global random stream, and a
        # resumed run continues with other numbers than an uninterrupted one.
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(self._train, shuffle=True, drop_last=True, generator=generator)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation files in order."""
        return self._loader(self._val)

    @override
    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation files in order."""
        return self._loader(self._val)

    @override
    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation files in order."""
        return self._loader(self._val)

    def _loader(
        self,
        data: ByteWindows | None,
        shuffle: bool = False,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> DataLoader[dict[str, Tensor]]:
        assert data is not None, "Lightning calls setup() first"
        return DataLoader(
            data,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            generator=generator,
        )

    def _problems(self) -> list[str]:
        """Return problems of the options by themselves."""
        problems = [
            f"{name}={value}: must be at least {least}; nearest valid: {name}={least}"
            for name, value, least in (
                ("seq_len", self.seq_len, 1),
                ("batch_size", self.batch_size, 1),
                ("num_workers", self.num_workers, 0),
                ("max_bytes", self.max_bytes, 1),
            )
            if value < least
        ]
        if not 0 < self.val_fraction < 1:
            problems.append(
                f"val_fraction={self.val_fraction}: must lie between 0 and 1; "
                "nearest valid: val_fraction=0.05"
            )
        return problems

    def _find(self) -> list[Path]:
        """Return the files that the patterns name, sorted and without repetitions."""
        if self.files is None:
            return standard_library_files()
        found: set[Path] = set()
        problems = []
        for pattern in self.files:
            matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
            paths = [Path(match) for match in matches if Path(match).is_file()]
            if not paths:
                problems.append(f"files={pattern!r}: no such file{_hint(pattern)}")
            found.update(paths)
        if not self.files:
            problems.append("files=[]: name at least one file, or leave it out")
        raise_if_any(problems)
        return sorted(found)

    def _split(self, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
        """Return the files for training and for validation, `max_bytes` in all."""
        order = list(files)
        random.Random(self.seed).shuffle(order)
        sizes = {path: path.stat().st_size for path in order}
        kept: list[Path] = []
        total = 0
        for path in order:
            if total >= self.max_bytes:
                break
            kept.append(path)
            total += sizes[path]
        if len(kept) < 2:
            raise ConfigError(
                f"files={self.files}, max_bytes={self.max_bytes}: {len(kept)} file(s) to read, but "
                f"the split into training and validation is by file; nearest valid: 2 files"
            )
        count, val_bytes = 0, 0
        while count == 0 or (count < len(kept) - 1 and val_bytes < self.val_fraction * total):
            val_bytes += sizes[kept[count]]
            count += 1
        return kept[count:], kept[:count]


def _hint(pattern: str) -> str:
    if not Path(pattern).expanduser().is_dir():
        return "; paths are relative to the working directory"
    return f", but a folder; nearest valid: {str(Path(pattern, '**', '*.txt'))!r}"


def _read(files: Sequence[Path]) -> Tensor:
    """Return the bytes of all files, each followed by a zero byte."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        text.append(0)
    return torch.frombuffer(text, dtype=torch.uint8)
