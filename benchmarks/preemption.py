"""Does every run that gets a signal leave a checkpoint, and go on from it as if nothing had been?

Each try trains a small network with dropout on several processes, strikes at a random moment, waits
for the end of all processes, starts the run anew with ``ckpt_path="auto"`` and holds every step of
both parts against an undisturbed run: loss and samples of every rank, to the bit. A try is good if
all ranks (or the launcher) ended with the exit code expected, one step was saved, and no step of
the curve differs.

To afford many tries, ranks are forked from a process that has imported everything; real launchers
have cases of their own. ``--only`` runs one case and adds it to the results; ``--cost`` measures
what the votes of a batch cost beside Lightning's broadcast, which it replaces.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import CheckpointConfig, MegatronStrategy, PipelineSequential, Preemption

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "preemption.json"
WIDTH, SAMPLES, BATCH = 8, 192, 4
LIMIT_S = 90.0


class Numbers(Dataset[Any]):
    """Samples with noise of their own."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.randn(WIDTH) + 0.01 * index, index


class Network(pl.LightningModule):
    """Four layers with dropout; a step takes a while, so that signals meet it anywhere."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        blocks = [nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1)) for layer in layers]
        self.net = PipelineSequential(layers=blocks)
        self.pause_s = pause_s

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        loss: Tensor = (self.net(batch[0]) ** 2).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Curve(pl.Callback):
    """Writes what a step did as soon as it is done, and where the run is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.file = (self.folder / f"curve{trainer.global_rank}.jsonl").open("a", buffering=1)
        self.place = self.folder / f"place{trainer.global_rank}"
        self.place.write_text("start")

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.sanity_checking:
            self.place.write_text("validation")

    def on_save_checkpoint(self, *args: Any) -> None:
        self.place.write_text("save")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss, samples = float(outputs["loss"]).hex(), batch[1].tolist()
        line = [trainer.current_epoch, batch_idx, loss, samples]
        self.file.write(json.dumps(line) + "\n")
        self.place.write_text("batch")


def train(folder: Path, options: dict[str, Any]) -> None:
    """One process of a run."""
    pl.seed_everything(5, verbose=False)
    devices = options["devices"]
    layout = {"pp": 2, "num_microbatches": 2} if devices > 1 else {}
    mode = "async" if options.get("saves") else "sync"
    strategy = MegatronStrategy(**layout, checkpoint=CheckpointConfig(mode=mode))
    callbacks: list[Any] = [Curve(folder), Preemption()]
    if options.get("saves"):
        callbacks.append(ModelCheckpoint(folder / "often", every_n_train_steps=1, save_top_k=-1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=callbacks,
        default_root_dir=folder,
        accumulate_grad_batches=options.get("accumulate", 1),
        val_check_interval=options.get("validate"),
        limit_val_batches=8 if options.get("validate") else 0,
        enable_checkpointing=bool(options.get("saves")),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    workers = options.get("workers", 0)
    data = DataLoader(
        Numbers(),
        BATCH,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    validation = DataLoader(Numbers(), BATCH)
    trainer.fit(Network(options.get("pause_s", 0.02)), data, validation, ckpt_path="auto")
    print("finished", flush=True)


# Processes ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """Processes of a run, and how they ended."""

    pids: list[int]
    """Of the ranks; of the launcher alone, where there is one."""
    log: Path
    codes: list[int] = field(default_factory=list)

    def wait(self) -> bool:
        """For the end of all; False if they had to be killed."""
        deadline, left = time.monotonic() + LIMIT_S, dict.fromkeys(self.pids)
        codes: dict[int, int] = {}
        while left and time.monotonic() < deadline:
            for pid in list(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    del left[pid]
            time.sleep(0.01)
        for pid in left:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            os.waitpid(pid, 0)
        self.codes = [codes.get(pid, -9) for pid in self.pids]
        return not left


def fork(folder: Path, options: dict[str, Any]) -> Run:
    """Ranks without a launcher, in one process group, from this process with its imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids: list[int] = []
    for rank in range(options["devices"]):
        pid = os.fork()
        if not pid:
            _be_rank(rank, pids, port, folder, options)
        pids.append(pid)
        os.setpgid(pid, pids[0])
    return Run(pids, folder / "rank0.log")


def _be_rank(rank: int, pids: list[int], port: int, folder: Path, options: dict[str, Any]) -> None:
    code = 1
    try:
        os.setpgid(0, pids[0] if pids else 0)
        torch.set_num_threads(1)
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(options["devices"]),
            "NODE_RANK": "0",
            "LOCAL_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": "lo",
        } | {name: value.format(rank=rank) for name, value in options.get("env", {}).items()}
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(folder, options)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        os._exit(code)


def launch(folder: Path, options: dict[str, Any]) -> Run:
    """By torchrun or Lightning, as a user would, in a session of its own."""
    before = []
    if options["launcher"] == "torchrun":
        before = ["torch.distributed.run", "--standalone", "-m"]
        before.insert(2, f"--nproc-per-node={options['devices']}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = ["benchmarks.preemption", "--train", str(folder), json.dumps(options)]
    with (folder / "launch.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *before, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Run([process.pid], folder / "launch.log")


@contextmanager
def folder_for_a_run() -> Iterator[str]:
    """A directory that forked processes do not delete when they exit."""
    name = tempfile.mkdtemp()
    try:
        yield name
    finally:
        shutil.rmtree(name, ignore_errors=True)


# Cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Who is struck, when, and what is expected."""

    who: str
    """``rank n``, ``ranks``, ``launcher``, ``group``."""
    options: dict[str, Any] = field(default_factory=dict)
    number: int = signal.SIGTERM
    when: str = "batch"
    """What the first rank does."""
    codes: tuple[int, ...] = (143,)
    tries: int = 10


FOUR, TWO = {"devices": 4}, {"devices": 2}
WORKERS = {"workers": 2}
TORCHRUN, LIGHTNING = {"launcher": "torchrun"}, {"launcher": "lightning"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "127.0.0.1",
}
CASES = {
    "SIGTERM to rank 0": Case("rank 0", TWO),
    "SIGTERM to rank 1": Case("rank 1", TWO),
    "SIGTERM to the last of 4 ranks": Case("rank 3", FOUR),
    "SIGTERM to all ranks": Case("ranks", TWO),
    "SIGTERM to the process group, 2 workers a rank": Case("group", TWO | WORKERS),
    "SIGUSR1 to the process group, 2 workers a rank": Case(
        "group", TWO | WORKERS, number=signal.SIGUSR1
    ),
    "one process": Case("rank 0", {"devices": 1}),
    "before the first step": Case("rank 1", TWO, when="start"),
    "in an accumulation of 4 batches": Case("rank 1", TWO | {"accumulate": 4}),
    "in validation": Case("rank 1", TWO | {"validate": 5}, when="validation"),
    "with asynchronous saves in flight": Case("rank 1", TWO | {"saves": True}),
    "while the state is copied for a save": Case("rank 1", TWO | {"saves": True}, when="save"),
    "Slurm: SIGUSR1 to one rank, scontrol": Case(
        "rank 1", TWO | {"env": SLURM}, number=signal.SIGUSR1, tries=5
    ),
    "torchrun: SIGTERM to the launcher": Case(
        "launcher", TWO | TORCHRUN, codes=(1, 143, -15), tries=2
    ),
    "torchrun: SIGTERM to the process group, 2 workers a rank": Case(
        "group", TWO | TORCHRUN | WORKERS, codes=(1, 143, -15), tries=2
    ),
    "Lightning's launcher: SIGTERM to it": Case("launcher", TWO | LIGHTNING, tries=2),
    "Lightning's launcher: SIGTERM to the process group, 2 workers a rank": Case(
        "group", TWO | LIGHTNING | WORKERS, tries=2
    ),
}


@dataclass
class Outcome:
    """Of one try."""

    seconds: float
    """From the signal to the end of the last process."""
    faults: list[str]
    codes: list[int]


def interrupt(case: Case, folder: Path, seed: int) -> Outcome:
    """Run, strike, wait; the curve and the checkpoint are then in the folder."""
    chance = random.Random(seed)
    begin: Callable[[Path, dict[str, Any]], Run] = launch if "launcher" in case.options else fork
    run = begin(folder, case.options)
    batches = chance.randint(2, 12)
    _wait_for(folder, case.when, batches if case.when in ("batch", "save") else 0)
    time.sleep(chance.random() * 0.03)
    begun = time.monotonic()
    strike(case, run)
    faults = [] if run.wait() else [f"did not end in {LIMIT_S:g} s"]
    seconds = time.monotonic() - begun
    if any(code not in case.codes for code in run.codes):
        faults.append(f"exit codes {run.codes}: {run.log.read_text()[-1500:]}")
    pattern = "hpc_ckpt_*.ckpt" if "env" in case.options else "preempted-step=*.ckpt"
    saved = [path.name for path in folder.rglob(pattern)]
    if len(saved) != 1:
        faults.append(f"saved {saved}: {run.log.read_text()[-1500:]}")
    calls = folder / "scontrol.log"
    if "env" in case.options and calls.read_text().split("\n") != ["requeue 77", ""]:
        faults.append(f"scontrol was called: {calls.read_text()}")
    return Outcome(seconds, faults, run.codes)


def strike(case: Case, run: Run) -> None:
    """Send the signal."""
    if case.who == "group":
        os.killpg(os.getpgid(run.pids[0]), case.number)
        return
    who = run.pids[int(case.who[5:]) :][:1] if case.who.startswith("rank ") else run.pids
    for pid in who:
        os.kill(pid, case.number)


def _wait_for(folder: Path, when: str, batches: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    place, curve = folder / "place0", folder / "curve0.jsonl"
    while time.monotonic() < deadline:
        here = place.read_text() if place.exists() else ""
        done = curve.read_text().count("\n") if curve.exists() else 0
        if here == when and done >= batches or (when == "batch" and done > batches):
            return
        time.sleep(0.001)


def curves(folder: Path, ranks: int) -> list[dict[tuple[int, int], Any]]:
    """What each rank has written, by epoch and batch; the later where there are two."""
    found: list[dict[tuple[int, int], Any]] = []
    for rank in range(ranks):
        lines = map(json.loads, (folder / f"curve{rank}.jsonl").read_text().splitlines())
        found.append({(epoch, batch): rest for epoch, batch, *rest in lines})
    return found


def attempt(case: Case, reference: list[Any], seed: int) -> Outcome:
    """Interrupt, go on, compare."""
    with folder_for_a_run() as name:
        folder = Path(name)
        options = dict(case.options)
        if "env" in options:
            options["env"] = options["env"] | {"PATH": f"{_stub(folder)}:{os.environ['PATH']}"}
        outcome = interrupt(Case(**{**vars(case), "options": options}), folder, seed)
        ranks = options["devices"]
        before = curves(folder, ranks)
        rest = fork(folder, {k: v for k, v in options.items() if k not in ("launcher", "env")})
        if not rest.wait() or any(rest.codes):
            outcome.faults.append(f"resuming: {rest.codes}: {rest.log.read_text()[-1500:]}")
        after = curves(folder, ranks)
        if any(curve != reference[rank] for rank, curve in enumerate(after)):
            outcome.faults.append("the curve differs from that of an undisturbed run")
        if any(before[0].keys() != curve.keys() for curve in before):
            outcome.faults.append("the ranks ended at different batches")
        if len(before[0]) >= len(reference[0]):
            outcome.faults.append("the run was over before the signal counted")
        return outcome


def _stub(folder: Path) -> Path:
    script = folder / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.log\n')
    script.chmod(0o755)
    return script.parent


def undisturbed(options: dict[str, Any]) -> list[Any]:
    """The curve of a run that nobody disturbs."""
    kept = {k: v for k, v in options.items() if k not in ("launcher", "env", "saves")}
    with folder_for_a_run() as name:
        run = fork(Path(name), kept | {"pause_s": 0.0})
        if not run.wait() or any(run.codes):
            raise RuntimeError(run.log.read_text()[-3000:])
        return curves(Path(name), options["devices"])


# What the votes of a batch cost ------------------------------------------------------------------


def cost(rank: int, ranks: int, port: int, rounds: int) -> dict[str, float]:
    """Microseconds of a settlement and of Lightning's broadcast, in turns."""
    from lightning_megatron.comm.votes import PerBatchVotes

    if ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, rank=rank, world_size=ranks)
    votes = PerBatchVotes()
    cast = [votes.register(name) for name in ("stop signal", "loss", "norm")]
    votes.start(None)

    def ours() -> None:
        for vote in cast:
            vote.put(1.0)
        votes.settle()

    def lightnings() -> None:  # as `_TrainingEpochLoop._broadcast_sigterm_tensor`
        if ranks > 1:
            flag = torch.tensor([0], device="cpu")
            dist.broadcast(flag, src=0)
            flag.item()

    times: dict[str, list[float]] = {"votes": [], "broadcast": []}
    for _ in range(rounds):
        for name, act in (("votes", ours), ("broadcast", lightnings)):
            if ranks > 1:
                dist.barrier()
            begun = time.perf_counter()
            act()
            times[name].append(1e6 * (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_cost() -> dict[str, Any]:
    """For one, two and four processes, as the first rank sees it."""
    found = {}
    for ranks in (1, 2, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(1, ranks):
            if not (pid := os.fork()):
                torch.set_num_threads(1)
                cost(rank, ranks, port, 500)
                os._exit(0)
            pids.append(pid)
        with tempfile.NamedTemporaryFile() as answer:
            if not (pid := os.fork()):
                torch.set_num_threads(1)
                Path(answer.name).write_text(json.dumps(cost(0, ranks, port, 500)))
                os._exit(0)
            for each in (*pids, pid):
                os.waitpid(each, 0)
            found[str(ranks)] = json.loads(Path(answer.name).read_text())
    return found


# The table ----------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "# A signal ends a run, and it goes on as if nothing had been",
        "",
        "`python -m benchmarks.preemption`: a try is good if all ranks ended with exit code 143,",
        "one step was saved, and every step before and after the interruption is, to the bit, that",
        "of an undisturbed run. Seconds are from the signal to the end of the last process. Two",
        f"cores with other work on them, gloo, torch {torch.__version__}.",
        "",
        "| case | good | median s | longest s |",
        "|---|---|---|---|",
    ]
    for name, row in results["cases"].items():
        seconds = row["seconds"]
        good = f"{row['good']} of {row['tries']}"
        lines.append(f"| {name} | {good} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    if "cost_us" in results:
        lines += [
            "",
            "What a batch pays, in microseconds on rank 0 (median of 500, in turns):",
            "",
            "| processes | votes: 3 numbers | Lightning's broadcast |",
            "|---|---|---|",
        ]
        for ranks, us in results["cost_us"].items():
            lines.append(f"| {ranks} | {us['votes']:.0f} | {us['broadcast']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases asked for and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="part of a case's name")
    parser.add_argument("--tries", type=int, help="instead of each case's own")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(Path(arguments.train[0]), json.loads(arguments.train[1]))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    if arguments.cost:
        results["cost_us"] = measure_cost()
        _keep(results)
        return
    references: dict[str, Any] = {}
    for name, case in CASES.items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        kind = json.dumps({k: v for k, v in case.options.items() if k not in ("launcher", "env")})
        if kind not in references:
            references[kind] = undisturbed(case.options)
        tries = arguments.tries or case.tries
        outcomes = [attempt(case, references[kind], seed) for seed in range(tries)]
        good = sum(not outcome.faults for outcome in outcomes)
        print(f"{name}: {good} of {tries}, longest {max(o.seconds for o in outcomes):.1f} s")
        for outcome in outcomes:
            for fault in outcome.faults:
                print("  ", fault)
        seconds = [round(outcome.seconds, 2) for outcome in outcomes]
        results["cases"][name] = {"good": good, "tries": tries, "seconds": seconds}
        _keep(results)


def _keep(results: dict[str, Any]) -> None:
    order = {name: results["cases"][name] for name in CASES if name in results["cases"]}
    results["cases"] = order
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
