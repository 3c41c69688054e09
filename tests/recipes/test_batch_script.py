"""The batch script of the recipe `fault-tolerant`, with stand-ins for Slurm's commands."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.recipes.dry_run import RECIPES, dry_run, problems

SCRIPT = RECIPES / "fault-tolerant.sbatch"


def run(folder: Path, code: int, **slurm: str) -> tuple[int, list[str], list[str]]:
    """Exit code of the script, what it gave to srun, and what to scontrol.

    Args:
        folder: for the stand-ins.
        code: exit code of srun.
        slurm: variables that Slurm sets.
    """
    for name, end in (("srun", code), ("scontrol", 0)):
        stand_in = folder / name
        stand_in.write_text(f'#!/bin/bash\nprintf "%q " "$@" > {folder}/{name}.args\nexit {end}\n')
        stand_in.chmod(0o755)
        (folder / f"{name}.args").unlink(missing_ok=True)
    sizes = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **sizes, **slurm}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=240, check=False)
    given = [
        shlex.split((folder / f"{name}.args").read_text())
        if (folder / f"{name}.args").exists()
        else []
        for name in ("srun", "scontrol")
    ]
    return done.returncode, given[0], given[1]


def test_its_command_is_legal_for_the_tasks_that_slurm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in SCRIPT.read_text().splitlines()
        if line.startswith("#SBATCH --")
    )
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["signal"].startswith("USR1@")
    code, command, requeued = run(
        tmp_path,
        0,
        SLURM_NNODES=asked["nodes"],
        SLURM_NTASKS_PER_NODE=asked["ntasks-per-node"],
    )
    assert (code, requeued) == (0, [])
    begin = command.index("lightning-megatron")
    assert command[begin + 1 : begin + 4] == ["fit", "--config", "fault-tolerant.yaml"]
    monkeypatch.chdir(tmp_path)
    cli = dry_run("fault-tolerant", *command[begin + 4 :], "--trainer.accelerator=cpu")
    assert cli.trainer.world_size == 16
    assert problems(cli) == []


@pytest.mark.parametrize(
    ("code", "restarts", "requeues"),
    [(0, "0", False), (143, "0", False), (1, "0", True), (86, "4", True), (1, "5", False)],
)
def test_failures_go_back_into_the_queue_five_times(
    tmp_path: Path, code: int, restarts: str, requeues: bool
) -> None:
    ended, _, scontrol = run(tmp_path, code, SLURM_RESTART_COUNT=restarts)
    assert ended == code
    assert scontrol == (["requeue", "7"] if requeues else [])
