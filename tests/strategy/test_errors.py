"""A rank that fails ends the job, with its own traceback first.

How long that takes a command is measured in `tests/launched`.
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import PipelineConfig
from lightning_megatron.errors import CheckpointError
from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, samples

PATIENCE_S = 90.0
"""Ranks that wait for ever are told from those of a busy machine."""


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
            time.sleep(3600)  # a peer that will not notice by itself
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
    """Fail on a rank; the others are ``busy`` in the launched tests alone."""
    here = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    data = loader(Mined(place == "dataset" and here == rank), dp=dp_of(devices, layout))
    make_trainer(layout, devices).fit(Explosive(place, rank, busy), data)


def _rank_of(place: str) -> int:
    """The first stage feeds inputs with gradients; the loss is the last stage's."""
    return {"loss": 1, "dataset": 0, "optimizer": 3}.get(place, 2)


def explode_and_exit(*args: Any) -> None:
    """As a script ends: the process goes, and its connections with it."""
    try:
        explode(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def check(error: WorkerError, ranks: int, place: str, rank: int) -> None:
    failures = {found.rank: found for found in error.failures}
    assert f"boom in {place}" in failures[rank].output
    assert {rank: f.summary for rank, f in failures.items()} == dict.fromkeys(
        range(ranks), "the process ended with exit code 1"
    )


@pytest.mark.parametrize(
    "place",
    [
        "loss",
        "dataset",
        "optimizer",
        # Two ranks meet these, below.
        *(pytest.param(place, marks=pytest.mark.thorough) for place in ("forward", "backward")),
    ],
)
def test_an_exception_on_one_rank_ends_all(pool: WorkerPool, place: str) -> None:
    """Its peers fail too, instead of waiting for it."""
    rank = _rank_of(place)
    with pytest.raises(WorkerError) as failure:
        pool.run(4, explode_and_exit, {"pp": 2}, 4, place, rank, grace=PATIENCE_S)
    check(failure.value, 4, place, rank)


OTHERS = [name for name in SCHEDULES if name != "1f1b"]
# Every schedule meets one of the places, and every kind of schedule all of them.
IN_TURN = [(name, ("forward", "loss", "backward")[i % 3]) for i, name in enumerate(OTHERS)]
IN_TURN += [("zb-h1", "forward"), ("zb-h1", "loss"), ("zb-h1", "backward")]
IN_TURN += [("1f1b", "forward"), ("1f1b", "backward")]


@pytest.mark.parametrize(
    ("schedule", "place"),
    [
        *dict.fromkeys(IN_TURN),
        *(
            pytest.param(name, place, marks=pytest.mark.thorough)
            for name in OTHERS
            for place in ("forward", "loss", "backward")
            if (name, place) not in IN_TURN
        ),
    ],
)
def test_an_exception_ends_every_schedule(pool: WorkerPool, schedule: str, place: str) -> None:
    """With a cause that is not a broken connection."""
    v_shaped = make_schedule(schedule, 2, 1).last_stage_rank == 0
    # Rank 0 holds the last stage, and the first as well where stages form a V.
    rank = {"forward": 1, "loss": 0, "backward": 0 if v_shaped else 1}[place]
    layout = {"pp": PipelineConfig(degree=2, schedule=schedule), "num_microbatches": 4}
    with pytest.raises(WorkerError) as failure:
        pool.run(2, explode_and_exit, layout, 2, place, rank, grace=PATIENCE_S)
    check(failure.value, 2, place, rank)


def resume_from_nothing() -> bool | None:
    with pytest.raises(CheckpointError, match="no such checkpoint") as failure:
        make_trainer({}, 2).fit(Small(), loader(dp=2), ckpt_path="nowhere.ckpt")
    return failure.value.told_by_rank_0


def test_a_rank_knows_that_rank_0_fails_with_the_same(pool: WorkerPool) -> None:
    """So that a mistake is told once, whatever the number of processes."""
    assert pool.run(2, resume_from_nothing) == [None, True]
