"""Tokenizing beside the algorithm of Megatron-LM's `preprocess_data.py`.

Megatron-LM is not installed: its algorithm stands below (Megatron-LM of autumn 2025, by reading
`tools/preprocess_data.py`): the first process reads lines and hands them to a `Pool` 32 at a time,
a worker tokenizes each document by itself, and the first process writes what comes back. Its
tokenizer is transformers' (``tokenizer(text).input_ids``). *Batchless* is the same with the bare
tokenizers library, one `encode` a document. Both fork workers that have imported everything; ours
are spawned and import within the time that counts.

The text is the standard library's source as JSON lines, the tokenizer a byte-level BPE of 8,000
tokens, trained on it. All variants tokenize the same file in turns; their tokens are compared.
*Per core* counts the processor time of all processes. The processor time a token takes must not
grow with the number of workers: that is what can be said of scaling on a machine whose cores are
shared with other work. Wall times are given as well.

    python -m benchmarks.preprocessing [--megabytes 6] [--rounds 5] [--output benchmarks/results]
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.preprocessing.run import PreprocessOptions, preprocess
from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.env import sequential_tokenizers

# What a spawned worker does not need is imported where it is used: it imports this file again.

END = "<|endoftext|>"

_encode: Callable[[str], list[int]]
_end: int


def make_text(directory: Path, megabytes: float) -> tuple[Path, Path]:
    """A tokenizer's directory, and a file of JSON lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from lightning_megatron.data.text import standard_library_files

    texts, size = [], 0
    for path in standard_library_files():
        if size >= megabytes * 2**20:
            break
        texts.append(path.read_text("utf-8", errors="replace"))
        size += len(texts[-1])
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts[::4], trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(directory)
    lines = directory / "text.jsonl"
    with lines.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts if text)
    return directory, lines


def _load(directory: Path, transformers: bool) -> None:
    global _encode, _end
    if transformers:
        from transformers import AutoTokenizer

        known: Any = AutoTokenizer.from_pretrained(str(directory))
        _encode, _end = (lambda text: known(text).input_ids), known.eos_token_id
    else:
        from tokenizers import Tokenizer

        bare = Tokenizer.from_file(str(directory / "tokenizer.json"))
        _encode, _end = (lambda text: bare.encode(text).ids), bare.token_to_id(END)


def _document(line: str) -> tuple[list[int], int]:
    ids = _encode(json.loads(line)["text"])
    if ids:
        ids.append(_end)
    return ids, len(line)


def one_at_a_time(
    directory: Path, lines: Path, output: Path, workers: int, transformers: bool
) -> None:
    """Megatron-LM's algorithm: lines to workers, lists of tokens back, one process writes."""
    lengths = []
    context = multiprocessing.get_context("fork")
    with (
        context.Pool(workers, _load, (directory, transformers)) as pool,
        lines.open(encoding="utf-8") as file,
        (output / "tokens.bin").open("wb") as tokens,
    ):
        for ids, _ in pool.imap(_document, file, 32):
            tokens.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
        pool.close()
        pool.join()
    np.array(lengths, np.int32).tofile(output / "tokens.idx")


def processor_seconds() -> float:
    """Of this process and those that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def measured(run: Callable[[Path], None]) -> tuple[float, float, bytes]:
    """Processor seconds, wall seconds, tokens."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name)
        began, start = processor_seconds(), time.perf_counter()
        run(output)
        used, took = processor_seconds() - began, time.perf_counter() - start
        return used, took, b"".join(tokens_of(output))


def tokens_of(output: Path) -> Iterator[bytes]:
    """Tokens as bytes, in order."""
    if (output / "manifest.json").exists():
        corpus = Corpus(output)
        yield from (corpus.read(i).tobytes() for i in range(len(corpus)))
    else:
        yield (output / "tokens.bin").read_bytes()


def measure(megabytes: float, rounds: int, workers: list[int]) -> list[Mapping[str, Any]]:
    """Rows of the table."""
    from benchmarks.harness import ratio

    folder = Path(tempfile.mkdtemp())
    directory, lines = make_text(folder, megabytes)
    options = PreprocessOptions(tokenizer=str(directory), shard_bytes=1 << 19)

    def ours(count: int) -> Callable[[Path], None]:
        return lambda output: void(preprocess([str(lines)], output, options, workers=count))

    def theirs(count: int, transformers: bool) -> Callable[[Path], None]:
        return lambda output: one_at_a_time(directory, lines, output, count, transformers)

    variants = {
        "Megatron-LM's algorithm, 1 worker": theirs(1, True),
        "batchless, 1 worker": theirs(1, False),
        **{f"preprocess, {count} worker{'s' * (count > 1)}": ours(count) for count in workers},
    }
    used: dict[str, list[float]] = {name: [] for name in variants}
    took: dict[str, list[float]] = {name: [] for name in variants}
    first: bytes | None = None
    names = list(variants)
    with sequential_tokenizers():
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds, wall, tokens = measured(variants[name])
                used[name].append(seconds)
                took[name].append(wall)
                first = first or tokens
                if tokens != first:
                    sys.exit(f"{name} makes other tokens")
    shutil.rmtree(folder)
    count = len(first or b"") // 2
    peer = used[names[0]]
    return [
        {
            "variant": name,
            "M tokens": f"{count / 1e6:.2f}",
            "k tokens/s per core": round(count / statistics.median(used[name]) / 1e3),
            "per core, x of Megatron-LM's algorithm": ratio(
                [1 / seconds for seconds in used[name]], [1 / seconds for seconds in peer]
            ),
            "k tokens/s": round(count / statistics.median(took[name]) / 1e3),
        }
        for name in names
    ]


def void(_: object) -> None:
    """Drop a value."""


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=6, help="MiB of text")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant")
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, 2, cores})
    parser.add_argument("--workers", type=int, nargs="+", default=counts, help="of ours")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results, help="folder of the tables")
    options = parser.parse_args(args)
    from benchmarks.harness import report

    rows = measure(options.megabytes, options.rounds, options.workers)
    report("preprocessing", "Tokenizing", rows, options.output)


if __name__ == "__main__":
    main()
