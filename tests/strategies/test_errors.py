"""A rank that fails ends the job, with its own traceback first."""

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategies.small import Small, dp_of, loader, make_trainer, samples

ROOT = Path(__file__).parents[2]
PLACES = ("forward", "loss", "backward", "dataset", "optimizer")


class Explosion(Exception):
    """What goes wrong."""


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Explosion("boom in backward")


class Explosive(Small):
    """Fails on one rank, in the second batch."""

    def __init__(self, place: str, rank: int, busy: bool = False) -> None:
        super().__init__()
        self.place, self.rank, self.busy = place, rank, busy

    def _maybe(self, place: str) -> None:
        if self.place == place and self.trainer.global_rank == self.rank and self.global_step:
            raise Explosion(f"boom in {place}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._maybe("forward")
        if self.busy and batch_idx == 1:
            time.sleep(60)  # a peer that will not notice by itself
        x = batch[0]
        if self.place == "backward" and self.trainer.global_rank == self.rank and batch_idx:
            x = _Fuse.apply(x.requires_grad_())
        loss = torch.nn.functional.mse_loss(self.net(x), batch[1])
        self._maybe("loss")
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._maybe("optimizer")
        super().optimizer_step(*args, **kwargs)


class Mined(Dataset[Any]):
    def __init__(self, fails: bool) -> None:
        self.data, self.fails = samples(), fails

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.fails and index >= 16:
            raise Explosion("boom in dataset")
        return self.data[index]


def explode(
    layout: Mapping[str, Any], devices: int, place: str, rank: int, busy: bool = False
) -> None:
    here = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    data = loader(Mined(place == "dataset" and here == rank), dp=dp_of(devices, layout))
    make_trainer(layout, devices).fit(Explosive(place, rank, busy), data)


def _rank_of(place: str) -> int:
    """The first stage feeds inputs with gradients; the loss is the last stage's."""
    return {"loss": 3, "dataset": 2, "optimizer": 1}.get(place, 0)


def explode_and_exit(*args: Any) -> None:
    """As a script ends: the process goes, and its connections with it."""
    try:
        explode(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_all(pool: WorkerPool, place: str) -> None:
    """Its peers fail too, instead of waiting for it."""
    rank = _rank_of(place)
    with pytest.raises(WorkerError) as failure:
        pool.run(4, explode_and_exit, {"pp": 2}, 4, place, rank)
    failures = {found.rank: found for found in failure.value.failures}
    assert f"boom in {place}" in failures[rank].output
    assert {rank: f.summary for rank, f in failures.items()} == dict.fromkeys(
        range(4), "the process ended with exit code 1"
    )


SCRIPT = """
from tests.strategies.test_errors import explode
explode({"pp": 2}, 2, %r, %r, %r)
print("finished")
"""


@pytest.mark.parametrize(
    ("launcher", "place", "rank", "busy"),
    [
        ("subprocess", "loss", 1, False),
        ("subprocess", "forward", 0, True),
        ("torchrun", "forward", 0, True),
    ],
)
def test_an_exception_on_one_rank_ends_the_job_within_ten_seconds(
    launcher: str, place: str, rank: int, busy: bool, tmp_path: Path
) -> None:
    """As a user meets it: one command, which ends with the failing rank's traceback."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % (place, rank, busy))
    starter = [sys.executable]
    if launcher == "torchrun":
        starter += ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    with subprocess.Popen(
        [*starter, str(script)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        text, exploded = "", 0.0
        # The output ends when the last process has closed its end of the pipe.
        for line in process.stdout:
            text += line
            if "Explosion: boom" in line and not exploded:
                exploded = time.monotonic()
        code = process.wait(60)
    assert exploded, text
    # On a machine so busy that the start took longer, the end may as well.
    assert time.monotonic() - exploded < max(10, exploded - begun)
    assert code != 0
    assert "finished" not in text
    assert re.search(rf'in training_step\n.*self._maybe\("{place}"\)', text)
