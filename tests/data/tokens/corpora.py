"""Small corpora of random tokens."""

from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.manifest import Manifest, TokenizerIdentity

VOCABULARY = 32


def bare_corpus(
    prefix: Path, documents: int = 40, seed: int = 0, longest: int = 24, *, answers: bool = False
) -> list[list[int]]:
    """Write one pair of files; returns its documents."""
    random = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths = random.integers(1, longest + 1, documents)
    texts = [random.integers(0, VOCABULARY, length) for length in lengths]
    with IndexedWriter(prefix, "uint16") as writer:
        for text in texts:
            writer.add(text, answers=(text % 2).astype(np.uint8) if answers else None)
    return [text.tolist() for text in texts]


def corpus(
    directory: Path, documents: int = 40, seed: int = 0, **tokenizer: Any
) -> list[list[int]]:
    """Write a directory with a manifest; returns its documents."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    texts = [random.integers(0, VOCABULARY, random.integers(1, 25)) for _ in range(documents)]
    writer = IndexedWriter(directory / "00000", "uint16")
    for text in texts:
        writer.add(text)
    known = {"name": "words", "vocab_size": VOCABULARY, "eos_id": 3, "sha256": "ab"} | tokenizer
    Manifest(
        tokenizer=TokenizerIdentity(**known),
        dtype="uint16",
        shards=(writer.close(),),
        complete=True,
    ).write(directory)
    return [text.tolist() for text in texts]
