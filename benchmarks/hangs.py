"""Hangs of every kind: who is named, in which section, and how long after the limit.

    python -m benchmarks.hangs                  # about 5 minutes
    python -m benchmarks.hangs --clean 600      # 10 minutes and some seconds
    python -m benchmarks.hangs --costs

Each fault is committed by `FaultInjector` on rank 1 of two, ``--series`` times under every layout,
and ends by itself when the report should have been there: one limit and two seconds later. All
kinds follow each other in one run, but for the two that end it. The delay is the time from the
fault to the report, less the limit. The second form trains for so many seconds without a fault,
with a save of four seconds of rank 0 in every twenty, under limits of five seconds: any report is a
false alarm. ``--costs`` tells what the section clock and the two detectors cost a step.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from benchmarks.harness import parser, report
from lightning_megatron import (
    ConnectionConfig,
    HangDetector,
    MegatronStrategy,
    PipelineSequential,
)
from lightning_megatron._torch.collectives import watch_waits
from lightning_megatron.fault_tolerance.hangs.heartbeat import Page
from lightning_megatron.fault_tolerance.slow_rank_comparison import OwnWork
from lightning_megatron.run_log.events import read_events
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.testing import WorkerPool
from tests.faults.acts import Fault
from tests.faults.injector import FaultInjector

LIMIT_S, HANG_S, STEP_S, WIDTH = 1.0, 3.0, 0.02, 16
AT, EVERY = 6, 4
"""The step of the first fault, and the steps from one to the next."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"zero": 1},
    "dp2 zero 3": {"zero": 3, "num_microbatches": 2},
    "pp2": {"pp": 2, "num_microbatches": 2},
}
SECTIONS = ("data", "forward", "backward", "optimizer", "checkpoint", "validation")
FAULTS: dict[str, tuple[str, str]] = {
    **{f"sleeps in {section}": ("hang", section) for section in SECTIONS},
    "holds Python's lock": ("gil", "forward"),
    "is stopped": ("stop", "forward"),
}
"""Kind and section."""
STEPS = {name: AT + EVERY * place for place, name in enumerate(FAULTS)}
LAST = AT + EVERY * len(FAULTS)
SKIPS, ENDS = "skips a collective", "has fewer batches"


class Model(pl.LightningModule):
    """Takes 20 ms a step; perhaps leaves out a collective on rank 1."""

    def __init__(self, *, skips: bool = False, save_s: float = 0.0) -> None:
        super().__init__()
        self.net = PipelineSequential(layers=[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.skips, self.save_s = skips, save_s
        self.group: Any = None

    @override
    def on_fit_start(self) -> None:
        if self.skips:
            self.group = dist.new_group(timeout=timedelta(seconds=HANG_S))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        skipped = batch_idx == AT and self.trainer.global_rank == 1
        if self.group is not None and batch_idx <= AT and not skipped:
            with suppress(RuntimeError):
                dist.all_reduce(torch.zeros(3), group=self.group)
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_rank == 0:
            time.sleep(self.save_s)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Counted(IterableDataset[Any]):
    """So many samples on this rank."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(WIDTH),)] * self.count)


class Saves(pl.Callback):
    """Saves every so many batches."""

    def __init__(self, path: str, every: int) -> None:
        self.path, self.every = path, every
        self.count = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.count += 1
            trainer.save_checkpoint(f"{self.path}/{self.count}.ckpt")


def trainer_for(layout: Mapping[str, Any], callbacks: list[pl.Callback], **more: Any) -> pl.Trainer:
    connection = ConnectionConfig(timeout_s=120)
    return pl.Trainer(
        strategy=MegatronStrategy(**{"connection": connection, **layout}),
        accelerator="cpu",
        devices=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **more,
    )


def train_with(fault: str, layout: dict[str, Any], run_dir: str) -> None:
    """Train with one of the faults that end a run, or with all others (no name)."""
    detector = HangDetector(limit=LIMIT_S, action="report", run_dir=run_dir)
    callbacks: list[pl.Callback] = [detector]
    if not fault:
        faults = [
            Fault(kind=kind, rank=1, step=STEPS[name], section=section, amount=HANG_S)
            for name, (kind, section) in FAULTS.items()
        ]
        callbacks += [Saves(run_dir, EVERY), FaultInjector(faults, f"{run_dir}/struck")]
    elif fault == ENDS:
        layout = {**layout, "connection": ConnectionConfig(timeout_s=HANG_S)}
    # Saves and validations come right before the steps that faults are in.
    trainer = trainer_for(layout, callbacks, max_epochs=1, val_check_interval=2)
    trainer.strategy.events.open(run_dir)  # type: ignore[attr-defined]
    data: Any = TensorDataset(torch.zeros(8 * LAST, WIDTH))
    if fault:
        trainer.limit_val_batches = 0
    if fault == ENDS:
        data = Counted(4 * (AT if trainer.global_rank == 1 else LAST))
    batch_size = 8 if layout.get("pp") else 4
    loader = DataLoader(data, batch_size=batch_size)
    validation = DataLoader(TensorDataset(torch.zeros(32, WIDTH)), batch_size=batch_size)
    with suppress(RuntimeError):
        trainer.fit(Model(skips=fault == SKIPS), loader, validation)
    if fault == ENDS and trainer.global_rank == 1:
        time.sleep(HANG_S)


def found_in(run_dir: Path, ends: str) -> dict[str, dict[str, Any]]:
    """The first report of each fault of a run, with the delay if the fault was injected."""
    reports = [json.loads(path.read_text()) for path in (run_dir / "hangs").glob("*.json")]
    reports.sort(key=lambda report: float(report["mono"]))
    if ends:
        return {ends: reports[0]} if reports else {}
    names = list(FAULTS)
    begun = [e for e in read_events(run_dir) if e["kind"] == "injected"]
    found: dict[str, dict[str, Any]] = {}
    for event, after in zip(begun, [*begun[1:], {"mono": float("inf")}], strict=True):
        name = names[(event["step"] - AT) // EVERY]
        for report_of in reports:
            if event["mono"] < report_of["mono"] < after["mono"]:
                report_of["delay"] = report_of["mono"] - event["mono"] - LIMIT_S
                found.setdefault(name, report_of)
    return found


def outcome(fault: str, layout: str, found: list[dict[str, Any] | None]) -> dict[str, Any]:
    """A row of the table, of the reports of all turns."""
    told = [one for one in found if one is not None]
    right = [[c["rank"] for c in one["culprits"]] == [1] for one in told]
    section = FAULTS.get(fault, ("", ""))[1]
    there = [one["culprits"][0]["section"] == section for one in told]
    delays = sorted(one["delay"] for one in told if "delay" in one)
    stacks = min((sum(bool(entry["stack"]) for entry in one["ranks"]) for one in told), default=0)
    return {
        "rank 1": fault,
        "layout": layout,
        "right rank": f"{sum(right)} of {len(found)}",
        "right section": f"{sum(there)} of {len(found)}" if section else "-",
        "after the limit": f"{delays[0]:.2f} to {delays[-1]:.2f} s" if delays else "-",
        "ranks with stacks": f"{stacks} of 2",
        "others wait in": told[0]["waiting_in"] or "-" if told else "-",
    }


def train_cleanly(seconds: float, run_dir: str) -> int:
    """Train without a fault; how often it saved."""
    detector = HangDetector(limit=5.0, action="report", run_dir=run_dir)
    saves = Saves(run_dir, int(20.0 / STEP_S / 1.5))
    trainer = trainer_for({"zero": 1}, [detector, saves], max_time={"seconds": int(seconds)})
    data = DataLoader(TensorDataset(torch.zeros(4000, WIDTH)), batch_size=4)
    validation = DataLoader(TensorDataset(torch.zeros(320, WIDTH)), batch_size=4)
    trainer.fit(Model(save_s=4.0), data, validation)
    return saves.count


def microseconds(work: Any, count: int = 20000) -> float:
    """Mean time of a call, the best of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            work()
        times.append((time.perf_counter() - start) / count)
    return round(min(times) * 1e6, 2)


def costs(directory: Path) -> list[dict[str, Any]]:
    """What is done in every step, by itself."""
    clock = SectionClock()
    rows = [{"what": "enter a section", "us": microseconds(lambda: clock.enter("data"))}]
    clock.mirror = Page(directory / "page")
    rows.append({"what": "with HangDetector", "us": microseconds(lambda: clock.enter("data"))})
    wait = microseconds(lambda: clock.waited(clock.began_to_wait()))
    rows.append({"what": "note one wait for others, with HangDetector", "us": wait})
    undo = watch_waits(clock.began_to_wait, clock.waited)
    undo()
    work = OwnWork(clock)
    rows.append({"what": "SlowRankDetector, per batch", "us": microseconds(work.end)})
    return rows


def main() -> None:
    made = parser(__doc__, steps=LAST)
    made.add_argument("--clean", type=float, help="train for so many seconds without a fault")
    made.add_argument("--costs", action="store_true", help="only what it costs")
    made.add_argument("--series", type=int, default=3, help="turns of every fault and layout")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.costs:
            report("hangs_cost", "Cost of noting sections", costs(Path(directory)), options.output)
            return
        with WorkerPool(2, timeout=900) as pool:
            if options.clean:
                saves = pool.run(2, train_cleanly, options.clean, directory)[0]
                alarms = len(list(Path(directory, "hangs").glob("*.json")))
                rows = [{"seconds": options.clean, "saves of 4 s": saves, "limit": "5 s"}]
                rows[0]["false alarms"] = alarms
                report("hangs_clean", "A run without faults", rows, options.output)
                return
            rows = []
            for name, layout in LAYOUTS.items():
                found: dict[str, list[dict[str, Any] | None]] = {}
                for turn in range(options.series):
                    for ends in ("",) if layout.get("pp") else ("", SKIPS, ENDS):
                        folder = Path(directory, f"{name} {turn} {ends}")
                        folder.mkdir()
                        pool.run(2, train_with, ends, layout, str(folder))
                        told = found_in(folder, ends)
                        for fault in [ends] if ends else FAULTS:
                            found.setdefault(fault, []).append(told.get(fault))
                for fault, of_turns in found.items():
                    rows.append(outcome(fault, name, of_turns))
                    print(rows[-1], flush=True)
            report("hangs", f"Hangs of rank 1 of 2, limit {LIMIT_S:.0f} s", rows, options.output)


if __name__ == "__main__":
    main()
