"""What it costs to be resumable: skipping samples, and random numbers of each sample's own.

    python -m benchmarks.resume

The first table is the time from "so many samples are done" to the first index of the next batch,
for `ResumableSampler` and for what a plain loader offers, which is to iterate its sampler that far.
The second is what a sample costs to read when its random numbers are its own.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler

from lightning_megatron.data.reading.augmentation import Aside, SampleIndices, SampleSeeds
from lightning_megatron.data.reading.sampler import Division, ResumableSampler


class _Bytes(Dataset[Any]):
    """A sequence of 2048 tokens out of memory, as language models read them."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(1 << 20, dtype=torch.int64)

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        part = self.tokens[index * 2048 : (index + 1) * 2048 + 1]
        return part[:-1], part[1:]


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of ``work``."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def skip(samples: int, skipped: int) -> int:
    """Go to a position with `ResumableSampler`, as one of eight ranks."""
    sampler = ResumableSampler(samples, seed=1).divided(Division(ranks=8, rank=3, batch_size=4))
    sampler.seek(2, skipped)
    return next(iter(sampler))


def iterate(samples: int, skipped: int) -> Any:
    """Go there by taking one index after the other."""
    generator = torch.Generator().manual_seed(1)
    indices: Iterator[int] = iter(RandomSampler(range(samples), generator=generator))
    return next(islice(indices, skipped, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| samples skipped | of | ResumableSampler | iterating RandomSampler |")
    print("|---|---|---|---|")
    for skipped, samples in ((10**4, 10**6), (10**6, 2 * 10**6), (10**7, 2 * 10**7)):
        ours = seconds(lambda n=samples, k=skipped: skip(n, k), repeats)  # type: ignore[misc]
        theirs = seconds(lambda n=samples, k=skipped: iterate(n, k), 1)  # type: ignore[misc]
        print(f"| {skipped:,} | {samples:,} | {ours * 1e3:.1f} ms | {theirs * 1e3:.1f} ms |")

    dataset, seeds, aside = _Bytes(), SampleSeeds.of_epoch(1, 0), Aside()

    def plain() -> None:
        _ = [dataset[i] for i in range(100)]

    def seeded() -> None:
        aside.enter()
        indices = SampleIndices(range(100), [seeds(i) for i in range(100)])
        _ = [dataset[i] for i in indices]
        aside.leave()

    before, after = seconds(plain, 20 * repeats), seconds(seeded, 20 * repeats)
    around = seconds(lambda: (aside.enter(), aside.leave()), 20 * repeats)
    print("\n| reading a sample of 2048 tokens | microseconds |\n|---|---|")
    print(f"| as it is | {before * 1e4:.1f} |")
    print(f"| with random numbers of its own | {(after - around) * 1e4:.1f} |")
    print(f"| per batch, without workers | {around * 1e6:.0f} |")


if __name__ == "__main__":
    main()
