"""What watching and guarding a run costs, while nothing goes wrong.

Same module, data and layout, with no callbacks and with ``Monitor()`` and ``FaultTolerance()``
(target: at most 1.02 of the median step). The two take turns, in short runs, first the one and
then the other first; the ratio is that of the medians of a round, of whose distribution the median
and the middle half are told: what else the machine does scatters by more than the suite costs. The
same is told of processor time, of all threads of the slower rank, which other work moves less.

    python -m benchmarks.suite_overhead [--rounds 6] [--steps 20] [--parts]     # about 4 minutes
    python -m benchmarks.suite_overhead --hooks [--steps 205]                   # 2 minutes

``--parts`` tells of each of the two callbacks by itself as well, and takes twice as long.

``--hooks`` tells where it goes: microseconds that each callback takes of a batch, and their share
of the median step (target: at most 0.01 for each), as a clock around its own hooks sees it. That is
the processor time of the training thread, of hooks and step alike, so that it means the same on a
machine that does other work; waiting for other ranks is not part of it. It is the mean over a
window of 100 batches, which holds all that is done once in so many; of several windows the
cheapest.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import (
    WARMUP,
    Model,
    StepTimer,
    Tokens,
    parser,
    report,
)
from lightning_megatron import FaultTolerance, MegatronStrategy, Monitor
from lightning_megatron.callback_group import HOOKS, CallbackGroup
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

CONFIG = TransformerConfig(hidden_size=256, num_layers=4, num_heads=8)
BATCH_SIZE, LENGTH = 8, 64
"""512 tokens a step, fewer than anybody trains with; the suite costs as much for more of them."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2": (2, {"tp": 2}),
    "dp=2, zero 1": (2, {"zero": 1}),
    "pp=2": (2, {"pp": 2}),
}
TARGET = 1.02
WINDOW = 100
BESIDE = {"NumberGuard": ("_judge", "_settled")}
"""What the strategy calls, not Lightning."""


class HookTimes(pl.Callback):
    """Seconds of every batch in the hooks of the members of some groups.

    Args:
        groups: whose members are timed; stands after them in the Trainer's list.
    """

    def __init__(self, groups: Sequence[CallbackGroup]) -> None:
        self.batches: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._depth = 0
        for member in (member for group in groups for member in group.members):
            kind = type(member)
            own = [n for n in HOOKS if getattr(kind, n) is not getattr(pl.Callback, n)]
            for name in (*own, *BESIDE.get(kind.__name__, ())):
                setattr(member, name, self._timed(kind.__name__, getattr(member, name)))

    def _timed(self, title: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._now[title] += time.thread_time() - began

        return timed

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches.append(dict(self._now))
        self._now.clear()

    def per_batch(self) -> dict[str, float]:
        """Mean seconds of a batch, in the cheapest window, by class of callback."""
        counted = self.batches[WARMUP:]
        starts = range(0, max(len(counted) - WINDOW, 0) + 1, WINDOW // 2)
        windows = [counted[start : start + WINDOW] for start in starts]
        names = {name for batch in counted for name in batch}
        return {
            name: min(statistics.fmean(b.get(name, 0.0) for b in window) for window in windows)
            for name in names
        }


def timed(
    layout: Mapping[str, Any],
    callbacks: Sequence[pl.Callback],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of every counted step."""
    timer = StepTimer(clock)
    strategy = MegatronStrategy(**layout)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices="auto" if not layout else 2,
            strategy=strategy,
            max_steps=steps,
            callbacks=[*callbacks, timer],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = Tokens(BATCH_SIZE * (steps + 1) * trainer.world_size, LENGTH, 256)
        trainer.fit(Model(CONFIG), DataLoader(data, batch_size=BATCH_SIZE))
    return timer.seconds[WARMUP:]


Medians = dict[str, list[tuple[float, float]]]
"""By variant, of each round: wall and processor time of the median step."""


def in_turns(
    variants: Mapping[str, Callable[[Sequence[pl.Callback]], list[float]]], rounds: int
) -> Medians:
    """Run all variants in each round, in one order and then in the other."""
    found: Medians = {name: [] for name in variants}
    order = list(variants.items())
    for turn in range(rounds):
        for name, run in order if turn % 2 == 0 else reversed(order):
            processor = StepTimer(time.process_time)
            wall = run([processor])
            used = processor.seconds[WARMUP:]
            found[name].append((statistics.median(wall), statistics.median(used)))
    return found


def ratios(by_rank: Sequence[Medians], name: str, beside: str, clock: int) -> str:
    """Of the slowest rank, round by round: median, and the middle half."""
    slow = [max(rank[name][i][clock] for rank in by_rank) for i in range(len(by_rank[0][name]))]
    base = [max(rank[beside][i][clock] for rank in by_rank) for i in range(len(slow))]
    found = sorted(a / b for a, b in zip(slow, base, strict=True))
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def job(layout: Mapping[str, Any], rounds: int, steps: int, parts: bool) -> Medians:
    """Times of all variants, in one worker."""
    made: dict[str, Callable[[], list[pl.Callback]]] = {
        "nothing": list,
        "both": lambda: [FaultTolerance(), Monitor()],
    }
    if parts:
        made["Monitor"] = lambda: [Monitor()]
        made["FaultTolerance"] = lambda: [FaultTolerance()]
    return in_turns(
        {
            name: lambda more, make=make: timed(layout, [*make(), *more], steps)
            for name, make in made.items()
        },
        rounds,
    )


def hooks_job(layout: Mapping[str, Any], steps: int) -> tuple[float, dict[str, float]]:
    """Seconds of the median step, and of each callback a batch, in one worker."""
    groups = [FaultTolerance(replicas=True), Monitor()]
    times = HookTimes(groups)
    seconds = timed(layout, [*groups, times], steps, time.thread_time)
    return statistics.median(seconds), times.per_batch()


def report_hooks(steps: int, output: Path) -> None:
    """What each callback takes, alone and with others to wait for."""
    columns = {}
    with WorkerPool(2, timeout=900) as pool:
        for name in ("one process", "tp=2", "dp=2, zero 0"):
            ranks, layout = LAYOUTS.get(name, (2, {"zero": 0}))
            columns[name] = max(pool.run(ranks, hooks_job, layout, steps), key=lambda job: job[0])
    of_all = {title for _, found in columns.values() for title in found}
    rows = []
    for title in sorted(of_all, key=lambda t: -max(f.get(t, 0) for _, f in columns.values())):
        row: dict[str, Any] = {"callback": title}
        for name, (step, found) in columns.items():
            row[f"{name} (us)"] = round(1e6 * found.get(title, 0.0), 1)
            row[f"{name}, share"] = round(found.get(title, 0.0) / step, 4)
        rows.append(row)
    total: dict[str, Any] = {"callback": "all"}
    for name, (step, found) in columns.items():
        total[f"{name} (us)"] = round(1e6 * sum(found.values()), 1)
        total[f"{name}, share"] = round(sum(found.values()) / step, 4)
    report("suite_hooks", "What each callback takes of a batch", [*rows, total], output)


def main() -> None:
    """Run and report."""
    made = parser(__doc__, steps=0)
    made.add_argument("--rounds", type=int, default=0, help="turns of every variant")
    made.add_argument("--parts", action="store_true", help="also time each callback by itself")
    made.add_argument("--hooks", action="store_true", help="time each callback by itself")
    options = made.parse_args()
    if options.hooks:
        report_hooks(options.steps or WARMUP + 2 * WINDOW, options.output)
        return
    rows = []
    with WorkerPool(2, timeout=900) as pool:
        for name, (ranks, layout) in LAYOUTS.items():
            rounds, steps = options.rounds or 6, options.steps or 20
            by_rank = pool.run(ranks, job, layout, rounds, steps, options.parts)
            nothing = max(statistics.median(t[0] for t in rank["nothing"]) for rank in by_rank)
            row: dict[str, Any] = {"layout": name, "nothing (ms)": round(1e3 * nothing, 2)}
            for variant in by_rank[0]:
                if variant != "nothing":
                    row[f"{variant} / nothing"] = ratios(by_rank, variant, "nothing", 0)
                    row[f"{variant} / nothing, processor"] = ratios(by_rank, variant, "nothing", 1)
            rows.append({**row, "target": TARGET})
            print(rows[-1], flush=True)
    report("suite_overhead", "Step time with the suite on and off", rows, options.output)


if __name__ == "__main__":
    main()
