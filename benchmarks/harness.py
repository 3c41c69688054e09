"""What the benchmarks share: interleaved runs, medians, tables, files.

A ratio of two times is taken from one run: the variants take turns, round after round, in the same
processes, so that what else the machine does hits all of them alike. The figure of a variant is the
median over all its steps; of several ranks, the slowest. Where variants take turns step by step, a
ratio is that of the two steps of each round: the median of these, and their middle half.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import build_trunk

WARMUP = 5
"""Steps of each fit that are not counted."""


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of ``mallopt``."""


class StepTimer(pl.Callback):
    """Seconds from the end of one training batch to the end of the next, by some clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: list[float] = []
        self._last: float | None = None

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        now = self._clock()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens; no time is spent on data."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self._tokens = torch.randint(vocabulary, (samples, length + 1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._tokens[index, :-1], self._tokens[index, 1:]


class Model(pl.LightningModule):
    """A small transformer built in ``__init__``: an ordinary module for any strategy."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = build_trunk(config)
        self.loss = VocabParallelCrossEntropy()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.trunk(batch[0]), batch[1])
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(
    module: pl.LightningModule,
    strategy: Any,
    steps: int,
    batch_size: int,
    length: int,
    clock: Callable[[], float] = time.perf_counter,
    accelerator: str = "cpu",
) -> list[float]:
    """Train for ``steps`` steps; seconds of each counted step."""
    timer = StepTimer(clock)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=steps,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(batch_size * (steps + 1) * trainer.world_size, length, 256)
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    return timer.seconds[WARMUP:]


def interleave(
    variants: Mapping[str, Callable[[], Sequence[float]]], rounds: int
) -> dict[str, float]:
    """Median seconds per step of every variant, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            seconds[name] += run()
    return {name: statistics.median(values) for name, values in seconds.items()}


def keep_freed_memory() -> None:
    """Let this process keep what is freed, where its C library can be told so (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(option, value)


def take_turns(
    variants: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every step of every variant, one step a turn; who begins, changes."""
    found = take_turns_by(variants, rounds, [clock])
    return {name: times for name, [times] in found.items()}


def take_turns_by(
    variants: Mapping[str, Callable[[], Any]],
    rounds: int,
    clocks: Sequence[Callable[[], float]],
) -> dict[str, list[list[float]]]:
    """The same by several clocks: of every variant, by clock, the seconds of every step."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in clocks] for name in variants}
    names = list(variants)
    for turn in range(rounds + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = [clock() for clock in clocks]
            variants[name]()
            for of_clock, clock, began in zip(seconds[name], clocks, start, strict=True):
                of_clock.append(clock() - began)
    return {name: [times[2:] for times in by_clock] for name, by_clock in seconds.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median of the ratios of steps in the same rounds, and between what half of them lie.

    >>> ratio([1.0, 2.0, 1.2], [1.0, 1.0, 1.0])
    '1.200 (1.100 to 1.600)'
    """
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def ratio_and_error(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The same with the standard error of the median behind it.

    Of ``n`` numbers that scatter normally it is ``1.253 sigma / sqrt(n)``, and their middle half is
    ``1.349 sigma`` wide, which, unlike their variance, a few wild ones do not move.

    >>> ratio_and_error([1.0, 2.0, 1.2], [1.0, 1.0, 1.0])
    '1.200 +- 0.268 (1.100 to 1.600)'
    """
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    error = 1.253 / 1.349 * (high - low) / len(each) ** 0.5
    return f"{middle:.3f} +- {error:.3f} ({low:.3f} to {high:.3f})"


def slowest(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For every variant the time of the slowest rank."""
    return {name: max(times[name] for times in by_rank) for name in by_rank[0]}


def arguments(description: str | None, *, rounds: int, steps: int) -> argparse.Namespace:
    """Options that every benchmark has."""
    made = parser(description, steps=steps)
    made.add_argument("--rounds", type=int, default=rounds, help="turns of every variant")
    return made.parse_args()


def parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """A parser for a benchmark whose variants do not take turns, or that has more options."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--steps", type=int, default=steps, help="steps per turn")
    results = Path(__file__).parent / "results"
    made.add_argument("--output", type=Path, default=results, help="folder of the tables")
    return made


def report(name: str, title: str, rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Print a table, and `write` it."""
    print(write(name, title, rows, output))


def write(
    name: str, title: str, rows: Sequence[Mapping[str, Any]], output: Path, threads: int = 1
) -> str:
    """Write a table as Markdown and JSON with the machine it was measured on; the Markdown.

    Args:
        name: of the files.
        title: heading.
        rows: lines of the table, all with the same keys.
        output: folder.
        threads: of each measured process; `WorkerPool` gives its own one.
    """
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load (5 minutes, at the end)": round(os.getloadavg()[1], 1),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "python": platform.python_version(),
        "threads per process": threads,
    }
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    text = f"# {title}\n\n" + "\n".join(lines) + f"\n\n{facts}\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.md").write_text(text)
    data = {"title": title, "rows": [dict(row) for row in rows], "machine": machine}
    (output / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    return text
