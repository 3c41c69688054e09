"""A run that is written by hand: three attempts, faults of all kinds, known times."""

import json
import math
import random
from pathlib import Path
from typing import Any

from lightning_megatron.run_log.events import event_file

START = 1_760_000_000.0


class Clock:
    def __init__(self) -> None:
        self.t = START


def write_run(  # noqa: C901 (a history has many turns)
    directory: Path,
    *,
    steps: int = 400,
    ranks: int = 4,
    step_s: float = 0.5,
    end: str | None = "completed",
    run: str = "5f3c9a1e77d04b21",
) -> None:
    """Write the events of a run.

    It is killed (rank 1 first) at 40 % of its steps, goes on from 30 %, hangs at 70 %, fails, goes
    on from 60 %, sees a number that is none at 80 %, and ends as ``end`` says.
    """
    lines: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    random.seed(1)
    clock, attempt = Clock(), 0

    def write(kind: str, step: int, only: int | None = None, **fields: Any) -> None:
        after = clock.t - START
        tail = f'"run":"{run}","attempt":{attempt},"step":{step},"kind":"{kind}"'
        tail += "".join(f',"{k}":{json.dumps(v)}' for k, v in fields.items()) + "}"
        for rank in range(ranks) if only is None else [only]:
            t = clock.t + 0.001 * rank
            lines[rank].append(f'{{"v":1,"t":{t:.6f},"mono":{after:.6f},"rank":{rank},{tail}')

    def start(first: int) -> None:
        layout = {"pp": 2, "dp_replicate": 1, "dp_shard": ranks // 4, "cp": 1, "tp": 2}
        for rank in range(ranks):
            fields = {"host": f"node-{rank // 2}", "pid": 4000 + rank, "world": ranks}
            more = {"strategy": "MegatronStrategy", "device": "cpu", "torch": "2.13.0"}
            write("start", first, rank, layout=layout, max_steps=steps, **fields, **more)
        clock.t += 6
        if first:
            path = f"runs/step={first}.ckpt"
            write("verified", 0, path=path, seconds=0.75, bytes=1_200_000_000)
            write("resumed", first, checkpoint=f"runs/step={first}.ckpt", from_step=first)

    def train(first: int, last: int, dead: int | None = None) -> None:
        for step in range(first + 1, last + 1):
            slow = 1.0 + 0.1 * random.random() + (3.0 if random.random() < 0.004 else 0.0)
            clock.t += step_s * slow
            loss: Any = 5.5 * math.exp(-2.2 * step / steps) + 0.4 + 0.08 * random.gauss(0, 1)
            if step == int(0.8 * steps):
                loss = "NaN"
            for rank in range(ranks):
                if rank == dead and step == last:
                    continue
                data = step_s * (0.02 if rank != 3 else 0.09)
                sections = {"data": data, "forward": step_s * 0.33, "backward": step_s * 0.6}
                sections["optimizer"] = step_s * slow - sum(sections.values())
                seconds = round(step_s * slow, 6)
                write(
                    "step", step, rank, seconds=seconds, tokens=8192, loss=loss, sections=sections
                )
            if step % max(steps // 10, 1) == 0:
                save(step)
            if step % max(steps // 5, 1) == 0:
                metrics = {
                    "perf/tokens_per_s": 16384.0 * ranks,
                    "perf/mfu": 0.412,
                    "optim/lr": 3e-4,
                }
                for rank in range(ranks):
                    memory = {"peak_rss_gib": 1.5 + (0.9 if rank == 2 else 0.0)}
                    write("window", step, rank, metrics=metrics, memory=memory)
                clock.t += 4 * step_s
                write(
                    "validation",
                    step,
                    seconds=4 * step_s,
                    metrics={"val_loss": loss, "val_acc": 0.5},
                )

    def save(step: int) -> None:
        bad = step == int(0.5 * steps)
        error = "step.ckpt: No space left on device: needs 1.2 GB, 0.3 GB are free" if bad else None
        clock.t += 0.2 * step_s
        fields = {"path": f"runs/step={step}.ckpt", "seconds": 1.4, "stall": 0.2 * step_s}
        write("save", step, **fields, bytes=0 if bad else 1_234_567_890, ok=not bad, error=error)

    start(0)
    train(0, int(0.4 * steps), dead=1)
    clock.t += 9
    attempt = 1
    start(int(0.3 * steps))
    train(int(0.3 * steps), int(0.7 * steps))
    clock.t += 7
    at, about = int(0.7 * steps), {"section": "forward", "rank_of_fault": 2, "seconds": 7.0}
    report = str(directory / "hangs" / "hang-1.txt")
    write("hang", at, report=report, detail="no section was entered", action="abort", **about)
    clock.t += 1
    write("end", at, 2, status="failed", exit_code=1, error="HangError: rank 2 hangs in forward")
    clock.t += 0.2
    write("end", at, status="failed", exit_code=1, error="RuntimeError: Connection closed by peer")
    clock.t += 5
    attempt = 2
    start(int(0.6 * steps))
    train(int(0.6 * steps), int(0.8 * steps))
    detail, at = "the loss is NaN <b>on rank 1</b>", int(0.8 * steps)
    write(
        "fault",
        at,
        what="loss",
        rank_of_fault=[1],
        section="backward",
        detail=detail,
        action="skip",
    )
    alert = {"rule": "perf/mfu < 0.5 for 20", "metric": "perf/mfu", "value": 0.41}
    write("alert", at, 0, **alert, resolved=False)
    train(int(0.8 * steps), steps)
    if end is not None:
        clock.t += 1
        write("end", steps, status=end, exit_code=0)
    for rank, texts in lines.items():
        path = event_file(directory, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts) + "\n")
    (directory / "hangs").mkdir(exist_ok=True)
    dump = 'rank 2 hangs in forward\n  File "train.py", line 12 in <module>\npassword=hunter2\n'
    (directory / "hangs" / "hang-1.txt").write_text(dump + "frame\n" * 200)
