"""Ranks know of each other once a batch, before the update."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.errors import ConfigError
from lightning_megatron.strategy.processes.connection import ConnectionConfig
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategy.small import LAYOUTS, Small, dp_of, loader, make_trainer


class Telling(pl.Callback):
    """Puts numbers and notes what comes back, and when."""

    def __init__(self, *names: str) -> None:
        self.names = names or ("losses", "others")
        self.seen: list[Any] = []

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        assert isinstance(trainer.strategy, MegatronStrategy)
        votes = trainer.strategy.votes
        self.votes = [votes.register(name, default=-1.0) for name in self.names]
        votes.on_settled(self.note)
        self.step = lambda: trainer.global_step

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self.votes[0].put(-9.0)
        self.votes[0].put(10.0 * trainer.fit_loop.epoch_loop.batch_idx + trainer.global_rank)

    def note(self) -> None:
        self.seen.append((self.step(), *(vote.values for vote in self.votes)))


def tell(layout: Mapping[str, Any], devices: int, **options: Any) -> list[Any]:
    telling = Telling()
    trainer = make_trainer(layout, devices, callbacks=[telling], **options)
    module = Small()
    module.automatic_optimization = layout.get("zero") != 1
    if not module.automatic_optimization:
        module.training_step = by_hand.__get__(module)  # type: ignore[method-assign]
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    return telling.seen


def by_hand(module: Small, batch: Any, batch_idx: int) -> None:
    """Two backwards in a batch, none in the last."""
    optimizer: Any = module.optimizers()
    for _ in range(2 * (batch_idx < 3)):
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
    optimizer.step()


@pytest.mark.parametrize("layout", ["one process, 4 microbatches", "pp=2", "dp=2", "pp=2 x dp=2"])
def test_every_rank_sees_what_all_have_put_before_each_update(
    pool: WorkerPool, layout: str
) -> None:
    """Once a batch, whatever runs it; ``dp=2`` optimizes by hand, with two backwards a batch."""
    devices, options = LAYOUTS[layout]
    by_rank = pool.run(devices, tell, options, devices, accumulate_grad_batches=1)
    others = (-1.0,) * devices
    by_hand = layout == "dp=2"
    expected = [(b, tuple(10.0 * b + rank for rank in range(devices)), others) for b in range(4)]
    if by_hand:  # the last batch has no backward: what the second one of the batch before has put
        expected[-1] = (4, expected[-2][1], others)
    assert by_rank == [expected] * devices


def tell_and_save(folder: str) -> list[Any]:
    """Where the default group is not gloo's, as this one pretends."""
    pretending = SimpleNamespace(**{**vars(dist), "get_backend": lambda: "nccl"})
    with patch("lightning_megatron.strategy.processes.processes.dist", pretending):
        telling = Telling()
        options = {
            "zero": 3,
            "checkpoint": CheckpointConfig(mode="async"),
            "connection": ConnectionConfig(timeout_s=77.0),
        }
        trainer = make_trainer(options, 4, callbacks=[telling], accumulate_grad_batches=1)
        trainer.fit(Small(), loader(dp=4))
        trainer.save_checkpoint(folder)
        group = trainer.strategy.host_group  # type: ignore[attr-defined]
        assert dist.get_backend(group) == "gloo"
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77.0
        make_trainer(options, 4).fit(Small(), loader(dp=4), ckpt_path=folder)
        return telling.seen


def test_so_it_is_over_a_group_of_the_hosts(pool: WorkerPool, tmp_path: Path) -> None:
    expected = [(b, tuple(10.0 * b + rank for rank in range(4)), (-1.0,) * 4) for b in range(4)]
    assert pool.run(4, tell_and_save, str(tmp_path / "saved")) == [expected] * 4


def numbers_of_all() -> list[Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    votes, found = PerBatchVotes(), list[Any]()
    votes.start(dist.new_group())
    first, second = votes.register("a"), votes.register("b")
    drawn = torch.get_rng_state()
    for value in (1.0, math.inf, math.nan):
        first.put(-value if rank else value)
        second.put(rank)
        votes.settle()
        found.append((first.max, second.max, second.values))
    assert torch.equal(drawn, torch.get_rng_state())
    return found


def test_the_largest_of_numbers_that_are_not_finite(pool: WorkerPool) -> None:
    inf, values = math.inf, (0.0, 1.0, 2.0)
    for *finite, (worst, second, of_all) in pool.run(3, numbers_of_all):
        assert finite == [(1.0, 2.0, values), (inf, 2.0, values)]
        assert math.isnan(worst)
        assert (second, of_all) == (2.0, values)


def test_batches_that_do_not_step_are_settled_as_well(pool: WorkerPool) -> None:
    [seen, _] = pool.run(2, tell, {"zero": 2}, 2, accumulate_grad_batches=3)
    assert [step for step, *_ in seen] == [0, 0, 0, 1]
    assert [values for _, values, _ in seen] == [(10.0 * b, 10.0 * b + 1) for b in range(4)]


def differ(rank_dependent: bool) -> None:
    rank = int(os.environ["RANK"])
    telling = Telling("one", f"rank {rank * rank_dependent}")
    make_trainer({"zero": 0}, 2, callbacks=[telling]).fit(Small(), loader(dp=2))


def test_ranks_that_exchange_different_things_are_told(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as failure:
        pool.run(2, differ, True, grace=30.0)
    for found in failure.value.failures:
        assert isinstance(found.exception, ConfigError)
        assert "rank 1" in str(found.exception)


def test_a_slot_alone() -> None:
    votes = PerBatchVotes()
    votes.start(None)
    vote = votes.register("x")
    assert votes.register("x") is vote
    vote.put(math.nan)
    votes.settle()
    assert math.isnan(vote.max)
    vote.put(2)
    votes.settle()
    assert (vote.values, vote.max) == ((2.0,), 2.0)
    votes.settle()
    assert vote.values == (0.0,)


def test_a_number_that_is_none_is_the_largest() -> None:
    vote = PerBatchVotes().register("loss")
    for values in ((math.nan, 1.0), (1.0, math.nan)):
        vote.settle(values)
        assert math.isnan(vote.max)
