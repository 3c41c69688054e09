"""Starts of trainings on one machine of several: ``python -m tests.machines.starting NODE JSON``.

The JSON is ``{"folder": ..., "nodes": ..., "cases": [...]}``. A case has a ``name``, and by node:
``env``, variables; ``layout``, options of the strategy; ``trainer``, options of the Trainer;
``connection``; ``dirpath``, where checkpoints go; ``by_hand``, where the script saves one itself.
The processes of a case are forked from this one, which has everything imported, at the same time on
all machines. A JSON line tells how each ended: case, exit code, and output. With ``train``
in place of the node, and one case as JSON, the process itself trains, as a worker of torchrun.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_megatron import ConnectionConfig, MegatronStrategy
from tests.fault_tolerance.hangs.sockets import listening_addresses
from tests.strategy.small import Small, samples

LIMIT_S = 200.0


class Listening(pl.Callback):
    """Says where the process listens."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            print("listens", json.dumps(listening_addresses()), flush=True)


def train(case: dict[str, Any], node: int) -> None:
    def given(name: str) -> Any:
        value = case.get(name, {})
        return value[node] if isinstance(value, list) else value

    os.environ.update(given("env"))
    callbacks: list[pl.Callback] = [Listening()]
    if given("dirpath"):
        callbacks.append(
            pl.callbacks.ModelCheckpoint(dirpath=given("dirpath"), every_n_train_steps=1)
        )
    connection = ConnectionConfig(**{"init_timeout_s": 10 * LIMIT_S, **given("connection")})
    options = {"num_nodes": 2, "devices": 1, "max_steps": 2, **given("trainer")}
    trainer = pl.Trainer(
        strategy=MegatronStrategy(**given("layout"), connection=connection),
        accelerator="cpu",
        precision="64-true",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(given("dirpath")),
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Small(), DataLoader(samples(), batch_size=4))
    if given("by_hand"):
        trainer.save_checkpoint(given("by_hand"))
    print("trained to step", trainer.global_step, flush=True)


def start(case: dict[str, Any], node: int, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            train(case, node)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def await_others(folder: Path, nodes: int, node: int, name: str) -> None:
    (folder / f"{name}-{node}").touch()
    until = time.monotonic() + LIMIT_S
    while not all((folder / f"{name}-{n}").exists() for n in range(nodes)):
        assert time.monotonic() < until, f"a machine is missing in {name}"
        time.sleep(0.02)


def main() -> None:
    if sys.argv[1] == "train":  # under torchrun
        train(json.loads(sys.argv[2]), int(os.environ["GROUP_RANK"]))
        return
    node, given = int(sys.argv[1]), json.loads(sys.argv[2])
    folder = Path(given["folder"])
    for number, case in enumerate(given["cases"]):
        await_others(folder, given["nodes"], node, f"case{number}")
        log, begun = folder / f"log{number}-{node}", time.monotonic()
        pid = start(case, node, log)
        ended, status = 0, 0
        while not ended and time.monotonic() - begun < LIMIT_S:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        line = {
            "case": case["name"],
            "code": os.waitstatus_to_exitcode(status),
            "output": log.read_text(errors="replace"),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
