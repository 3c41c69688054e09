"""What watching and guarding a run costs, while nothing goes wrong.

Same module, data and layout; with no callbacks, with ``Monitor()``, with ``FaultTolerance()`` and
with both (target: at most 1.02 of the median step).

    python -m benchmarks.suite_overhead [--rounds 6] [--steps 60]
    python -m benchmarks.suite_overhead --hooks [--steps 205]
    python -m benchmarks.suite_overhead --hostile [--rounds 6] [--steps 60]

``--hooks`` tells where it goes: microseconds that each callback takes of a batch, and their share
of the median step (target: at most 0.01 for each), as a clock around its own hooks sees it. That is
the processor time of the training thread, of hooks and step alike, so that it means the same on a
machine that does other work; waiting for other ranks is not part of it. It is the mean over a
window of 100 batches, which holds all that is done once in so many; of several windows the
cheapest.

``--hostile`` compares the steps of a run with an endpoint that nobody asks with those of one that
is asked by four clients without pause, beside others that hold connections open (target: 1.01).
"""

import statistics
import subprocess
import sys
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
    interleave,
    parser,
    report,
    slowest,
)
from lightning_megatron import FaultTolerance, MegatronStrategy, Monitor, PrometheusEndpoint
from lightning_megatron.callbacks.group import HOOKS, CallbackGroup
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

CONFIG = TransformerConfig(hidden_size=256, num_layers=4, num_heads=8)
BATCH_SIZE, LENGTH = 4, 64
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


def job(layout: Mapping[str, Any], rounds: int, steps: int) -> dict[str, float]:
    """Times of all variants, in one worker."""
    made: dict[str, Callable[[], list[pl.Callback]]] = {
        "nothing": list,
        "Monitor": lambda: [Monitor()],
        "FaultTolerance": lambda: [FaultTolerance()],
        "both": lambda: [FaultTolerance(), Monitor()],
    }
    return interleave(
        {name: lambda make=make: timed(layout, make(), steps) for name, make in made.items()},
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


class Hostile(pl.Callback):
    """Has a process ask the endpoint of a run for as long as it trains.

    Args:
        endpoint: that of the run.
    """

    def __init__(self, endpoint: PrometheusEndpoint) -> None:
        self._endpoint = endpoint
        self._process: subprocess.Popen[bytes] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        address, _, port = str(self._endpoint.url).rpartition("//")[2].partition(":")
        command = [sys.executable, "-I", "-c", CLIENT, address, port]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


CLIENT = """
import os, socket, sys, threading, time
os.nice(19)  # what is measured is the endpoint, not who else uses the processor
address = sys.argv[1], int(sys.argv[2])
def drip():
    while True:
        try:
            with socket.create_connection(address, 5) as s:
                while True:
                    s.send(b"G")
                    time.sleep(0.1)
        except OSError:
            time.sleep(0.01)
def ask():
    while True:
        try:
            with socket.create_connection(address, 5) as s:
                s.sendall(b"GET /metrics HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
                while s.recv(65536):
                    pass
        except OSError:
            time.sleep(0.001)
for work in [drip] * 3 + [ask] * 4:
    threading.Thread(target=work).start()
"""


def hostile_job(rounds: int, steps: int) -> dict[str, float]:
    """Times with and without clients, in one worker."""

    def run(asked: bool) -> list[float]:
        endpoint = PrometheusEndpoint(port=0)
        clients = [Hostile(endpoint)] if asked else []
        timer = StepTimer(time.process_time)
        seconds = timed({}, [Monitor(), endpoint, *clients, timer], steps)
        processor["clients" if asked else "nobody"] += timer.seconds[WARMUP:]
        return seconds

    processor: dict[str, list[float]] = {"clients": [], "nobody": []}
    found = interleave({"nobody": lambda: run(False), "clients": lambda: run(True)}, rounds)
    return found | {f"{n}, processor": statistics.fmean(s) for n, s in processor.items()}


def report_hostile(rounds: int, steps: int, output: Path) -> None:
    """What clients that mean no good cost."""
    with WorkerPool(1, timeout=900) as pool:
        [times] = pool.run(1, hostile_job, rounds, steps)
    used = times["clients, processor"] / times["nobody, processor"]
    row = {
        "nobody asks (ms)": round(1e3 * times["nobody"], 2),
        "hostile / nobody": round(times["clients"] / times["nobody"], 3),
        "the same, processor time of all threads": round(used, 3),
        "target": 1.01,
    }
    report("suite_hostile", "Step time under hostile clients", [row], output)


def main() -> None:
    """Run and report."""
    made = parser(__doc__, steps=0)
    made.add_argument("--rounds", type=int, default=6, help="turns of every variant")
    made.add_argument("--hooks", action="store_true", help="time each callback by itself")
    made.add_argument("--hostile", action="store_true", help="time clients that mean no good")
    options = made.parse_args()
    if options.hooks:
        report_hooks(options.steps or WARMUP + 2 * WINDOW, options.output)
        return
    options.steps = options.steps or 60
    if options.hostile:
        report_hostile(options.rounds, options.steps, options.output)
        return
    rows = []
    with WorkerPool(2, timeout=900) as pool:
        for name, (ranks, layout) in LAYOUTS.items():
            times = slowest(pool.run(ranks, job, layout, options.rounds, options.steps))
            without = times.pop("nothing")
            rows.append(
                {
                    "layout": name,
                    "nothing (ms)": round(1e3 * without, 2),
                    **{f"{n} / nothing": round(t / without, 3) for n, t in times.items()},
                    "target": TARGET,
                }
            )
    report("suite_overhead", "Step time with the suite on and off", rows, options.output)


if __name__ == "__main__":
    main()
