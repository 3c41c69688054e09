"""A run that is hit by a random fault a minute, beside the same run that is left alone.

    python -m benchmarks.soak --minutes 30

Four ranks (tp=2 x dp=2) under torchrun train a small transformer, with a DataLoader worker each and
a checkpoint every ten steps, while faults strike at random times. The run is stopped after so many
minutes, and as many steps are taken once more without faults. What is held against each other is
the loss of every step, to the bit, and a hash of each rank's final weights.

A step of the first run also waits, as if for an accelerator (``--pause``), so that starting four
Python processes on a few cores is not out of all proportion; the second does not wait. Goodput is
the time of the steps that were kept over all time, from the first start on. Files, threads and
resident memory are read every two seconds, of torchrun, which lives through the whole run, and of
the ranks of the longest attempt.

One command, with a hard limit on its time (a quarter more than asked for, and five minutes), after
which everything that it has started is killed. The seed is printed; the same one gives the same
timetable.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.soak_outcomes import Outcome, read_outcomes, table
from lightning_megatron.monitoring.goodput import Ledger
from tests.faults.acts import Fault

RANKS = 4
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("kill", "segfault", "abort", "exception", "hang", "gil", "stop")},
    "exit": {"amount": 1},
    "sigterm": {},
    "slow": {"amount": 200, "steps": 10},
    "nan_loss": {},
    "nan_gradient": {},
    "spike": {"amount": 1000},
    "worker_kill": {},
    "disk_full": {"steps": 12},
    "corrupt": {},
}
"""What a run must survive without a trace in its weights, with options of `Fault`."""
SECTIONS = {"nan_loss": ("forward",), "nan_gradient": ("backward",), "spike": ("forward",)}
"""Where kinds can strike that cannot strike anywhere in a step."""
MARK = "SOAK_DIRECTORY"
"""Environment variable by which the processes of a launch are known."""
GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL at the end of the time."""
FIRST_S = 20.0
"""Before which nothing strikes: what is ordinary must have been seen."""
EVERY = 10
"""Steps between checkpoints."""


# The run -----------------------------------------------------------------------------------------


def train(directory: Path, *, pause: float, steps: int, deadline: float) -> None:
    """One attempt of the run, in one of torchrun's workers."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, Dataset

    import lightning_megatron as lm
    from benchmarks.harness import Model
    from lightning_megatron.models.config import TransformerConfig
    from tests.faults.injector import FaultInjector

    class Noisy(Dataset[Any]):
        """Sequences that follow from their number, some of whose tokens are drawn anew."""

        def __len__(self) -> int:
            return 1 << 16

        def __getitem__(self, index: int) -> Any:
            tokens = (torch.arange(33) * (index % 7 + 1) + index) % 64
            tokens = torch.where(torch.rand(33) < 0.1, torch.randint(64, (33,)), tokens)
            return tokens[:-1], tokens[1:]

    class Paused(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(pause)
            return super().training_step(batch, batch_idx)

    class Record(pl.Callback):
        """Writes each loss down, and ends the run in time."""

        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any
        ) -> None:
            if trainer.is_global_zero:
                loss = float(outputs["loss"]).hex()
                append(directory / "losses.jsonl", {"step": trainer.global_step, "loss": loss})
            late = trainer.global_step % EVERY == 0 and time.time() > deadline
            if trainer.global_step % EVERY == 0:
                trainer.should_stop = trainer.strategy.reduce_boolean_decision(late, all=False)

        def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
            digest = hashlib.sha256()
            for weight in lm.gather(module).values():
                digest.update(weight.numpy().tobytes())
            end = {"step": trainer.global_step, "weights": digest.hexdigest()}
            (directory / f"end{trainer.global_rank}.json").write_text(json.dumps(end))

    pl.seed_everything(1)
    faults = [Fault(**fault) for fault in json.loads((directory / "faults.json").read_text())]
    config = TransformerConfig(
        vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, max_seq_len=32
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=lm.MegatronStrategy(
            tp=2,
            connection=lm.ConnectionConfig(timeout_s=120),
            checkpoint=lm.CheckpointConfig(mode="async", keep=3),
        ),
        callbacks=[
            *guards(),
            FaultInjector(faults, directory / "struck"),
            Record(),
            ModelCheckpoint(directory / "checkpoints", every_n_train_steps=EVERY, save_top_k=-1),
        ],
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=directory / "run",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Noisy(), batch_size=4, num_workers=1)
    trainer.fit(Paused(config), loader, ckpt_path="auto")


def guards() -> list[Any]:
    """Everything switched on, with limits that suit a step of 0.2 s."""
    import lightning_megatron as lm

    guard = lm.FaultTolerance(
        hang=lm.HangDetector(limit=15.0),
        numbers=lm.NumberGuard(nonfinite="rerun", spike="rerun"),
        workers=lm.WorkerGuard(respawn=1000, hang_s=15),
    )
    return [guard, lm.Monitor()]


def append(path: Path, record: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)


# What it is watched by ---------------------------------------------------------------------------


@dataclass
class Watched:
    """A process, every two seconds."""

    times: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def growth(self) -> dict[str, float] | None:
        """Median of the last third over that of the first, less one; after a time to settle."""
        settled = [i for i, at in enumerate(self.times) if at - self.times[0] >= FIRST_S]
        if len(settled) < 9:
            return None
        first, last = settled[: len(settled) // 3], settled[-(len(settled) // 3) :]
        return {
            name: statistics.median(values[i] for i in last)
            / max(statistics.median(values[i] for i in first), 1)
            - 1
            for name, values in (
                ("files", self.files),
                ("threads", self.threads),
                ("memory", self.memory),
            )
        }


class Watch(threading.Thread):
    """Watches a process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.pid = 0
        self.seen: dict[int, Watched] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(2):
            if self.pid:
                for pid in (self.pid, *children(self.pid)):
                    with suppress(OSError, ValueError, KeyError):
                        self.look(pid)

    def look(self, pid: int) -> None:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        files = len(os.listdir(f"/proc/{pid}/fd"))
        memory, threads = int(status["VmRSS"].split()[0]), int(status["Threads"])
        seen = self.seen.setdefault(pid, Watched())
        seen.times.append(time.monotonic())
        seen.files.append(files)
        seen.threads.append(threads)
        seen.memory.append(memory)

    def growth(self) -> dict[str, dict[str, float]]:
        """Of torchrun, and of the ranks that lived longest."""
        ranks = sorted(
            (one for pid, one in self.seen.items() if pid != self.pid), key=lambda w: -len(w.times)
        )
        found = {"torchrun": self.seen[self.pid].growth()} if self.pid in self.seen else {}
        found |= {f"rank of the longest attempt ({i})": w.growth() for i, w in enumerate(ranks[:4])}
        return {name: growth for name, growth in found.items() if growth is not None}


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


# The comparison ----------------------------------------------------------------------------------


def random_faults(
    kinds: Sequence[str], *, mean_s: float, duration_s: float, seed: int
) -> list[Fault]:
    """Faults at random times, in seconds from the start of the run, from `FIRST_S` on."""
    chance, now, faults = random.Random(seed), FIRST_S, []
    while (now := now + chance.expovariate(1 / mean_s)) < duration_s:
        kind = chance.choice(kinds)
        section = chance.choice(SECTIONS.get(kind, ("data", "forward", "backward", "optimizer")))
        rank, draw = chance.randrange(RANKS), chance.getrandbits(31)
        fault = Fault(kind=kind, rank=rank, section=section, draw=draw, **KINDS[kind])
        faults.append(replace(fault, after=round(now, 1)))
    return faults


def launch(
    directory: Path, faults: Sequence[Fault], watch: Watch | None, limit_s: float, *options: str
) -> int | None:
    """Run under torchrun, to the end or that of the time (None); leaves no process behind."""
    directory.mkdir(parents=True)
    begun = time.time()
    timed = [asdict(replace(fault, after=begun + fault.after)) for fault in faults]
    (directory / "faults.json").write_text(json.dumps(timed))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=10000", "--monitor-interval=0.2"]
    command += ["-m", "benchmarks.soak", "--train", str(directory), *options]
    with (directory / "output.txt").open("w") as output:
        environment = {**os.environ, MARK: str(directory)}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            if watch is not None:
                watch.pid = process.pid
                watch.start()
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:
            kill_all(f"{MARK}={directory}")
            process.wait()


def kill_all(mark: str) -> None:
    """Kill the processes of a launch that are left: torchrun's workers have their own sessions."""
    for _ in range(20):  # a process may be starting another one while we look
        left = [pid for pid in processes() if mark.encode() in environment_of(pid).split(b"\0")]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def processes() -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if int(p.name) != os.getpid()]


def environment_of(pid: int) -> bytes:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return b"" if state == "Z" else Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def losses(directory: Path) -> dict[int, str]:
    """By step; of one that was taken again, the last."""
    lines = (directory / "losses.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def ends(directory: Path) -> list[dict[str, Any]]:
    """What each rank ended with."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("end*.json"))]


def soak(options: argparse.Namespace, folder: Path) -> int:
    seconds = options.minutes * 60
    faults = random_faults(
        options.kinds.split(), mean_s=options.mean, duration_s=seconds - 30, seed=options.seed
    )
    print(f"seed {options.seed}, {len(faults)} faults, in {folder}")
    print("\n".join(f"  {fault}" for fault in faults), flush=True)
    faulty, clean, watch = folder / "faulty", folder / "clean", Watch()
    stop = f"--deadline={time.time() + seconds}"
    pause = f"--pause={options.pause}"
    code = launch(faulty, faults, watch, seconds + 150, stop, pause)
    watch.over.set()
    outcomes, ledger = read_outcomes(faulty / "run")
    print(f"\n{table(outcomes, ledger)}\nexit code {code}", flush=True)
    growth = watch.growth()
    compared = {"steps": 0, "losses that differ": -1, "weights that differ": -1}
    if code == 0 and ends(faulty):
        steps = ends(faulty)[0]["step"]
        again = launch(clean, [], None, seconds + 300, f"--steps={steps}")
        print(f"undisturbed run of {steps} steps: exit code {again}", flush=True)
        if again == 0:
            compared = compare(faulty, clean)
    results(options, outcomes, ledger, compared, growth, code)
    worst = max((v for one in growth.values() for v in one.values()), default=1.0)
    same = compared["losses that differ"] == compared["weights that differ"] == 0
    return 0 if same and (ledger.goodput() or 0.0) >= 0.6 and worst <= 0.05 else 1


def compare(faulty: Path, clean: Path) -> dict[str, int]:
    ours, theirs = losses(faulty), losses(clean)
    steps = ours.keys() | theirs.keys()
    pairs = zip(ends(faulty), ends(clean), strict=True)
    return {
        "steps": len(steps),
        "losses that differ": sum(ours.get(step) != theirs.get(step) for step in steps),
        "weights that differ": sum(one != other for one, other in pairs),
    }


def results(
    options: argparse.Namespace,
    outcomes: list[Outcome],
    ledger: Ledger,
    compared: dict[str, int],
    growth: dict[str, dict[str, float]],
    code: int | None,
) -> None:
    recovered = [o.recovered_s for o in outcomes if o.recovered_s is not None]
    kinds = Counter(outcome.fault["what"] for outcome in outcomes)
    facts: dict[str, Any] = {
        "seed": options.seed,
        "minutes": options.minutes,
        "mean seconds between faults": options.mean,
        "exit code": code,
        "faults injected": ", ".join(f"{k} {n}" for k, n in sorted(kinds.items())),
        "faults in all": len(outcomes),
        "noticed by the run, or by a restart": sum(o.detected_s is not None for o in outcomes),
        "recovered": len(recovered),
        "seconds to recover, median and most": " and ".join(
            f"{f(recovered):.1f}" for f in (statistics.median, max) if recovered
        ),
        "restarts": ledger.restarts,
        "steps lost": ledger.steps_lost,
        "goodput (target 60 %)": f"{ledger.goodput() or 0.0:.1%} of {ledger.wall_s():.0f} s",
        "steps compared": compared["steps"],
        "losses that differ from the undisturbed run (target 0)": compared["losses that differ"],
        "ranks whose final weights differ (target 0)": compared["weights that differ"],
    }
    for name, one in growth.items():
        text = ", ".join(f"{key} {value:+.1%}" for key, value in one.items())
        facts[f"growth of {name} (target 5 %)"] = text
    rows = [{"what": key, "figure": value} for key, value in facts.items()]
    report("soak", "A run under random faults (`python -m benchmarks.soak`)", rows, options.output)
    (options.output / "soak_ledger.txt").write_text(table(outcomes, ledger) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="length of the disturbed run")
    add("--mean", type=float, default=60.0, help="mean seconds between faults")
    add("--kinds", default=" ".join(KINDS), help="faults to choose from")
    add("--seed", type=int, default=int(time.time()) % 100_000)
    add("--pause", type=float, default=0.15, help="seconds that each step waits")
    add("--output", type=Path, default=Path("benchmarks/results"))
    add("--directory", type=Path, help="keep everything there")
    add("--train", type=Path, help=argparse.SUPPRESS)
    add("--steps", type=int, default=-1, help=argparse.SUPPRESS)
    add("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        pause = options.pause if options.steps < 0 else 0.0
        train(options.train, pause=pause, steps=options.steps, deadline=options.deadline)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.directory is not None:
        sys.exit(soak(options, options.directory))
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    code = soak(options, folder)
    if code == 0:
        shutil.rmtree(folder)
    else:
        print(f"what there is to look at is kept in {folder}")
    sys.exit(code)


if __name__ == "__main__":
    main()
