"""Text files as tokens of a Hugging Face tokenizer: the data of the recipe `finetune-qwen3`.

A start for your own: every rank tokenizes all files when the run begins, and keeps the tokens in
memory (4 bytes each), which suits some hundred megabytes of text. Files are joined, with the
end-of-text token behind each, and cut into sequences of equal length; there is no mask between
documents.
"""

from glob import glob
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron import ConfigError


class Sequences(Dataset[dict[str, Tensor]]):
    """Consecutive sequences of one long row of tokens.

    Args:
        tokens: ``[n]``, int32.
        seq_len: tokens of a sequence.
    """

    draws_random_numbers = False

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = index * self.seq_len
        row = self.tokens[first : first + self.seq_len + 1].long()
        return {"tokens": row[:-1], "labels": row[1:]}


class TokenizedTextDataModule(pl.LightningDataModule):
    """Batches of `{"tokens", "labels"}`, both int64 ``[batch_size, seq_len]``.

    Args:
        tokenizer: model directory, or the name of a model on the Hub, whose tokenizer is used.
        files: paths and patterns (``~/corpus/**/*.txt``).
        seq_len: tokens of a sequence.
        batch_size: sequences of a batch of one data-parallel rank.
        val_fraction: part of the sequences, the last ones, that is kept for validation.
        max_bytes: files are left out from where they make up more text than that.

    Raises:
        ConfigError: a pattern matches no file, or there is too little text.
    """

    def __init__(
        self,
        tokenizer: str,
        files: list[str],
        seq_len: int = 4096,
        batch_size: int = 1,
        val_fraction: float = 0.02,
        max_bytes: int = 200_000_000,
    ) -> None:
        super().__init__()
        self.tokenizer, self.files, self.max_bytes = tokenizer, files, max_bytes
        self.seq_len, self.batch_size, self.val_fraction = seq_len, batch_size, val_fraction
        self._tokens: tuple[Tensor, Tensor] | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._tokens is not None:
            return
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.tokenizer)
        rows: list[Tensor] = []
        read = 0
        for path in self._paths():
            text = path.read_text("utf-8", errors="replace")
            read += len(text)
            if read > self.max_bytes and rows:
                break
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            rows.append(torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32))
        tokens = torch.cat(rows)
        sequences = (len(tokens) - 1) // self.seq_len
        held_out = max(1, round(self.val_fraction * sequences))
        if sequences - held_out < self.batch_size:
            raise ConfigError(
                f"{len(tokens)} tokens make {sequences} sequences of seq_len={self.seq_len}, of "
                f"which {held_out} are for validation: fewer than batch_size={self.batch_size} "
                "are left; nearest valid: more files, or a smaller seq_len"
            )
        cut = (sequences - held_out) * self.seq_len
        self._tokens = tokens[: cut + 1], tokens[cut:]

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._tokens is not None
        data = Sequences(self._tokens[0], self.seq_len)
        return DataLoader(data, self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._tokens is not None
        return DataLoader(Sequences(self._tokens[1], self.seq_len), self.batch_size)

    def _paths(self) -> list[Path]:
        found = []
        for pattern in self.files:
            paths = [Path(p) for p in glob(str(Path(pattern).expanduser()), recursive=True)]
            if not any(path.is_file() for path in paths):
                raise ConfigError(f"files={pattern!r}: no such file")
            found += [path for path in paths if path.is_file()]
        return sorted(set(found))
