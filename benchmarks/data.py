"""Reading of token files: rows from disk, packing, and the start of a blend of many files.

    python -m benchmarks.data

All figures are CPU seconds of one process with one thread, the best of several rounds, so that what
else the machine does counts for little. Documents have lengths of a log-normal distribution, with a
median of 403 tokens. Token files lie in a temporary directory and are in the page cache.

* rows: batches of 16 rows of 2,048 tokens, in random order, as a loader's worker makes them:
  `tokens` and `labels`, int64
* packing: rows of ten million documents
* start: from the paths of 1,000 files to the first batch, for a blend of equal weights
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import report
from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.indexed import IndexedWriter
from lightning_megatron.data.tokens.packed import PackedTokens
from lightning_megatron.data.tokens.packing import PACKINGS, pack
from lightning_megatron.data.tokens.token_data import TokenData

SEQ_LEN, BATCH, VOCABULARY = 2048, 16, 50_000


def document_lengths(count: int, seed: int = 0) -> Any:
    """Numbers of tokens of documents."""
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(6, 1.2, count), 2, 200_000).astype(np.int32)


def write_corpus(prefix: Path, documents: int, seed: int = 0) -> None:
    """Write a pair of files of random tokens."""
    random = np.random.default_rng(seed)
    lengths = document_lengths(documents, seed)
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_many(random.integers(0, VOCABULARY, lengths.sum(), dtype=np.uint16), lengths)


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Least CPU seconds of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def reading(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Rows per second."""
    write_corpus(folder / "rows", 20_000)
    corpus = Corpus(folder / "rows")
    found = []
    for how, documents in (("best-fit", False), ("best-fit", True), ("concat", False)):
        packing = pack(how, corpus.lengths, SEQ_LEN)  # type: ignore[arg-type]
        data = PackedTokens(corpus, packing, documents=documents, vocab_size=VOCABULARY)
        order = np.random.default_rng(0).permutation(len(data))[: 250 * BATCH]
        batches = order.reshape(-1, BATCH)

        def read(data: PackedTokens = data, batches: Any = batches) -> None:
            for rows in batches:
                data.__getitems__(rows)

        rate = order.size / seconds(read, rounds)
        what = f"rows of {SEQ_LEN} tokens per second, {how}{', documents' if documents else ''}"
        found.append({"what": what, "figure": f"{rate:,.0f}", "target": "at least 100,000"})
    return found


def packing(documents: int, rounds: int) -> list[dict[str, Any]]:
    """Time to make rows, and how full they are."""
    lengths = document_lengths(documents)
    found = []
    for how in ("best-fit", "concat"):
        taken = seconds(lambda how=how: PACKINGS[how](lengths, 8192), min(rounds, 2))  # type: ignore[misc]
        rows = PACKINGS[how](lengths, 8192)
        needless = rows.documents_cut - int((lengths > 8193).sum())
        best = how == "best-fit"
        found += [
            {
                "what": f"CPU seconds for {documents:,} documents in rows of 8,192, {how}",
                "figure": f"{taken:.2f}",
                "target": "at most 5" if best else "",
            },
            {
                "what": f"share of the rows that is not padding, {how}",
                "figure": f"{rows.fill:.5%}",
                "target": "at least 99.9%" if best else "",
            },
            {
                "what": f"documents cut that fit into a row, {how}",
                "figure": f"{max(needless, 0):,}",
                "target": "0" if best else "",
            },
        ]
    return found


def start(folder: Path, files: int, rounds: int) -> list[dict[str, Any]]:
    """Time to the first batch of a blend."""
    (folder / "blend").mkdir()
    for number in range(files):
        write_corpus(folder / "blend" / f"{number:04}", 100, seed=number)
    train = {str(folder / "blend" / f"{number:04}"): 1.0 for number in range(files)}

    def first() -> None:
        data = TokenData(train, seq_len=SEQ_LEN, batch_size=BATCH, num_workers=0)
        data.setup("fit")
        next(iter(data.train_dataloader()))

    what = f"CPU seconds to the first batch of a blend of {files:,} files"
    return [{"what": what, "figure": f"{seconds(first, rounds):.2f}", "target": "below 1"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=10_000_000, help="to be packed")
    parser.add_argument("--files", type=int, default=1000, help="of the blend")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            *reading(folder, options.rounds),
            *packing(options.documents, options.rounds),
            *start(folder, options.files, options.rounds),
        ]
    report("data", "Reading token files, one process", rows, options.output)


if __name__ == "__main__":
    main()
