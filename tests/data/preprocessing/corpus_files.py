"""A small corpus in every format, and a tokenizer that would cut documents if it were let."""

import gzip
import json
from pathlib import Path
from typing import Any

import tokenizers

TEXTS = [f"Document {i}: " + "äbc " * (i % 7) + "\n" * (i % 3) for i in range(60)]
"""Of unequal lengths, some with line feeds at their ends."""


def save_tokenizer(directory: Path) -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<pad>"])
    plain = made.to_str()
    made.enable_truncation(5)
    made.enable_padding(pad_token="<pad>", pad_id=257)
    directory.mkdir(parents=True)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    return tokenizers.Tokenizer.from_str(plain)


def json_lines(texts: list[str]) -> bytes:
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    return "\n".join([*lines[:3], "", *lines[3:]]).encode()  # no line feed at the end


def save_corpus(directory: Path) -> list[str]:
    """Write `TEXTS`, once in each format; names of the sources."""
    import pyarrow
    import pyarrow.parquet

    directory.mkdir(parents=True)
    (directory / "a.jsonl").write_bytes(json_lines(TEXTS))
    with gzip.open(directory / "b.jsonl.gz", "wb") as file:
        file.write(json_lines(TEXTS))
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, directory / "c.parquet", row_group_size=7)
    (directory / "d").mkdir()
    for i, text in enumerate(TEXTS):
        (directory / "d" / f"{i:02d}.txt").write_text(text)
    return [str(directory / name) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d")]


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
